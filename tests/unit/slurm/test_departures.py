"""Which nodes are left, because Slurm drains them, a maintenance takes them, or a person says so."""

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from resilient.driver.departures import READ_S, Departures, drained_of
from resilient.driver.inquiries import departed
from resilient.evacuate import FILE, Request
from resilient.slurm.allocation import Allocation

IDLE, DOWN = frozenset({"ALLOCATED"}), frozenset({"DOWN", "NOT_RESPONDING"})


@pytest.mark.parametrize(
    ("hosts", "drained", "left"),
    [
        (4, [], []),
        (1, [0], [0]),
        (2, [1], [1]),
        (2, [0, 1], []),
        (4, [2], [2]),
        (4, [1, 2], []),
        (6, [0, 5], [0, 5]),
        (6, [0, 4, 5], []),
        (100, range(33), range(33)),
        (100, range(34), []),
    ],
)
@pytest.mark.parametrize("state", ["DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING"])
def test_a_few_drained_nodes_are_left_and_a_machine_that_is_drained_as_a_whole_is_not(hosts, drained, left, state: str):
    names = [f"n{number}" for number in range(hosts)]
    states = {name: frozenset({"ALLOCATED", state}) if number in drained else IDLE for number, name in enumerate(names)}
    assert drained_of(names, states) == (frozenset(drained), frozenset(left))


def test_nodes_that_are_down_or_that_slurm_says_nothing_of_are_not_drained():
    assert drained_of(["a", "b"], {"a": DOWN}) == (frozenset(), frozenset())


class Core:
    """Stands for the coordinator: what it is told to leave, and to take back."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.membership = SimpleNamespace(nodes=[SimpleNamespace(host=host) for host in hosts])
        self.gone: list[int] = []
        self.told: list[tuple[Mapping[int, str], Collection[int]]] = []

    def departed(self, nodes: Sequence[int]) -> None:
        self.gone.extend(nodes)

    def evacuate(self, nodes: Mapping[int, str], resumed: Collection[int]) -> None:
        self.told.append((nodes, resumed))


def turn(handler: Callable[..., None], *news: object) -> None:
    handler(*news)


class Ends:
    """Stands for the job's stops."""

    end_t = None
    answered = True

    def __init__(self) -> None:
        self.wanted: list[float | None] = []

    def wanted_back(self, start_t: float | None, name: str = "") -> None:
        self.wanted.append(start_t)


def watched(core: Core, run_dir: Path, allocation: Allocation | None, until: Callable[[], bool], ends: Any = None) -> list[str]:
    """What a person is told, until the condition holds."""
    notes: list[str] = []
    departures = Departures(core, run_dir, "token", allocation, ends, turn=turn, note=notes.append)  # type: ignore[arg-type]

    async def work() -> None:
        task = asyncio.create_task(departures.watch())
        while not until():
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(work(), 180))
    return notes


def reservation(name: str, start_t: float, nodes: str, flags: str = "MAINT,IGNORE_JOBS") -> str:
    start, end = (datetime.fromtimestamp(t).isoformat(timespec="seconds") for t in (start_t, start_t + 3600))
    return f"ReservationName={name} StartTime={start} EndTime={end} Nodes={nodes} NodeCnt=1 Flags={flags} State=INACTIVE"


def allocation(hosts: Sequence[str]) -> Allocation:
    return Allocation("7", tuple(hosts), (1,) * len(hosts), 0)


def test_a_node_that_a_maintenance_takes_soon_is_left_and_one_that_it_takes_later_is_told(slurm: Any, tmp_path: Path):
    hosts = ["n1", "n2", "n3"]
    slurm.reserved([reservation("soon", time.time() + 60, "n2"), reservation("late", time.time() + 90_000, "n3")])
    core = Core(hosts)
    notes = watched(core, tmp_path, allocation(hosts), lambda: bool(core.told))
    assert core.told == [({1: "the maintenance soon takes it"}, frozenset())]
    assert [("soon takes n2" in note, "late takes n3" in note) for note in notes] == [(True, False), (False, True)]


def test_nodes_that_slurm_has_taken_out_of_the_job_are_told_once(slurm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hosts = ["n1", "n2", "n3"]
    slurm.set([{"id": "7", "name": "x", "state": "RUNNING", "end": "N/A", "nodes": "n[1-3]"}])
    monkeypatch.setattr("resilient.driver.departures.ASK_S", 0.1)
    core = Core(hosts)

    def seen() -> bool:
        slurm.becomes("7", nodes="n[1,3]" if not core.gone else "n1")
        return len(core.gone) > 1

    watched(core, tmp_path, allocation(hosts), seen)
    assert core.gone == [1, 2]


def test_a_job_that_is_over_or_of_which_slurm_says_nothing_has_lost_no_node(slurm: Any):
    known = allocation(["n1", "n2"])
    assert asyncio.run(departed(known)) == frozenset()
    slurm.set([{"id": "7", "name": "x", "state": "COMPLETED", "end": "N/A"}])
    assert asyncio.run(departed(known)) == frozenset()
    slurm.set([{"id": "7", "name": "x", "state": "RUNNING", "end": "N/A", "nodes": "n2"}])
    assert asyncio.run(departed(known)) == frozenset({0})
    slurm.deaf(1)
    assert asyncio.run(departed(known)) == frozenset()


def test_a_maintenance_of_the_whole_machine_ends_the_job_and_leaves_no_node(slurm: Any, tmp_path: Path):
    hosts, start_t = ["n1", "n2", "n3"], float(int(time.time()) + 60)
    slurm.reserved([reservation("all", start_t, "n[1-9]")])
    core, ends = Core(hosts), Ends()
    (note,) = watched(core, tmp_path, allocation(hosts), lambda: bool(ends.wanted), ends)
    assert (ends.wanted[0], core.told) == (start_t, [])
    assert note.startswith("the maintenance all takes n[1-3]")


def ask(run_dir: Path, *nodes: str, resumed: Mapping[str, float] | None = None) -> None:
    new = run_dir / "new"
    new.write_bytes(msgspec.json.encode(Request("token", nodes, resumed or {})))
    new.replace(run_dir / FILE)


@pytest.mark.parametrize("trouble", ["torn", "gone", "unreadable"])
def test_what_was_asked_holds_while_the_file_cannot_be_read(tmp_path: Path, trouble: str, caplog: pytest.LogCaptureFixture):
    core, path, broken_t = Core(["n1", "n2"]), tmp_path / FILE, None
    ask(tmp_path, "n2")

    def over() -> bool:
        nonlocal broken_t
        if core.told and broken_t is None:
            whole = path.read_bytes()
            path.unlink()
            if trouble == "torn":
                path.write_bytes(whole[:-5])
            elif trouble == "unreadable":
                path.mkdir()
            broken_t = time.monotonic()
        if broken_t is None or (trouble != "gone" and not complaints()):
            return False
        return time.monotonic() > broken_t + 3 * READ_S

    def complaints() -> list[str]:
        return [each for each in caplog.messages if "cannot be read" in each]

    watched(core, tmp_path, None, over)
    assert core.told == [({1: "it was asked for"}, frozenset())]
    assert len(complaints()) == (trouble != "gone")


def test_nothing_reads_the_run_directory_any_more_once_nobody_watches(tmp_path: Path):
    departures = Departures(Core(["n1"]), tmp_path, "token", None, turn=turn, note=lambda _: None)  # type: ignore[arg-type]
    before = set(threading.enumerate())

    async def work() -> list[threading.Thread]:
        task = asyncio.create_task(departures.watch())
        await asyncio.sleep(0)
        started = [thread for thread in threading.enumerate() if thread not in before and thread.name == "departures"]
        task.cancel()
        return started

    (reader,) = asyncio.run(work())
    reader.join(60)
    assert not reader.is_alive()


def test_what_is_resumed_is_told_once_each_time(tmp_path: Path):
    core = Core(["n1", "n2"])

    def write(nodes: tuple[str, ...], resumed: Mapping[str, float]) -> Callable[[], bool]:
        before = len(core.told)
        ask(tmp_path, *nodes, resumed=resumed)
        return lambda: len(core.told) > before

    departures = Departures(core, tmp_path, "token", None, turn=turn, note=lambda _: None)  # type: ignore[arg-type]

    async def work() -> None:
        task = asyncio.create_task(departures.watch())
        for nodes, resumed in ((("n2",), {}), ((), {"1": 5.0}), ((), {"1": 6.0}), (("0",), {"1": 6.0})):
            heard = write(nodes, resumed)
            while not heard():
                await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(work(), 180))
    asked = "it was asked for"
    assert core.told == [({1: asked}, set()), ({}, {1}), ({}, {1}), ({0: asked}, set())]
