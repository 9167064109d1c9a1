"""The srun of a step of many nodes is held while its agents run: it wakes for nothing, and ends with the driver."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from srun_steps import Steps, until

from resilient.agent.inspection import state_of
from resilient.slurm import step


def test_the_srun_of_a_step_of_many_is_held_once_all_agents_have_connected_and_goes_on_at_the_end(steps: Steps):
    """As it is, it would end the step when a node is up again before Slurm has called it down."""

    async def play() -> None:
        launcher = steps.launcher()
        await asyncio.gather(*(launcher.launch(node, 1, prepare=False) for node in range(4)))
        ((_, _, first),) = await steps.called(1)
        for node in range(2):
            launcher.connected(node)
        await launcher.launch(3, 2, prepare=False)
        _, (_, _, second) = await steps.called(2)
        assert state_of(first) != "T"
        launcher.connected(3)
        assert state_of(first) != "T"
        launcher.connected(2)
        await until(lambda: state_of(first) == "T")
        assert state_of(second) != "T"  # of one node: it can end no other
        await launcher.close(0.0)
        for pid in (first, second):
            assert not Path(f"/proc/{pid}").exists()

    asyncio.run(play())
    assert steps.ended == []


def test_an_srun_that_is_held_is_held_again_after_slurm_has_resumed_the_job(steps: Steps, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step, "HOLD_AGAIN_S", 0.01)

    async def play() -> None:
        launcher = steps.launcher()
        await asyncio.gather(*(launcher.launch(node, 1, prepare=False) for node in range(4)))
        ((_, _, pid),) = await steps.called(1)
        for node in range(4):
            launcher.connected(node)
        await until(lambda: state_of(pid) == "T")
        os.kill(pid, signal.SIGCONT)
        await until(lambda: state_of(pid) == "T")
        await launcher.close(0.0)
        assert not Path(f"/proc/{pid}").exists()

    asyncio.run(play())
    assert steps.ended == []


HOLDS = """
import asyncio, sys, time
from resilient.slurm.roster import Seat
from resilient.slurm.step import Step
async def main():
    step = await Step.start([sys.argv[1]], {}, {"n1": Seat(0, 1), "n2": Seat(1, 1)}, print, print, "logs/agents.log")
    for node in range(2):
        step.connected(node)
    time.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("before", [[], ["nohup"]], ids=["", "nohup"])
def test_an_srun_that_is_held_does_not_outlive_a_driver_that_is_killed(steps: Steps, before: list[str]):
    driver = subprocess.Popen(
        [*before, sys.executable, "-c", HOLDS, str(steps.directory / "srun")], env={"PYTHONPATH": ":".join(sys.path)}
    )

    async def play() -> None:
        # Held before it could run a line; its parent tells of it.
        children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children")
        await until(lambda: bool(children.read_text().split()))
        pid = int(children.read_text())
        await until(lambda: state_of(pid) == "T")
        driver.kill()
        driver.wait()
        await until(lambda: state_of(pid) in ("", "Z"))

    asyncio.run(play())
