"""Whether campaigns make progress, as a login node or cron asks: by exit codes, and by a command that is told of changes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from stranger import UID, needs_root
from typer.testing import CliRunner

from resilient import ledger
from resilient.cli import app
from resilient.config import load
from resilient.driver.lease import RunLease
from resilient.exits import EnvironmentUnusable, Exit, Watched
from resilient.slurm.queue import QueuedJob
from resilient.slurm.succession import Succession
from resilient.status import inspect
from resilient.watch import command as watching
from resilient.watch import look as looking
from resilient.watch.command import Look, Wanted, watch
from resilient.watch.judgement import CODES, PATIENCE_S, STEPS, Judgement, Seen, judge, worst
from resilient.watch.look import judged, look
from resilient.watch.memory import Memory

ROOT = Path(__file__).parents[3]
NOW = 1_800_000_000.0
RUNS, WAITS = QueuedJob("7", "RUNNING"), QueuedJob("8", "PENDING", reason="Priority")
BEGUN = replace(RUNS, start_t=NOW - 4 * PATIENCE_S)
BASE = Seen("x", NOW, step=10, target_step=20, steps_t=(NOW - 9, NOW - 6, NOW - 3), started_t=NOW - 500)
LONG_AGO = (NOW - 3 * PATIENCE_S - 3, NOW - 3 * PATIENCE_S)

CASES: list[tuple[Seen, str, str]] = [
    (replace(BASE, driver="pid 1 on a"), "progressing", "step 10 of 20, 3 s since its last step, pid 1 on a"),
    (replace(BASE, driver="pid 1 on a", steps_t=LONG_AGO), "progressing", "8:20 since it was started"),  # a new job starts
    (replace(BASE, driver="pid 1 on a", steps_t=LONG_AGO, started_t=NOW - 9e9), "stalled", "no step for longer than 10:00"),
    (replace(BASE, driver="d", steps_t=(), started_t=NOW - 2 * PATIENCE_S), "progressing", "since it was started"),
    (replace(BASE, driver="d", steps_t=(), started_t=NOW - 4 * PATIENCE_S), "stalled", "since it was started"),
    (replace(BASE, driver="d", exit_code=75), "progressing", "since its last step"),
    (replace(BASE, exit_code=0), "reached", "the target is reached"),
    (replace(BASE, exit_code=0, chain=True, jobs=[WAITS]), "reached", "the target is reached"),
    (replace(BASE, exit_code=70), "gave up", "status 70"),
    (replace(BASE, exit_code=78), "gave up", "status 78"),
    (replace(BASE, exit_code=75), "stopped", "status 75"),
    (replace(BASE, exit_code=69), "dead", "status 69"),
    (BASE, "dead", "its driver is gone without a last word"),
    (replace(BASE, started_t=None, steps_t=(), step=0), "dead", "it has never started"),
    (replace(BASE, exit_code=75, chain=True, jobs=[WAITS]), "waits", "job 8 waits (Priority)"),
    (replace(BASE, chain=True, jobs=[RUNS, WAITS]), "waits", "job 7 starts"),
    (replace(BASE, chain=True, jobs=[BEGUN]), "waits", "job 7 starts"),
    (replace(BASE, chain=True, jobs=[BEGUN], now=NOW + 9e9), "stalled", "job 7 runs, and nobody works on it: "),
    (replace(BASE, chain=True, jobs=[replace(BEGUN, start_t=NOW - 9e9)]), "waits", "job 7 starts"),  # steps were finished since
    (replace(BASE, chain=True, jobs=[QueuedJob("7", "SUSPENDED")]), "waits", "job 7 is suspended (SUSPENDED)"),
    (replace(BASE, chain=True, jobs=[replace(BEGUN, state="STOPPED")], now=NOW + 9e9), "stalled", "job 7 is suspended (STOPPED)"),
    (replace(BASE, exit_code=75, chain=True, jobs=[]), "dead", "no job of its chain runs or waits"),
    (replace(BASE, exit_code=75, jobs=[]), "stopped", "status 75"),  # the chain is over
    (replace(BASE, chain=True, silent=True), "unknown", "Slurm does not say"),
]


@pytest.mark.parametrize(("seen", "state", "text"), CASES)
def test_a_campaign_is_judged_by_what_is_seen(seen: Seen, state: str, text: str):
    found = judge(seen)
    assert found.state == state and text in found.text and found.code == CODES[found.state]


def test_every_state_has_a_case_and_the_documentation_has_every_code():
    assert {state for _, state, _ in CASES} == set(CODES)
    page = (ROOT / "docs" / "commands.md").read_text()
    assert all(f"| {int(code)} | `{state}`" in page for state, code in CODES.items())


def test_slow_steps_are_waited_for_longer_and_a_person_may_say_how_long():
    slow = [NOW - 5000 + 100 * step for step in range(10)]
    seen = replace(BASE, driver="d", steps_t=slow, started_t=slow[0], now=slow[-1] + STEPS * 100 - 1)
    assert judge(seen).state == "progressing"
    assert judge(replace(seen, now=seen.now + 2)).state == "stalled"
    assert judge(seen, patience_s=60.0).state == "stalled"


def test_of_several_campaigns_the_worst_counts():
    def code(*states: Any) -> int:
        return worst([Judgement(state, "") for state in states])

    assert code("progressing", "reached", "waits") == Exit.OK
    assert code("stopped", "progressing") == Exit.STOPPED
    assert code("stalled", "unknown", "stopped") == Watched.STALLED
    assert code("gave up", "dead", "stalled") == Watched.DEAD


# -- what is seen ------------------------------------------------------------------------------------------------------


def lines(path: Path, *found: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.write(b"".join(map(ledger.encoded, found)))


def started(t: float) -> dict[str, Any]:
    return ledger.event_entry("run_started", {"name": "gpt", "target_step": 20}, generation=0, t=t)


def ended(code: int, t: float) -> dict[str, Any]:
    return ledger.event_entry("run_finished", {"exit_code": code, "step": 3}, generation=1, t=t)


def steps(*times: float) -> list[dict[str, Any]]:
    return [ledger.metrics_entry({"step": number, "loss": 2.5}, generation=1, t=t) for number, t in enumerate(times, 1)]


def campaign(run_dir: Path, now: float, code: int | None = None) -> Path:
    lines(run_dir / ledger.EVENTS, started(now - 60), *([] if code is None else [ended(code, now)]))
    lines(run_dir / ledger.METRICS, *steps(now - 40, now - 30, now - 20))
    return run_dir


def judged_one(run_dir: Path, now: float, patience_s: float | None, **options: Any) -> tuple[Seen | None, Judgement]:
    (found,) = judged([run_dir], now, patience_s, **options)
    return found


def test_a_campaign_with_a_driver_gets_on_and_is_dead_without(tmp_path: Path):
    run_dir = campaign(tmp_path / "run", time.time())
    lease = RunLease(run_dir)
    try:
        seen, found = judged_one(run_dir, time.time(), None)
        assert found.state == "progressing" and f"pid {os.getpid()}" in found.text
        assert seen is not None and (seen.name, seen.step, seen.target_step, seen.loss) == ("gpt", 3, 20, 2.5)
        assert judged_one(run_dir, time.time() + 1e5, None)[1].state == "stalled"
    finally:
        lease.close()
    assert judged_one(run_dir, time.time(), None)[1].state == "dead"


def test_the_newest_job_counts_however_far_back_it_began_and_whatever_is_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    events = tmp_path / ledger.EVENTS
    lines(events, started(1.0), ended(70, 2.0), started(3.0))
    assert look(tmp_path, 9.0).exit_code is None
    other = [ledger.event_entry("snapshot", {"step": n, "stall_s": 0.1, "tier": "t"}, generation=1, t=4.0) for n in range(2000)]
    lines(events, ended(75, 5.0), *other)
    with events.open("ab") as file:
        file.write(b'{"t": 1, "event": "run_started", "generation": 0, "ho\n\xff\n{"t": 2, "event": "run_finished", "exi')
    lines(tmp_path / ledger.METRICS, *steps(6.0, 7.0))
    for size in (97, 4096, 1 << 20):
        monkeypatch.setattr(looking, "READ_BYTES", size)
        monkeypatch.setattr(looking, "TAIL_BYTES", size + 200)
        found = look(tmp_path, 9.0)
        assert (found.started_t, found.exit_code, found.step, found.steps_t[-1]) == (3.0, 75, 2, 7.0)


def test_files_that_were_moved_aside_are_still_seen(tmp_path: Path):
    lines(tmp_path / ledger.EVENTS, started(3.0))
    lines(tmp_path / ledger.METRICS, *steps(4.0, 5.0))
    whole = look(tmp_path, 9.0)
    for name in (ledger.EVENTS, ledger.METRICS):
        (tmp_path / name).rename(tmp_path / f"{name}.1")
    assert look(tmp_path, 9.0) == whole  # before the next job
    lines(tmp_path / ledger.EVENTS, ended(75, 6.0))
    lines(tmp_path / ledger.METRICS, *steps(7.0, 8.0)[1:])
    found = look(tmp_path, 9.0)
    assert (found.name, found.started_t, found.exit_code, found.steps_t) == ("gpt", 3.0, 75, (4.0, 5.0, 8.0))


def test_an_empty_ledger_is_a_campaign_that_has_never_started(tmp_path: Path):
    (tmp_path / ledger.EVENTS).touch()
    assert judged_one(tmp_path, NOW, None)[1].text == "it has never started"


def test_what_is_no_run_directory_or_does_not_answer_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen, found = judged_one(tmp_path, NOW, None)
    assert seen is None and found.state == "unknown" and "is not a run directory" in found.text
    go_on = threading.Event()
    monkeypatch.setattr(looking, "look", lambda *_: go_on.wait())
    assert "was not read in 0.1 s" in judged_one(tmp_path, NOW, None, limit_s=0.1)[1].text
    go_on.set()


def test_campaigns_that_do_not_answer_hold_up_those_behind_them_for_a_moment_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answers = threading.Event()

    def slow(run_dir: Path, now: float) -> Seen:
        if run_dir.name == "last":
            answers.set()
        answers.wait()
        return replace(BASE, driver="d")

    monkeypatch.setattr(looking, "look", slow)
    monkeypatch.setattr(looking, "TURN_S", 0.01)
    found = judged([tmp_path / name for name in ("first", "second", "last")], NOW, None, limit_s=20.0)
    assert [each.state for _, each in found] == ["progressing"] * 3, "the last one is looked at while the others are waited for"


def test_the_chain_is_asked_for(tmp_path: Path, slurm):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"name": "gpt", "run_dir": str(tmp_path / "run")}))
    chain = Succession.of(load(path, []))
    asyncio.run(chain.begin(f"#!/bin/bash\n#SBATCH --job-name={chain.name}\n"))
    run_dir = tmp_path / "run"
    assert judged_one(run_dir, time.time(), None)[1].state == "waits"
    campaign(run_dir, time.time(), 75)
    assert judged_one(run_dir, time.time(), None)[1].state == "waits"
    slurm.becomes("100", state="RUNNING", start=datetime.fromtimestamp(time.time() - 60).isoformat(timespec="seconds"))
    assert judged_one(run_dir, time.time(), None)[1].state == "waits"
    assert judged_one(run_dir, time.time() + 4 * PATIENCE_S, None)[1].state == "stalled"
    slurm.set([])
    assert judged_one(run_dir, time.time(), None)[1].state == "dead"
    slurm.deaf(9)
    assert judged_one(run_dir, time.time(), None)[1].state == "unknown"
    slurm.deaf(0)
    asyncio.run(chain.stop())
    assert judged_one(run_dir, time.time(), None)[1].state == "stopped"


@needs_root
def test_the_chain_of_another_user_is_asked_for_as_his_and_is_not_called_dead_where_slurm_hides_it(going: Succession, slurm):
    campaign(going.run_dir, time.time(), 75)
    os.chown(going.run_dir, UID, UID)
    slurm.set([{**job, "user": UID, "state": "PENDING"} for job in slurm.jobs()])
    assert judged_one(going.run_dir, time.time(), None)[1].state == "waits"
    assert not inspect(going.run_dir).unfollowed
    (slurm.directory / "private").touch()
    assert judged_one(going.run_dir, time.time(), None)[1].state == "unknown"
    assert not inspect(going.run_dir).unfollowed
    slurm.set([{**job, "user": os.getuid()} for job in slurm.jobs()])  # of a colleague, who looks, and may submit
    assert judged_one(going.run_dir, time.time(), None)[1].state == "waits"
    os.chown(going.run_dir, os.getuid(), -1)
    slurm.set([])
    assert judged_one(going.run_dir, time.time(), None)[1].state == "dead"
    assert inspect(going.run_dir).unfollowed


@pytest.mark.parametrize(("code", "state"), [(0, "reached"), (70, "gave up")])
def test_a_campaign_that_was_submitted_again_is_not_over(tmp_path: Path, slurm, code: int, state: str):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"name": "gpt", "run_dir": str(tmp_path / "run")}))
    chain = Succession.of(load(path, []))
    script = f"#!/bin/bash\n#SBATCH --job-name={chain.name}\n"
    asyncio.run(chain.begin(script))
    run_dir = campaign(tmp_path / "run", time.time(), code)  # with a job that is still to be cancelled
    assert judged_one(run_dir, time.time(), None)[1].state == state
    slurm.set([])
    asyncio.run(chain.begin(script))
    assert judged_one(run_dir, time.time(), None)[1].state == "waits"
    slurm.set([])
    assert judged_one(run_dir, time.time(), None)[1].text.startswith("no job of its chain runs or waits")


# -- the command ---------------------------------------------------------------------------------------------------------


TELL = 'echo "$RESILIENT_NAME $RESILIENT_STATE_BEFORE>$RESILIENT_STATE $RESILIENT_STEP/$RESILIENT_TARGET_STEP $RESILIENT_CODE" >> '


def asked(tmp_path: Path, *run_dirs: Path, notify: str | None = None, as_json: bool = False) -> tuple[int, str]:
    said: list[str] = []
    wanted = Wanted(run_dirs, None, notify, tmp_path / "state" / "watch.json", None, as_json)
    return watch(wanted, said.append), "\n".join(said)


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    lease = RunLease(run_dir)
    try:
        yield
    finally:
        lease.close()


def test_the_command_is_run_once_for_each_change_of_state(tmp_path: Path):
    run_dir, told = campaign(tmp_path / "run", time.time()), tmp_path / "told"
    notify = f"{TELL}{told}"
    with held(run_dir):
        for _ in range(2):
            assert asked(tmp_path, run_dir, notify=notify)[0] == 0
        assert not told.exists()  # that it makes progress is no news
    for _ in range(3):
        assert asked(tmp_path, run_dir, notify=notify)[0] == Watched.DEAD
    with held(run_dir):
        asked(tmp_path, run_dir, notify=notify)
    lines(run_dir / ledger.EVENTS, ended(0, time.time()))
    asked(tmp_path, run_dir, notify=notify)
    assert told.read_text().splitlines() == [
        "gpt progressing>dead 3/20 4",
        "gpt dead>progressing 3/20 0",
        "gpt progressing>reached 3/20 0",
    ]


def test_a_campaign_that_is_dead_at_the_first_look_is_told_of(tmp_path: Path):
    run_dir, told = campaign(tmp_path / "run", time.time(), 70), tmp_path / "told"
    assert asked(tmp_path, run_dir, notify=f"{TELL}{told}")[0] == Exit.GAVE_UP
    assert told.read_text() == "gpt >gave up 3/20 70\n"


def test_a_command_that_fails_is_run_again_at_the_next_look(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    run_dir, told = campaign(tmp_path / "run", time.time(), 75), tmp_path / "told"
    for code in (1, 1, 0, 0):
        assert asked(tmp_path, run_dir, notify=f"echo >> {told}; exit {code}")[0] == Exit.STOPPED
    assert len(told.read_text()) == 3
    assert "ended with status 1; it is run again" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["", "[1]", '{"/x": 3', "\0"])
def test_a_memory_that_is_damaged_is_begun_anew(tmp_path: Path, text: str):
    path = tmp_path / "watch.json"
    path.write_text(text)
    with Memory(path).held():
        pass
    assert path.read_text() == text
    memory = Memory(path)
    with memory.held():
        memory.states["/x"] = "dead"
    assert json.loads(path.read_text()) == {"/x": "dead"}


def test_what_was_told_before_an_interrupt_is_not_told_again(tmp_path: Path):
    memory = Memory(tmp_path / "watch.json")
    with pytest.raises(KeyboardInterrupt), memory.held():
        memory.states["/x"] = "dead"
        raise KeyboardInterrupt
    assert json.loads((tmp_path / "watch.json").read_text()) == {"/x": "dead"}


def test_an_interrupt_before_anything_was_seen_does_not_say_that_all_get_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watching, "judged", interrupted)
    with pytest.raises(KeyboardInterrupt):
        asked(tmp_path, tmp_path / "run")


def test_a_memory_that_cannot_be_written_is_said(tmp_path: Path):
    run_dir = campaign(tmp_path / "run", time.time(), 70)
    (tmp_path / "state").touch()
    with pytest.raises(EnvironmentUnusable, match="cannot be used"):
        asked(tmp_path, run_dir, notify="true")


@pytest.mark.parametrize("memory", ["/", ".", ".."])
def test_a_memory_that_is_no_file_is_wrong_use(tmp_path: Path, memory: str):
    run_dir = campaign(tmp_path / "run", time.time(), 70)
    done = CliRunner().invoke(app, ["watch", str(run_dir), "--memory", memory, "--notify", "true"])
    assert (done.exit_code, type(done.exception)) == (2, SystemExit)
    assert "--memory" in done.output and "a directory, and a file is wanted" in done.output


def test_several_are_told_on_a_line_each_and_as_json(tmp_path: Path):
    good, bad = campaign(tmp_path / "a", time.time(), 0), campaign(tmp_path / "b", time.time(), 70)
    code, text = asked(tmp_path, good, bad)
    assert code == Exit.GAVE_UP
    assert [line.partition(": step")[0].split(":")[1].strip() for line in text.splitlines()] == ["reached", "gave up"]
    found = json.loads(asked(tmp_path, good, bad, as_json=True)[1])
    assert [(each["state"], each["code"], each["step"]) for each in found] == [("reached", 0, 3), ("gave up", 70, 3)]
    assert Look(good, good, None, Judgement("unknown", "x")).environment("dead")["RESILIENT_STATE_BEFORE"] == "dead"


def test_the_command_goes_on_until_all_are_over(tmp_path: Path):
    run_dir = campaign(tmp_path / "run", time.time())
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")}
    words = [sys.executable, "-m", "resilient", "watch", str(run_dir), "--every", "1", "--notify", "true"]
    process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert ": dead: " in process.stdout.readline()
        lines(run_dir / ledger.EVENTS, ended(0, time.time()))
        rest, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and ": reached: " in rest.splitlines()[-1]
    finally:
        process.kill()
        process.wait()
    states = json.loads((tmp_path / "state" / "resilient" / "watch.json").read_text())
    assert states == {str(run_dir): "reached"}


def test_ctrl_c_ends_the_command_with_what_was_last_seen(tmp_path: Path):
    run_dir = campaign(tmp_path / "run", time.time())
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "resilient", "watch", str(run_dir), "--every", "600"]
    process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == Watched.DEAD
    finally:
        process.kill()
        process.wait()
