"""A driver's stops: Slurm is asked by real processes, the coordinator is the real one."""

import asyncio
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from checkpoint.protocol import Inventory
from resilient.control import Coordinator, JobSpec
from resilient.control.coordinator import State
from resilient.control.drain import Drain
from resilient.control.learning import Limits
from resilient.driver import stops
from resilient.driver.stops import Stops
from resilient.outbox import Effect, Outbox, WriteEvent
from resilient.protocol.messages import Hello, Ready
from resilient.recovery.policy import Budget
from resilient.slurm import queue
from resilient.slurm.deadline import END_S, KILL_WAIT_S
from resilient.snapshots import StoragePlan, TierPlan


class Play:
    """A generation of one rank that runs in job 7, which the queue shows as the test says."""

    def __init__(self, slurm: Any, left_s: float, **settings: Any) -> None:
        self.slurm = slurm
        self.effects: list[Effect] = []
        self.notes: list[str] = []
        job = JobSpec(
            layouts={1: {"dp": 1}},
            spares=0,
            rejoin_s=20.0,
            procs_per_node=1,
            storage=StoragePlan(TierPlan("ram", 1), (), TierPlan("scratch", 3), buffers=2),
            budget=Budget(30, 3),
            drain_s=25.0,
            silence_s=30.0,
            silence_with_spare_s=8.0,
            hang=Limits(10.0, 600.0),
            link_grace_s=60.0,
            collective_timeout_s=620.0,
        )
        self.coordinator = Coordinator(job, last_generation=0)
        now = time.time()
        self.turn(self.coordinator.begin, at=now)
        self.turn(self.coordinator.prepared, at=now)
        hello = Hello(generation=0, node=0, incarnation=1, host="n1", addr="10.0.0.1", t=now)
        held = Inventory(generation=0, address="10.0.0.1:9", shards=())
        for message in (hello, Ready(generation=0, store_port=5000, inventory=held)):
            self.turn(self.coordinator.on_message, 0, message, at=now)
        self.turn(self.coordinator.fence_raised, 1, None, at=now)
        assert self.coordinator.state is State.RUNNING
        self.end_t = now + left_s
        slurm.set([{"id": "7", "name": "x", "state": "RUNNING", "end": clock(self.end_t)}])
        defaults = {"asked_lead_s": None, "asked_drain_s": None, "drain_s": 25.0, "end_t": None}
        self.stops = Stops(self.coordinator, "7", **{**defaults, **settings}, turn=self.turn, note=self.notes.append)

    def turn(self, handler: Callable[..., None], *news: object, at: float | None = None, **more: object) -> None:
        out = Outbox()
        handler(*news, time.time() if at is None else at, out, **more)
        self.effects += out.take()

    def signal(self, name: str) -> None:
        asyncio.run(self.stops.signalled(name))

    def watch(self) -> None:
        """Until it stops the run."""

        async def work() -> None:
            task = asyncio.create_task(self.stops.watch())
            while not self.coordinator.draining:
                await asyncio.sleep(0.01)
            task.cancel()

        asyncio.run(asyncio.wait_for(work(), 120))

    def faults(self) -> list[Any]:
        return [effect.fields["kind"] for effect in self.effects if isinstance(effect, WriteEvent) and effect.event == "fault"]

    @property
    def drain(self) -> Drain:
        drain = self.coordinator._core.shutdown.drain
        assert drain is not None
        return drain


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, Slurm's commands are waited for."""
    monkeypatch.setattr(stops, "SIGNAL_PATIENCE_S", 60.0)
    monkeypatch.setattr(queue, "ASK_S", 120.0)


def clock(t: float) -> str:
    return datetime.fromtimestamp(t).isoformat(timespec="seconds")


def test_the_run_is_stopped_ahead_of_the_end_that_slurm_tells(slurm):
    play = Play(slurm, 30.0, asked_lead_s=60.0)
    play.watch()
    assert play.faults() == ["time_limit"]
    assert play.drain.deadline_t == pytest.approx(int(play.end_t) - END_S, abs=0.1)


def test_a_limit_that_is_changed_while_the_job_runs_is_heard_of(slurm, monkeypatch):
    monkeypatch.setattr(stops, "ASK_EVERY_S", 0.5)
    monkeypatch.setattr(stops, "POLL_S", 0.01)
    play = Play(slurm, 3600.0)

    async def work() -> None:
        task = asyncio.create_task(play.stops.watch())
        while play.stops._end_t is None:
            await asyncio.sleep(0.01)
        assert not play.coordinator.draining
        play.slurm.becomes("7", end=clock(time.time() + 20))
        while not play.coordinator.draining:
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(work(), 120))
    assert play.faults() == ["time_limit"]


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED", "NODE_FAIL", None])
def test_a_job_that_slurm_calls_over_while_its_driver_runs_is_drained_and_the_job_is_named(slurm, monkeypatch, state: str | None):
    monkeypatch.setattr(stops, "ASK_EVERY_S", 0.1)
    monkeypatch.setattr(stops, "ASK_AGAIN_S", 0.1)
    play = Play(slurm, 3600.0)

    async def work() -> None:
        task = asyncio.create_task(play.stops.watch())
        while not play.stops.answered:
            await asyncio.sleep(0.01)
        if state is None:
            play.slurm.set([])
        else:
            play.slurm.becomes("7", state=state)
        while not play.coordinator.draining:
            await asyncio.sleep(0.01)
        task.cancel()

    began = time.time()
    asyncio.run(asyncio.wait_for(work(), 120))
    (note,) = play.notes
    how = "does not know this job any more" if state is None else f"calls this job over ({state})"
    assert note.startswith(f"slurm_job_over: Slurm {how}, and its processes still run: stopping at the next step, within ")
    assert play.drain.deadline_t <= time.time() + KILL_WAIT_S and play.drain.deadline_t > began
    assert play.faults() == []


