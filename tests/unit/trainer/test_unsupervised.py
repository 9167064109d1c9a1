"""The trainer without a supervisor: alone or under torchrun, also in a run directory that a supervisor has worked in."""

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import forked
from trainer_ranks import trained, write_config

from checkpoint.fence import raise_fence
from resilient.driver.lease import RunLease


def saved(told: list[dict[str, object]]) -> list[object]:
    return [line["step"] for line in told if line["event"] == "committed"]


def test_a_run_that_a_supervisor_has_trained_is_trained_on(dataset: Path, tmp_path: Path):
    config = write_config(tmp_path, dataset)
    assert saved(trained(config, 2, "train.steps=2")) == [2]
    raise_fence(tmp_path / "run/checkpoints", 3)  # as each of its generations does
    assert saved(trained(config, 2, "train.steps=4")) == [4]


def command(words: list[str], errors: str, file_bytes: int) -> None:
    """`python -m trainer`, with what it says of errors in a file. Args: file_bytes: that a file may have; -1 for any number."""
    from trainer.__main__ import main

    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.argv = ["trainer", *words]
    sys.exit(main())


@pytest.fixture
def ended(tmp_path: Path) -> Iterator[object]:
    def run(*words: object, file_bytes: int = resource.RLIM_INFINITY) -> tuple[int | None, str]:
        errors = tmp_path / "errors"
        errors.unlink(missing_ok=True)
        process = forked(command, [str(word) for word in words], str(errors), file_bytes)
        process.join()
        return process.exitcode, errors.read_text()

    return run


def test_the_command_ends_with_the_codes_of_a_supervised_run_and_a_line(dataset: Path, tmp_path: Path, ended):
    config = write_config(tmp_path, dataset, train={"steps": 2})
    assert ended(config)[0] == 0
    assert ended(config, "train.steps=400", "train.exit_duration_min=1e-9")[0] == 75, "stopped early, and can be gone on from"
    status, said = ended(config, "train.steps=400", "model.ffn_hidden=64")
    assert status == 70 and "mlp" in said.splitlines()[-1] and "Traceback" not in said
    status, said = ended(config, "train.micro_batch_size=0")
    assert status == 78 and "train.micro_batch_size" in said


def test_a_run_directory_that_a_supervisor_works_in_is_not_touched(dataset: Path, tmp_path: Path, ended):
    config = write_config(tmp_path, dataset, train={"steps": 2})
    (tmp_path / "run").mkdir()
    lease = RunLease(tmp_path / "run")
    try:
        status, said = ended(config)
    finally:
        lease.close()
    assert status == 69 and f"in use by pid {os.getpid()}" in said and "Traceback" not in said
    assert not (tmp_path / "run/config.yaml").exists()


def test_a_checkpoint_that_cannot_be_saved_ends_the_command_with_69_and_a_line(dataset: Path, tmp_path: Path, ended):
    config = write_config(tmp_path, dataset, train={"steps": 2}, logging={"level": "error"})
    (tmp_path / "file").write_text("")
    status, said = ended(config, f"checkpoint.tiers=[{{name: durable, path: {tmp_path}/file}}]")
    assert status == 69 and said.count("\n") == 1 and f"{tmp_path}/file" in said and "Not a directory" in said
    status, said = ended(config, file_bytes=6 << 10)
    assert status == 69 and f"{tmp_path}/run/checkpoints" in said.splitlines()[-1] and "File too large" in said
    assert "Traceback" not in said
