"""Unmodified scripts of transformers, Accelerate and Lightning: faults are detected, named, recovered, told and accounted for."""

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from campaigns import ROOT, Campaign, wait_for

from chaos.injectors import inside
from resilient.control.inspection import PATIENCE_S
from resilient.status import inspect

EXAMPLES = ROOT / "examples"
SCRIPTS = ["transformers_trainer", "accelerate_loop", "lightning_module"]
ON_CPU = {"procs_per_node": 2, "threads_per_proc": 1, "device": "cpu"}
SAVE = 25


def scripted(campaign: Callable[..., Campaign], script: str, steps: int, **config: Any) -> Campaign:
    words = f"{EXAMPLES}/{script}.py --steps {steps} --save-steps {SAVE} --out ${{run_dir}}/out"
    # Of ranks that share two busy cores one may be a straggler, which is reported and costs nothing.
    resilience = {"straggler": "off", **config.pop("resilience", {})}
    return campaign(entrypoint=words, cluster=ON_CPU, chaos={"allow": True}, resilience=resilience, **config)


def orders(run: Campaign, *wanted: tuple[str, int, int]) -> None:
    """Have ranks do something to themselves: what, at which step, and who; for as long as `recovered` waits, which renews it."""
    for number, (fault, step, rank) in enumerate(wanted):
        inside.give(run.run_dir, inside.Order(f"{number}-{fault}", fault, rank, step))


def recovered(run: Campaign, count: int) -> None:
    """Wait until so many faults were recovered from; orders for ranks that are not carried out yet are renewed meanwhile."""

    def done() -> bool:
        for order in (run.run_dir / inside.DIRECTORY).glob("*.order"):
            inside.renew(run.run_dir, order.stem)
        return len(run.events("recovered")) >= count

    wait_for(done, lambda: f"recovery {count}\n{run.logs()}", 240.0)


def whole(run: Campaign, steps: int, faults: int) -> None:
    """All faults were recovered from, no step is missing, and status shows what became of the time."""
    assert [each["fault_id"] for each in run.events("recovered")] == [each["fault_id"] for each in run.events("fault")]
    assert {action["name"] for action in run.events("action")} == {"restart_workers"}
    assert run.metrics()[-1]["step"] == steps
    summary = inspect(run.run_dir)
    assert (summary.state, summary.step, summary.recovered) == ("reached", steps, faults)
    assert summary.goodput is not None and summary.rank_seconds["productive"] > 0 and summary.rank_seconds["rework"] > 0
    assert {each["step"] % SAVE for each in run.events("script_checkpoint")} == {0}


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", SCRIPTS)
def test_faults_in_an_unmodified_script_are_named_and_recovered(campaign: Callable[..., Campaign], script: str):
    steps = 1500  # the last fault comes before the end, on a fast machine and on a busy one
    run = scripted(campaign, script, steps).start()
    wait_for(run.run_dir.is_dir, "the run directory")
    orders(run, ("hang_data", 110, 1), ("worker_raise", 140, 0))
    recovered(run, 2)
    os.kill(run.workers()[1], signal.SIGKILL)
    assert run.wait(300) == 0, run.output + run.logs()
    found = [(fault["kind"], fault["ranks"], fault["phase"]) for fault in run.events("fault")]
    assert found[:2] == [("hang", [1], "data"), ("exception", [0], "step")] and found[2][:2] == ("exit", [1])
    resumed = [event["resumed_step"] for event in run.events("generation_started")]
    assert resumed[:3] == [0, 100, 125] and resumed[3] % SAVE == 0
    whole(run, steps, 3)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("script", SCRIPTS)
def test_hangs_stops_and_ten_kills_are_never_given_up_on_and_change_no_number(campaign: Callable[..., Campaign], script: str):
    """Under the default limits: a hang is named within five of its usual steps and 10 s."""
    steps, chance = 5000, random.Random(script)  # of a few milliseconds each: more than a fast machine does until the tenth kill
    run = scripted(campaign, script, steps, resilience={"max_restarts_per_hour": 1000}).start()
    wait_for(run.run_dir.is_dir, "the run directory")
    raises = (("worker_raise", step, chance.randrange(2)) for step in range(301, 701, 50))
    orders(run, ("hang_data", 110, 1), ("hang_collective", 190, 0), *raises)  # before the first step: none comes too late
    recovered(run, 10)
    os.kill(run.workers()[0], signal.SIGSTOP)
    recovered(run, 11)
    for number in range(10):
        run.reach(run.step() + chance.randrange(SAVE, 2 * SAVE))  # so that each attempt gets on
        os.kill(run.workers()[chance.randrange(2)], signal.SIGKILL)
        recovered(run, 12 + number)
    assert run.wait(900) == 0, run.output + run.logs()
    found = [(fault["kind"], fault["ranks"]) for fault in run.events("fault")]
    assert found[:2] == [("hang", [1]), ("collective_timeout", [0])] and found[10] == ("stopped", [0])
    assert [kind for kind, _ in found[2:10] + found[11:]] == ["exception"] * 8 + ["exit"] * 10
    usual_s = max(line["step_s"] for line in run.metrics() if line["step_s"] is not None)
    for fault in run.events("fault")[:2]:
        assert fault["detect_s"] <= 5 * usual_s + 10.0 + 1.0 + PATIENCE_S, "a report may be a second old; then all are inspected"
    whole(run, steps, 21)
    if script != "lightning_module":  # on several ranks it goes on in the middle of a later epoch with other samples, by itself
        same(campaign, run, script, steps)


def same(campaign: Callable[..., Campaign], run: Campaign, script: str, steps: int) -> None:
    """What was printed of each step, and the last weights, are those of a run in which nothing went wrong."""
    calm = scripted(lambda **config: campaign(run.directory / "calm", **config), script, steps)
    assert calm.start().wait(900) == 0, calm.output + calm.logs()
    theirs = losses(calm.logs_of_rank(0))
    ours = losses(run.logs_of_rank(0))
    if script != "transformers_trainer":  # after it went on, the first loss that it logs is the mean of fewer steps
        assert theirs and {step: text for step, text in ours.items() if text != theirs.get(step)} == {}
    for path in sorted((calm.run_dir / "out").glob("*.safetensors")):
        assert path.read_bytes() == (run.run_dir / "out" / path.name).read_bytes()


LOSS = re.compile(r"step (\d+) loss (\S+)|'loss': '(\S+)'.*'epoch': '(\S+)'")


def losses(text: str) -> Mapping[str, str]:
    """What a script printed of a step, or of an epoch's part, by that."""
    return {step or epoch: loss or other for step, loss, other, epoch in LOSS.findall(text)}


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("procs", [1, 2])
def test_a_script_gives_the_same_losses_alone_under_torchrun_and_under_resilient(tmp_path: Path, script: str, procs: int):
    path = f"{EXAMPLES}/{script}.py"
    launchers = {
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(procs), path],
        "resilient": ["-m", "resilient", "run", "--procs", str(procs), "--run-dir", "run", "cluster.device=cpu", path],
        **({"alone": [path]} if procs == 1 else {}),
    }
    found = {}
    for name, words in launchers.items():
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *words, "--steps", "30", "--save-steps", "10", "--out", f"out-{name}"]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        found[name] = losses(done.stdout + "".join(log.read_text() for log in tmp_path.glob("run/logs/g1/node*.log")))
    assert all(each == found["torchrun"] and each for each in found.values()), found
