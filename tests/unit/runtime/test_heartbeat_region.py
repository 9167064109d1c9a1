"""The region between worker and agent: last activity, records, and the hold at a boundary; with real processes and real kills."""

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounts import needs_root, small_disk
from soak import soaked

from resilient import worker
from resilient.heartbeat.agent_side import AgentRegion, ring_bytes
from resilient.heartbeat.layout import NOT_BEATEN, NOT_CHECKED, PHASES, RING_BYTES
from resilient.heartbeat.region import salvage
from resilient.heartbeat.worker_side import WorkerRegion

spawn = multiprocessing.get_context("spawn")


@pytest.fixture
def agent(tmp_path: Path):
    region = AgentRegion(tmp_path / "region")
    yield region
    region.close()


@pytest.fixture
def regions(agent):
    region = WorkerRegion(agent.path)
    yield agent, region
    region.close()


def test_a_new_page_says_that_nothing_has_happened(agent):
    activity = agent.activity()
    assert (activity.step, activity.checked, activity.phase, activity.stopped) == (NOT_BEATEN, NOT_CHECKED, "start", False)


def test_the_agent_sees_what_the_worker_beats(regions):
    agent, region = regions
    region.beat(7)
    region.enter(3)
    activity = agent.activity()
    assert (activity.pid, activity.step, activity.phase) == (os.getpid(), 7, "step")
    assert activity.beat_t > 0


def test_a_file_that_is_no_region_is_refused(tmp_path: Path):
    other = tmp_path / "other"
    other.write_bytes(b"\0" * (4096 + RING_BYTES))
    with pytest.raises(ValueError, match="not a heartbeat region"):
        WorkerRegion(other)


def test_a_region_has_all_of_its_pages_from_the_beginning(agent):
    found = agent.path.stat()
    assert found.st_blocks * 512 >= found.st_size, "a worker would end by SIGBUS where there is no room for one more"


@pytest.mark.parametrize(
    ("free_bytes", "expected"),
    [(1 << 40, RING_BYTES), (64 << 20, 1 << 20), ((64 << 20) + 4096 * 63, 1 << 20), (1 << 20, 64 << 10), (0, 64 << 10)],
)
def test_a_ring_takes_a_small_part_of_the_room_that_there_is(free_bytes: int, expected: int):
    assert ring_bytes(free_bytes) == expected


@needs_root
def test_a_worker_reports_on_when_the_memory_is_full_and_a_region_without_room_is_refused(tmp_path: Path):
    with small_disk(tmp_path / "shm", 1 << 20) as memory:
        agent, filling = AgentRegion(memory / "region"), memory / "filling"
        with pytest.raises(OSError, match="No space left"), filling.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with pytest.raises(OSError, match=f"No space left on device: '{memory}/another'"):
            AgentRegion(memory / "another")
        assert {each.name for each in memory.iterdir()} == {"region", "filling"}
        reporting = multiprocessing.get_context("spawn").Process(target=report_at_length, args=(agent.path,))
        reporting.start()
        reporting.join()
        assert reporting.exitcode == 0
        assert len(agent.drain()) == 10
        agent.close()


def report_at_length(path: Path) -> None:
    region = WorkerRegion(path)
    for _ in range(10):
        region.report(None, {"text": "x" * 6000})


def test_reports_arrive_whole_and_in_order_however_often_the_ring_wraps(regions):
    agent, region = regions
    sent, got = [], []
    for number in range(3000):
        fields = {"step": number, "loss": math.pi * number, "text": "x" * (8 * (number % 1500))}
        region.report(None if number % 2 else "snapshot", fields)
        sent.append(fields)
        if number % 97 == 0:
            got += agent.drain()
            agent.keep(got[-1].end)
    got += agent.drain()
    assert [record.fields for record in got] == sent
    assert {record.event for record in got} == {None, "snapshot"}


def test_the_time_for_which_a_gpu_computes_adds_up(regions):
    agent, region = regions
    assert agent.activity().device_s == 0.0
    region.computed(0.25)
    region.computed(0.5)
    assert agent.activity().device_s == 0.75


def test_the_time_that_samples_take_adds_up(regions, monkeypatch: pytest.MonkeyPatch):
    agent, region = regions
    clock = iter([100.0, 101.0, 103.0, 110.0, 111.0, 111.5])
    monkeypatch.setattr("resilient.heartbeat.worker_side.clock.now", lambda: next(clock))
    step, data = PHASES.index("step"), PHASES.index("data")
    for phase in (step, data, step):
        region.enter(phase)
    assert agent.activity().data_s == 2.0
    for phase in (data, data, step):
        region.enter(phase)
    assert agent.activity().data_s == 3.5


