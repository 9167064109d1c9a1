"""Records that the driver has not acknowledged, at the end of an agent and at the beginning of the next one."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from parts import FakeWorkers, Talk

from resilient import ledger, spill
from resilient.agent import memory
from resilient.agent.ending import leave_records, leave_salvaged
from resilient.driver.lease import LOCK
from resilient.heartbeat.region import salvage
from resilient.protocol.messages import Alive, Ping, Record

RECORDS = {1: [Record(0, 1.5, "note", {"n": 1})], 2: [Record(1, 2.5, None, {"step": 1, "loss": float("nan")})]}


@pytest.fixture
def talk() -> Iterator[Talk]:
    made = Talk()
    yield made
    made.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """One that is in use."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / LOCK).touch()
    return run_dir


def taken_in(run_dir: Path) -> list[tuple[int, float]]:
    with ledger.Ledger(run_dir) as book:
        spill.take_in(run_dir, book)
    return [(line["generation"], line["t"]) for name in (ledger.EVENTS, ledger.METRICS) for line in ledger.read(run_dir / name)]


def test_records_are_left_with_their_own_generations(talk: Talk, run_dir: Path):
    assert leave_records(run_dir, RECORDS, talk.loop)
    assert taken_in(run_dir) == [(1, 1.5), (2, 2.5)]


def test_where_there_are_none_the_run_directory_is_left_alone(talk: Talk, tmp_path: Path):
    assert leave_records(tmp_path / "none", {}, talk.loop)


@pytest.mark.parametrize("gone", ["moved", "unmounted"])
def test_a_run_directory_that_takes_no_records_is_said_to_be_that(talk: Talk, run_dir: Path, tmp_path: Path, gone: str):
    run_dir.rename(tmp_path / "elsewhere")
    if gone == "unmounted":
        run_dir.mkdir()  # the mount point
    assert not leave_records(run_dir, RECORDS, talk.loop)


def test_a_run_directory_that_stands_still_keeps_neither_the_loop_nor_the_end(
    talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stalled = threading.Event()
    monkeypatch.setattr(spill, "leave", lambda *_: stalled.wait())
    talk.peer.send(Ping(generation=0))
    assert not leave_records(tmp_path, RECORDS, talk.loop, limit_s=0.5)
    assert talk.peer.next() == Alive(generation=0)
    stalled.set()


def test_what_a_killed_agent_left_is_in_ram_until_it_is_in_the_run_directory(run_dir: Path, tmp_path: Path):
    regions, elsewhere = tmp_path / "regions", run_dir.rename(tmp_path / "elsewhere")
    regions.mkdir()
    workers = FakeWorkers(regions, 2)
    workers.workers[0].report("note", {"n": 1})
    (regions / "agent.json").touch()
    (regions / "g1-rank7").write_bytes(b"half a region")
    found = memory.salvaged(regions)
    assert [(each.generation, each.rank, len(each.records)) for each in found] == [(1, 0, 1)]
    assert [path.name for path in regions.iterdir()] == ["g1-rank0"]
    leave_salvaged(run_dir, found)  # it is not there
    assert len(salvage(regions / "g1-rank0")) == 1
    elsewhere.rename(run_dir)
    leave_salvaged(run_dir, found)
    assert not list(regions.iterdir())
    assert len(taken_in(run_dir)) == 1
    workers.close()
