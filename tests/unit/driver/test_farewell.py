"""What `resilient run` says at the end of a campaign."""

import errno
import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from resilient import ledger
from resilient.config import Config, settle
from resilient.driver.command import run_command
from resilient.driver.driver_log import DriverLog
from resilient.driver.ending import Ending
from resilient.driver.farewell import farewell, greeting, looked_back, sequel
from resilient.exits import Exit
from resilient.past.fold import Past
from resilient.run_words import Told
from resilient.slurm.queue import QueuedJob
from resilient.status import overview


@pytest.mark.parametrize(
    ("skipped", "val_loss", "but"),
    [
        ([], 2.5, ""),
        ([1, 2], 2.5, ""),
        ([3], 2.5, ", but the last batch was bad and skipped"),
        ([1, 2, 3], math.nan, ", but the last 3 batches were bad and skipped and the last validation loss is not finite"),
        ([], math.inf, ", but the last validation loss is not finite"),
    ],
)
def test_a_campaign_that_is_done_says_what_speaks_against_its_weights(
    tmp_path: Path, skipped: list[int], val_loss: float, but: str
):
    config = Config.model_validate({"name": "run", "run_dir": str(tmp_path), "train": {"steps": 3}})
    with ledger.Ledger(tmp_path) as written:
        written.event("run_started", {"name": "run", "target_step": 3}, generation=0, t=1.0)
        for step in (1, 2, 3):
            if step in skipped:
                action = {"fault_id": f"batch-{step}", "name": "skip_batch", "reason": "", "step": step}
                written.event("action", {**action, "in_a_row": skipped.index(step) + 1}, generation=1, t=2.0)
            written.metrics({"step": step, "loss": 1.0}, generation=1, t=2.0)
        written.event("validation", {"step": 3, "val_loss": val_loss}, generation=1, t=3.0)
        written.event("run_finished", {"exit_code": 0, "step": 3}, generation=1, t=4.0)
    assert farewell(config, looked_back(tmp_path)) == f"run is done: 3 steps{but}; results are in {tmp_path}"
    assert overview(tmp_path).skipped == (len(skipped) if 3 in skipped else 0)


@pytest.mark.parametrize("code", [Exit.OK, Exit.GAVE_UP, Exit.CONFIG, Exit.STOPPED, Exit.UNUSABLE])
def test_the_last_line_of_a_chains_job_says_whether_another_job_waits(code: Exit):
    waits, none = sequel(code, [QueuedJob("101", "PENDING", reason="Dependency")]), sequel(code, [])
    goes_on = code in (Exit.STOPPED, Exit.UNUSABLE)
    assert waits == ("Job 101 goes on from here." if goes_on else None)
    assert none is not None and none.startswith("No job waits behind this one")
    assert ("`resilient submit` goes on" in none) == goes_on


@pytest.mark.parametrize(
    ("state", "reason"), [("PENDING", "JobHeldUser"), ("PENDING", "job requeued in held state"), ("REQUEUE_HOLD", "None")]
)
def test_the_last_line_says_that_the_job_that_waits_is_held(state: str, reason: str):
    found = sequel(Exit.STOPPED, [QueuedJob("101", state, reason=reason)])
    assert found == "Job 101 is held: it goes on from here after `scontrol release 101`."


def test_outside_of_a_chain_the_same_command_goes_on_from_a_stop():
    assert [sequel(code, None) for code in (Exit.OK, Exit.STOPPED)] == [None, "The same command goes on from here."]


def test_a_script_is_named_on_one_line_whatever_its_words_are():
    config = Config(entrypoint="train.py 'two\nlines\x1b[2J'", run_dir=Path("/r"))
    found = greeting(config, settle(config, 1))
    assert found == "run: train.py 'two lines\N{REPLACEMENT CHARACTER}[2J': 1 rank on 1 node, in /r"


def test_a_run_directory_with_brackets_in_its_name_is_told_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        json.dumps({"name": "gpt", "run_dir": f"{tmp_path}/[x]:key:", "cluster": {"procs_per_node": 1, "device": "cpu"}})
    )
    monkeypatch.setattr("resilient.driver.command.already_reached", lambda _: 300)
    before = os.umask(0o077)
    try:
        assert run_command(Told(file, ()), None, DriverLog()) is Exit.OK
    finally:
        os.umask(before)
    assert f"is in {tmp_path}/[x]:key:" in capfd.readouterr().out


@pytest.mark.parametrize(("words", "runs"), [(["run_started"], True), (["run_started", "run_finished"], False), ([], False)])
def test_a_job_that_died_behind_its_last_checkpoint_is_brought_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd, words: list[str], runs: bool
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"run_dir": f"{tmp_path}/run", "cluster": {"procs_per_node": 1, "device": "cpu"}}))
    (tmp_path / "run").mkdir()
    common = {"t": 1.0, "generation": 0, "host": "h", "exit_code": 0, "step": 300, "name": "run", "target_step": 300}
    lines = [{**common, "event": word} for word in words]
    (tmp_path / "run" / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr("resilient.driver.command.already_reached", lambda _: 300)
    ran = []
    monkeypatch.setattr("resilient.driver.command.run_campaign", lambda *_: (ran.append(1), Ending(Exit.OK, ""))[1])
    before = os.umask(0o077)
    try:
        assert run_command(Told(file, ()), None, DriverLog()) is Exit.OK
    finally:
        os.umask(before)
    assert bool(ran) is runs
    assert ("has reached its target" in capfd.readouterr().out) is not runs


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Ending], Exit]:
    """The command, whose campaign ends like that."""
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"name": "gpt", "run_dir": f"{tmp_path}/run", "cluster": {"procs_per_node": 1, "device": "cpu"}}))
    monkeypatch.setattr("resilient.driver.command.already_reached", lambda _: None)

    def command(ending: Ending) -> Exit:
        monkeypatch.setattr("resilient.driver.command.run_campaign", lambda *_: ending)
        before = os.umask(0o077)
        try:
            return run_command(Told(file, ()), None, DriverLog())
        finally:
            os.umask(before)

    return command


@pytest.mark.parametrize("broken", ["hangs", "fails"])
def test_a_campaign_that_is_done_is_done_whatever_its_run_directory_does_at_the_end(
    ends: Callable[[Ending], Exit], broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    answer = threading.Event()

    def read(run_dir: Path) -> Past:
        if broken == "fails":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(run_dir))
        assert answer.wait(10.0), "the command has waited for it"
        return Past()

    monkeypatch.setattr("resilient.past.record.read", read)
    monkeypatch.setattr("resilient.driver.farewell.LOOK_S", 0.2)
    try:
        assert ends(Ending(Exit.OK, "")) is Exit.OK
    finally:
        answer.set()
    assert f"gpt is done: 300 steps; results are in {tmp_path}/run" in capfd.readouterr().out


def test_a_run_directory_that_has_not_taken_all_is_not_read_for_the_last_words(
    ends: Callable[[Ending], Exit], monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    read: list[Path] = []
    monkeypatch.setattr("resilient.past.record.read", lambda run_dir: (read.append(run_dir), Past())[1])
    assert ends(Ending(Exit.OK, "the run directory could not be written to the end", written=False)) is Exit.OK
    assert not read and "gpt is done: 300 steps; results are in" in capfd.readouterr().out
