"""A file system that hangs before a campaign begins on it: a real mount without a server."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from campaigns import Campaign, wait_for
from mounts import hanging, needs_root
from soak import soaked

pytestmark = needs_root


@pytest.mark.parametrize("key", ["run_dir", soaked("checkpoint.tiers")])
def test_a_command_on_a_file_system_that_hangs_says_so_and_can_be_stopped(
    counting: Callable[..., Campaign], tmp_path: Path, key: str
) -> None:
    durable = tmp_path / "durable"
    run = counting(steps=10)
    tiers = f"checkpoint.tiers=[{{name: durable, path: {durable / 'c'}}}]"
    hangs = run.run_dir if key == "run_dir" else durable
    hangs.mkdir()
    with hanging(hangs):
        run.start(tiers)
        wait_for(
            lambda: "has not answered for 2 s; it is waited for 900 s" in (run.directory / "output").read_text(), "a word about it"
        )
        run.signal(signal.SIGTERM)
        assert run.wait() == 75
    assert f"resilient: {key}: the file system of {hangs}" in run.output
    assert run.run(tiers) == 0


def test_a_run_directory_that_does_not_answer_is_waited_for_as_long_as_one_that_cannot_be_written(
    counting: Callable[..., Campaign],
) -> None:
    run = counting(steps=10, resilience={"run_dir_patience_s": 1})
    run.run_dir.mkdir()
    with hanging(run.run_dir):
        assert run.run() == 69
    assert f"resilient: run_dir: the file system of {run.run_dir} has not answered for 1 s\n" in run.output