def test_a_job_that_slurm_calls_over_once_goes_on(slurm):
    play = Play(slurm, 3600.0)
    for state in ("COMPLETED", "RUNNING", "COMPLETED"):
        slurm.becomes("7", state=state)
        asyncio.run(play.stops._ask(60.0))
    assert len(play.stops._ends) < stops.CALLED_OVER


def test_a_limit_that_was_extended_since_slurm_was_asked_stops_nothing(slurm, monkeypatch):
    monkeypatch.setattr(stops, "ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(stops, "POLL_S", 0.01)
    play = Play(slurm, 14.0, asked_lead_s=10.0)

    async def work() -> None:
        task = asyncio.create_task(play.stops.watch())
        while not play.stops.answered:
            await asyncio.sleep(0.01)
        later_t = time.time() + 3600
        play.slurm.becomes("7", end=clock(later_t))
        while play.stops.end_t != int(later_t) and not play.coordinator.draining:
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(work(), 120))
    assert play.faults() == []


@pytest.mark.parametrize(("start_s", "kinds"), [(20.0, ["time_limit"]), (3600.0, [])])
def test_the_run_is_stopped_ahead_of_a_maintenance_that_comes_before_the_end(slurm, start_s: float, kinds: list[str]):
    play = Play(slurm, 1800.0)
    start_t = time.time() + start_s
    play.stops.wanted_back(start_t, "all")

    async def work() -> None:
        task = asyncio.create_task(play.stops.watch())
        while play.stops.end_t is None or (kinds and not play.coordinator.draining):
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(work(), 120))
    assert play.faults() == kinds
    if kinds:
        assert play.drain.deadline_t == pytest.approx(start_t - END_S, abs=0.1)
        assert any("until the maintenance all" in note for note in play.notes)


def test_each_new_end_of_the_job_is_told_once(slurm):
    play = Play(slurm, 1800.0)
    told: list[float | None] = []

    def turn(handler: Callable[..., None], *news: Any, **_: Any) -> None:
        assert handler == play.coordinator.limit_is
        told.extend(news)

    play.stops._turn = turn
    asyncio.run(play.stops._ask(60.0))
    asyncio.run(play.stops._ask(60.0))
    start_t = play.end_t - 600.0
    play.stops.wanted_back(start_t, "all")
    play.stops.wanted_back(None)
    play.stops.wanted_back(play.end_t + 600.0, "later")
    slurm.becomes("7", end="N/A")
    asyncio.run(play.stops._ask(60.0))
    end_t = int(play.end_t)
    assert told == [pytest.approx(t, abs=1.0) if t is not None else None for t in (end_t, start_t, end_t, play.end_t + 600.0)]


def test_a_signal_ahead_of_the_limit_that_comes_early_stops_nothing(slurm):
    play = Play(slurm, 100.0, asked_lead_s=20.0)
    play.signal("SIGUSR1")
    assert not play.coordinator.draining
    assert "SIGUSR1: " in play.notes[0] and "a stop needs 20 s" in play.notes[0]


def test_one_cancellation_is_one_stop_however_many_processes_were_told(slurm):
    """scancel signals the driver and all agents; a second SIGTERM must not cut the drain."""
    play = Play(slurm, 3600.0)
    play.signal("SIGUSR1")
    assert play.drain.budget_s == pytest.approx(25.0)
    slurm.becomes("7", state="COMPLETING", end=clock(time.time()))
    for _ in range(4):
        play.signal("SIGTERM")
    assert play.coordinator.state is State.RUNNING
    assert play.faults() == []
    assert play.drain.signal == "SIGUSR1"


def test_preemption_is_told_and_gives_the_grace_time(slurm):
    play = Play(slurm, 3600.0)
    end_t = int(time.time()) + 500
    slurm.becomes("7", end=clock(end_t), preempt=clock(time.time()))
    play.signal("SIGTERM")
    assert play.faults() == ["preempted"]
    assert play.drain.deadline_t == pytest.approx(end_t - END_S, abs=0.1)
    play.signal("SIGTERM")  # to an agent
    (note,) = play.notes
    assert note.startswith("preempted: Slurm wants the nodes back in ")


def test_a_slurm_that_does_not_answer_gives_no_more_than_kill_wait(slurm):
    play = Play(slurm, 3600.0)
    slurm.deaf(99)
    play.signal("SIGTERM")
    assert play.drain.budget_s == pytest.approx(KILL_WAIT_S - END_S)


def test_a_stop_on_request_takes_as_long_as_the_config_says(slurm):
    play = Play(slurm, 3600.0, asked_drain_s=7.0)
    play.signal("SIGTERM")
    assert play.drain.budget_s == pytest.approx(7.0)
    assert play.faults() == []
