"""Experiments from end to end, by the real command: what it does, what it says, and what is left when it is killed."""

import contextlib
import json
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from campaigns import wait_for
from soak import soaked

from chaos.verdict import machine
from experiments import Chaos, commands

CAMPAIGN = {
    "entrypoint": "toys:count",
    "cluster": {"procs_per_node": 2, "device": "cpu"},
    "train": {"steps": 200},
    "checkpoint": {"every_steps": 5},
}
ENDLESS = {**CAMPAIGN, "train": {"steps": 1_000_000}}


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Chaos]:
    yield from commands(tmp_path)


@pytest.mark.soak
def test_an_experiment_says_what_came_of_each_fault_also_of_a_killed_driver_and_is_compared_with_a_run_without_faults(
    chaos: Chaos,
):
    faults = [
        {"fault": "driver_kill", "at": {"step": 20}},
        {"id": "one", "fault": "worker_raise", "target": {"rank": 0}},
        {"fault": "worker_kill", "target": {"rank": 1}, "at": {"after": "one", "phase": "recovery"}},
    ]
    assert chaos.run({"campaign": {"config": ENDLESS, "until": "faults"}, "faults": faults}, "--json") == 0, chaos.said()
    told = json.loads(chaos.printed)
    assert told == chaos.verdict()
    assert told["ok"]
    expected = [("driver_kill", True), ("worker_raise", True), ("worker_kill", True)]
    assert [(each["fault"], bool(each["recovered"])) for each in told["injections"]] == expected
    assert not chaos.all_of_it()
    reference = (chaos.out / "reference" / "run" / "metrics.jsonl").read_text()
    assert json.loads(reference.splitlines()[-1])["step"] == told["steps"]
    ledger = (chaos.out / "run" / "events.jsonl").read_text()
    assert ledger.count('"run_started"') == 3  # begun, after the kill, and to the end when its last step was given


@pytest.mark.soak
def test_a_campaign_that_gives_up_makes_a_bad_verdict(chaos: Chaos):
    config = {**CAMPAIGN, "resilience": {"max_restarts_per_hour": 0}}
    faults = [{"fault": "worker_kill", "at": {"step": 20}}, {"fault": "worker_kill", "at": {"step": 30}}]
    assert chaos.run({"campaign": {"config": config}, "faults": faults, "reference": False}) == 1, chaos.said()
    told = chaos.verdict()
    assert not told["ok"]
    assert {"reached", "recovered", "action", "injected"} <= set(told["broken"])
    assert "exit code 70" in chaos.printed
    assert [each["t"] is not None for each in told["injections"]] == [True, False]


@pytest.mark.soak
def test_a_campaign_that_does_not_run_even_without_faults_is_no_experiment(chaos: Chaos):
    config = {**CAMPAIGN, "entrypoint": "toys:no_such_module"}
    assert chaos.run({"campaign": {"config": config}, "faults": [{"fault": "worker_kill"}]}) == 69
    assert "does not reach its target even without faults" in chaos.said()
    assert not chaos.all_of_it()


@pytest.mark.soak
def test_a_reference_run_that_does_not_get_there_in_time_is_ended(chaos: Chaos):
    experiment = {"campaign": {"config": ENDLESS}, "faults": [{"fault": "worker_kill"}], "limits": {"minutes": 0.1}}
    assert chaos.run(experiment) == 69
    assert "the reference run does not reach step 1000000 within 0.1 minutes (limits.minutes)" in chaos.said()
    assert not chaos.all_of_it()


def test_results_are_not_written_over(chaos: Chaos):
    chaos.out.mkdir()
    (chaos.out / "precious").touch()
    assert chaos.run({"campaign": {"config": CAMPAIGN}, "faults": [{"fault": "worker_kill"}]}) == 69
    assert "is not empty" in chaos.said()
    assert [path.name for path in chaos.out.iterdir()] == ["precious"]


@pytest.mark.parametrize("allowed", [False, soaked(True)])
def test_a_campaign_that_runs_is_broken_only_if_it_has_opted_in(chaos: Chaos, counting: Any, allowed: bool):
    run = counting(steps=1_000_000, chaos={"allow": allowed}).start()
    run.reach(5)
    code = chaos.run({"campaign": {}, "faults": [{"fault": "worker_kill"}]}, "--run", str(run.run_dir))
    assert not chaos.all_of_it()
    assert len(run.events("fault")) == allowed
    if allowed:
        assert code == 0, chaos.printed + chaos.said()
        assert chaos.verdict()["ok"]
        chaos.out = chaos.directory / "again"  # the same fault has the same id, and is judged by itself
        assert chaos.run({"campaign": {}, "faults": [{"fault": "worker_kill"}]}, "--run", str(run.run_dir)) == 0, chaos.said()
        assert (chaos.verdict()["faults"], len(run.events("fault"))) == (1, 2), run.events("fault")
    else:
        assert code == 78
        assert f"{run.run_dir / 'config.yaml'}: chaos.allow = false: only" in chaos.said()
    step = run.step()
    run.reach(step + 5)  # nobody has stopped it
    run.signal(signal.SIGTERM)
    assert run.wait() == 75
    if allowed:
        chaos.out = chaos.directory / "out2"
        assert chaos.run({"campaign": {}, "faults": [{"fault": "worker_kill"}]}, "--run", str(run.run_dir)) == 69
        assert "nothing runs in" in chaos.said()


HELD = {"fault": "worker_stop", "with": {"seconds": 60}}  # a rank is stopped until the runtime kills it


@pytest.mark.soak
def test_an_experiment_that_is_interrupted_takes_everything_along(chaos: Chaos):
    chaos.start({"campaign": {"config": ENDLESS}, "faults": [HELD], "reference": False})
    assert chaos.process is not None
    _wait_for_an_injector(chaos)
    chaos.process.send_signal(signal.SIGTERM)
    assert chaos.process.wait(200) == 75
    assert "stopped by SIGTERM" in chaos.said()
    assert not chaos.all_of_it()


def test_a_command_that_is_killed_at_any_moment_leaves_nothing(chaos: Chaos, rounds: int):
    before = machine.inspect([chaos.directory])
    endless = {"campaign": {"config": ENDLESS}, "faults": [{"fault": "worker_kill"}, HELD] * 50}
    for number in range(rounds):
        chance = random.Random(number)
        chaos.out = chaos.directory / f"out{number}"
        chaos.start({**endless, "reference": False})
        assert chaos.process is not None
        if number % 2:
            _wait_for_an_injector(chaos)
        moment_s = chance.uniform(0.1, 8.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = chaos.process.wait(moment_s)
            pytest.fail(f"it ended with {code} by itself: {chaos.said()}")
        chaos.process.kill()
        chaos.process.wait()
        wait_for(lambda: not chaos.all_of_it(), f"left after {moment_s:.2f} s (round {number}): {chaos.all_of_it()}")
        assert not machine.changes(before, machine.inspect([chaos.directory]))


def _wait_for_an_injector(chaos: Chaos) -> None:
    wait_for(lambda: any("chaos.injectors.injector" in _words(each) for each in chaos.all_of_it()), "an injector", 600.0)


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []
