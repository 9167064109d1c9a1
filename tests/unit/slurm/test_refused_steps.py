"""A Slurm that does not answer is asked for the step again; one that refuses it is told of every node."""

import asyncio

import pytest
from srun_steps import STAYS, Steps, seats_of, until

from resilient.slurm import launch, step
from resilient.slurm.roster import Seat


def test_a_step_that_cannot_be_started_is_told_of_every_node(steps: Steps):
    (steps.directory / "srun").unlink()  # nothing else is on the PATH

    async def play() -> None:
        launcher = steps.launcher()
        await asyncio.gather(*(launcher.launch(node, 1, prepare=False) for node in range(2)))
        await launcher.close(0.0)

    asyncio.run(play())
    assert [news[:2] for news in steps.ended] == [(0, 1), (1, 1)]
    assert "srun cannot be started" in steps.ended[0][2]


SILENT = "Unable to confirm allocation for job 77: Socket timed out on send/recv operation"


def test_agents_are_asked_for_again_as_long_as_slurm_does_not_answer(steps: Steps, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "AGAIN_S", 0.01)
    calls = steps.directory / "calls"
    steps.does(f"if len(open({str(calls)!r}).readlines()) < 3:\n    sys.exit('srun: error: {SILENT}')\n{STAYS}")

    async def play() -> None:
        launcher = steps.launcher()
        await asyncio.gather(*(launcher.launch(node, 1, prepare=node == 2) for node in range(4)))
        await until(lambda: len(steps.calls()) == 3 or bool(steps.ended))
        await launcher.close(0.0)

    asyncio.run(play())
    assert [seats_of(environ) for _, environ, _ in steps.calls()] == [seats_of(steps.calls()[0][1])] * 3
    assert all("--prepare-node" in words for words, _, _ in steps.calls())
    assert steps.ended == []


def test_an_agent_that_is_launched_anew_is_not_asked_for_twice(steps: Steps, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "AGAIN_S", 0.2)
    steps.does(f"sys.exit('srun: error: {SILENT}')")

    async def play() -> None:
        launcher = steps.launcher()
        await asyncio.gather(*(launcher.launch(node, 1, prepare=False) for node in range(2)))
        await until(lambda: bool(launcher._unanswered))
        steps.does(STAYS)
        await launcher.launch(1, 2, prepare=False)
        await steps.called(3)
        await launcher.close(0.0)

    asyncio.run(play())
    seats = [seats_of(environ) for _, environ, _ in steps.calls()]
    assert seats == [{"n2": Seat(0, 1), "n1": Seat(1, 1)}, {"n1": Seat(1, 2)}, {"n2": Seat(0, 1)}]


@pytest.mark.parametrize(
    ("line", "silent"),
    [
        (f"srun: error: {SILENT}", True),
        ("srun: error: Unable to create step for job 77: Unable to contact slurm controller (connect failure)", True),
        ("srun: error: Unable to confirm allocation for job 77: Invalid job id specified", False),
        ("srun: error: Unable to create step for job 77: More processors requested than permitted", False),
        ("srun: error: Task launch for StepId=77.0 failed on node n3: Socket timed out on send/recv operation", False),
        (f"2: srun: error: {SILENT}", False),  # what a task prints has its label before it
    ],
)
def test_an_srun_without_a_step_is_told_from_a_slurm_that_refuses(line, silent):
    assert step.unanswered(line) is silent