def test_a_full_ring_drops_and_counts_instead_of_blocking_for_ever(regions):
    agent, region = regions
    region.full_wait_s = 0.0
    count = RING_BYTES // 65_536 + 100
    for _ in range(count):
        region.report(None, {"text": "x" * 65_536})
    assert agent.activity().dropped > 0
    got = agent.drain()
    assert len(got) + agent.activity().dropped == count
    agent.keep(got[-1].end)
    region.report(None, {"step": 1})
    assert agent.drain()[0].fields == {"step": 1}


def test_numbers_of_other_libraries_are_reported_as_plain_numbers(regions):
    numpy = pytest.importorskip("numpy")
    agent, region = regions
    region.report(None, {"loss": numpy.float64(1.5), "steps": [numpy.int64(3)], "path": Path("/x")})
    assert agent.drain()[0].fields == {"loss": 1.5, "steps": [3], "path": "/x"}


def test_what_was_not_kept_is_salvaged_after_the_agent(agent):
    region = WorkerRegion(agent.path)
    for number in range(5):
        region.report(None, {"number": number})
    taken = agent.drain()
    agent.keep(taken[1].end)
    region.report("committed", {"number": 5})
    assert [record.fields["number"] for record in salvage(agent.path)] == [2, 3, 4, 5]
    region.close()


def test_steps_that_no_line_tells_of_are_told_for_a_worker_that_has_ended(agent):
    region = WorkerRegion(agent.path)
    region.beat(3)
    assert agent.unreported() == [], "of this one nobody tells lines"
    region.report(None, {"step": 3})
    region.reported(3)
    assert agent.unreported() == []
    region.beat(4)
    assert [record.fields for record in agent.unreported()] == [{"step": 4, "step_s": None, "steps_per_s": None}]
    region.beat(7)
    (record,) = agent.unreported()
    assert (record.fields["step"], record.fields["steps"], record.t) == (7, 4, agent.activity().beat_t)
    assert [record.fields["step"] for record in salvage(agent.path)] == [3, 7], "also if its agent has ended with it"
    agent.keep(record.end)
    assert agent.left() == agent.unreported()
    region.reported(NOT_BEATEN)
    assert agent.unreported() == []
    region.close()


def test_a_page_that_is_given_back_is_gone(tmp_path: Path):
    agent = AgentRegion(tmp_path / "region")
    agent.close()
    assert not list(tmp_path.iterdir())
    agent.keep(5)  # an acknowledgement that comes late is none of its business


def _report_until_killed(path: Path) -> None:
    region = WorkerRegion(path)
    region.full_wait_s = 60.0
    number = 0
    while True:
        region.report(None, {"number": number, "pad": "y" * (number % 700)})
        number += 1


@pytest.mark.soak
def test_a_worker_killed_while_reporting_leaves_only_whole_records(tmp_path: Path):
    for _ in range(5):
        agent = AgentRegion(tmp_path / "region")
        process = spawn.Process(target=_report_until_killed, args=(agent.path,))
        process.start()
        numbers = []
        while len(numbers) < 5000:
            for record in agent.drain():
                numbers.append(record.fields["number"])
                agent.keep(record.end)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        numbers += [record.fields["number"] for record in agent.drain()]
        assert numbers == list(range(len(numbers)))
        agent.close()


def test_without_a_proposal_no_boundary_stops(regions):
    agent, region = regions
    region.beat(3)
    assert region.stop_reason() is None
    assert agent.activity().checked == 3


def test_an_armed_target_stops_at_it_and_not_before(regions):
    agent, region = regions
    agent.propose(5, "SIGTERM")
    agent.arm(5)
    region.beat(4)
    assert region.stop_reason() is None
    region.beat(5)
    assert region.stop_reason() == "SIGTERM"
    assert agent.activity().stopped


def test_a_proposal_holds_the_worker_until_it_is_armed(regions):
    agent, region = regions
    region.beat(1)
    assert region.stop_reason() is None
    assert agent.propose(NOT_BEATEN, "SIGTERM") == 1
    answers: list[str | None] = []

    def boundaries() -> None:
        for step in (2, 3):
            region.beat(step)
            answers.append(region.stop_reason())

    thread = threading.Thread(target=boundaries)
    thread.start()
    while agent.activity().checked != 2:
        pass
    assert answers == []  # it holds at boundary 2
    agent.arm(3)  # some other rank had passed boundary 2 already
    thread.join(timeout=60)
    assert answers == [None, "SIGTERM"]


def test_a_rank_that_looks_ahead_sees_a_stop_at_its_next_boundary_and_passes_none(regions):
    agent, region = regions
    assert not region.stop_is_due()
    for step in (1, 2):
        region.beat(step)
        assert region.stop_reason() is None
    region.beat(3)
    assert not region.stop_is_due()
    assert agent.propose(NOT_BEATEN, "SIGTERM") == 2
    assert not region.stop_is_due()  # what is proposed may be moved
    agent.arm(4)
    assert not region.stop_is_due()
    assert region.stop_reason() is None
    region.beat(4)
    assert region.stop_is_due()
    assert agent.activity().checked == 3
    assert region.stop_reason() == "SIGTERM"


def _steps_until_stopped(path: Path, ranks_at: object, results: object) -> None:
    region = WorkerRegion(path)
    step = 0
    while region.stop_reason() is None:
        ranks_at.wait()  # type: ignore[attr-defined]  # a collective: nobody finishes a step alone
        step += 1
        region.beat(step)
    results.put(step)  # type: ignore[attr-defined]


@pytest.mark.soak
@pytest.mark.parametrize("times", [2, soaked(20)])
def test_all_ranks_stop_at_the_same_step_whenever_the_stop_is_asked_for(tmp_path: Path, times: int):
    for _ in range(times):
        agents = [AgentRegion(tmp_path / str(rank)) for rank in range(3)]
        barrier, results = spawn.Barrier(3), spawn.SimpleQueue()
        processes = [spawn.Process(target=_steps_until_stopped, args=(agent.path, barrier, results)) for agent in agents]
        for process in processes:
            process.start()
        while min(agent.activity().step for agent in agents) < 50:
            pass
        checked = [agent.propose(NOT_BEATEN, "SIGTERM") for agent in agents]
        for agent in agents:
            agent.arm(max(checked) + 1)
        for process in processes:
            process.join(timeout=120)
            assert process.exitcode == 0
        assert len({results.get() for _ in range(3)}) == 1
        for agent in agents:
            agent.close()


def test_without_a_supervisor_the_five_calls_do_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker, "_region", None)
    monkeypatch.delenv(worker.REGION_VARIABLE, raising=False)
    context = worker.init()
    assert (context.rank, context.world_size, context.supervised) == (0, 1, False)
    with worker.phase("step"):
        worker.beat(1)
    worker.report({"loss": 1.0})
    assert worker.should_stop() is None


def test_a_phase_is_left_again_unless_it_raised(regions, monkeypatch: pytest.MonkeyPatch):
    agent, region = regions
    monkeypatch.setattr(worker, "_region", region)
    with worker.phase("step"):
        with worker.phase("data"):
            assert agent.activity().phase == "data"
        assert agent.activity().phase == "step"
    assert agent.activity().phase == "start"
    with pytest.raises(RuntimeError), worker.phase("eval"):
        raise RuntimeError
    assert agent.activity().phase == "eval"


def test_an_unknown_phase_is_refused():
    with pytest.raises(KeyError):
        worker.phase("lunch")


def test_a_phase_that_is_told_is_known_from_one_that_is_inferred_and_stays_while_it_lasts(regions, monkeypatch: pytest.MonkeyPatch):
    agent, region = regions
    monkeypatch.setattr(worker, "_region", region)

    def seen() -> tuple[str, bool]:
        return agent.activity().phase, agent.activity().inferred

    assert seen() == ("start", True)
    worker.infer("step")
    assert seen() == ("step", True)
    with worker.phase("eval"):
        worker.infer("step")
        assert seen() == ("eval", False)
        with worker.phase("data"):
            assert seen() == ("data", False)
        assert seen() == ("eval", False)
    assert seen() == ("step", True)


def test_a_generator_that_is_closed_leaves_its_phase(regions, monkeypatch: pytest.MonkeyPatch):
    agent, region = regions
    monkeypatch.setattr(worker, "_region", region)

    def steps() -> Iterator[int]:
        with worker.phase("step"):
            yield 1

    for _ in steps():
        break
    assert agent.activity().phase == "start"
