"""Records that found no driver are taken in by the next one, each once."""

import errno
import os
import re
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from mounts import make_read_only, needs_root

from resilient import ledger, spill
from resilient.driver.lease import LOCK
from resilient.protocol.messages import Record


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory that is in use."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / LOCK).touch()
    return run_dir


def test_what_was_left_is_written_once_with_its_own_time_and_generation(run_dir: Path):
    records = [
        Record(0, 2.5, None, {"step": 2, "loss": 0.1}),
        Record(0, 1.5, None, {"step": 1, "loss": 0.2}),
        Record(0, 3.5, "committed", {"step": 2}),
        Record(0, 0.5, "resumed", {"step": 0}),
    ]
    with ledger.Ledger(run_dir) as book:
        book.metrics({"step": 1, "loss": 0.2}, generation=3, t=1.5)  # written, but never acknowledged
        spill.leave(run_dir, 3, "n1", records)
        assert spill.take_in(run_dir, book) == 2
        assert spill.take_in(run_dir, book) == 0
    assert [(line["step"], line["generation"], line["t"]) for line in ledger.read(run_dir / ledger.METRICS)] == [
        (1, 3, 1.5),
        (2, 3, 2.5),
    ]
    (event,) = ledger.read(run_dir / ledger.EVENTS)
    assert (event["event"], event["host"], event["t"]) == ("committed", "n1", 3.5)


def test_what_was_written_before_the_files_were_moved_aside_is_not_written_again(run_dir: Path):
    with ledger.Ledger(run_dir) as book:
        book.metrics({"step": 1, "loss": 0.2}, generation=3, t=1.5)
    spill.leave(run_dir, 3, "n1", [Record(0, 1.5, None, {"step": 1, "loss": 0.2}), Record(0, 2.5, None, {"step": 2})])
    (run_dir / ledger.METRICS).rename(run_dir / f"{ledger.METRICS}.1")
    with ledger.Ledger(run_dir) as book:
        assert spill.take_in(run_dir, book) == 1
    assert [line["step"] for line in ledger.read(run_dir / ledger.METRICS)] == [1, 2]


def test_a_checkpoint_of_a_script_is_told_once_and_by_whom(run_dir: Path):
    told = {"step": 9, "path": "/out"}
    spill.leave(run_dir, 1, "n1", [Record(rank, 1.0 + rank, spill.SCRIPT_CHECKPOINT, told) for rank in (1, 0)])
    with ledger.Ledger(run_dir) as book:
        assert spill.take_in(run_dir, book) == 1
    (event,) = ledger.read_events(run_dir / ledger.EVENTS)
    assert (event["rank"], event["step"], event["path"]) == (0, 9, "/out")


def test_nothing_to_leave_leaves_nothing(run_dir: Path):
    spill.leave(run_dir, 1, "n1", [])
    assert [path.name for path in run_dir.iterdir()] == [LOCK]


def test_half_a_file_is_not_taken_in(run_dir: Path):
    spill.leave(run_dir, 1, "n1", [Record(0, 1.0, None, {"step": 1})])
    (done,) = (run_dir / ".spill").iterdir()
    done.rename(done.with_suffix(".new"))
    with ledger.Ledger(run_dir) as book:
        assert spill.take_in(run_dir, book) == 0


def test_what_is_left_for_several_ranks_is_all_there_whatever_the_host_is_called(run_dir: Path):
    for host in ("n1.site.example", "n2.site.example"):
        for rank in range(2):
            spill.leave(run_dir, 1, host, [Record(rank, float(rank) + len(host) + int(host[1]), "note", {"of": f"{host} {rank}"})])
    with ledger.Ledger(run_dir) as book:
        assert spill.take_in(run_dir, book) == 4
    told = [line["of"] for line in ledger.read(run_dir / ledger.EVENTS)]
    assert sorted(told) == [f"{host} {rank}" for host in ("n1.site.example", "n2.site.example") for rank in range(2)]


def place_one_that_fails_now(at: Path) -> None:
    at.symlink_to("/proc/self/mem")  # whose first bytes cannot be read: EIO, as of a server that does not answer


def place_one_that_fails_for_good(at: Path) -> None:
    at.symlink_to(at)


@pytest.mark.parametrize(("place", "passes"), [(place_one_that_fails_now, True), (place_one_that_fails_for_good, False)])
def test_a_file_that_cannot_be_read_keeps_no_other_from_being_taken_in(
    run_dir: Path, tmp_path: Path, place: Callable[[Path], None], passes: bool
):
    for generation in (1, 2, 3):
        spill.leave(run_dir, generation, "n1", [Record(0, float(generation), None, {"step": generation})])
    unreadable = next((run_dir / ".spill").glob("*-g2-*"))
    kept = unreadable.rename(tmp_path / "kept")
    place(unreadable)
    with ledger.Ledger(run_dir) as book:
        for _ in range(2):
            # What may be read another time is tried again by whoever calls, and must not be told as done.
            with pytest.raises(OSError, match=re.escape(str(unreadable))) if passes else nullcontext():
                spill.take_in(run_dir, book)
            assert [line["step"] for line in ledger.read(run_dir / ledger.METRICS)] == [1, 3]
            assert list((run_dir / ".spill").iterdir()) == [unreadable]
        kept.replace(unreadable)
        assert spill.take_in(run_dir, book) == 1
    assert not list((run_dir / ".spill").iterdir())


def test_a_directory_that_cannot_be_listed_is_not_taken_for_an_empty_one(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    def stale(_: object) -> list[str]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(run_dir / ".spill"))

    spill.leave(run_dir, 1, "n1", [Record(0, 1.0, None, {"step": 1})])
    with ledger.Ledger(run_dir) as book:
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", stale)
            patch.setattr(os, "scandir", stale)
            with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
                spill.take_in(run_dir, book)
        assert spill.take_in(run_dir, book) == 1


@needs_root
def test_files_that_cannot_be_removed_are_no_reason_to_try_again_and_are_not_written_twice(run_dir: Path):
    spill.leave(run_dir, 1, "n1", [Record(0, 1.0, None, {"step": 1})])
    make_read_only(run_dir / ".spill")
    try:
        with ledger.Ledger(run_dir) as book:
            assert spill.take_in(run_dir, book) == 1
            assert spill.take_in(run_dir, book) == 0
    finally:
        subprocess.run(["umount", run_dir / ".spill"], check=True)
    assert [line["step"] for line in ledger.read(run_dir / ledger.METRICS)] == [1]


@pytest.mark.parametrize("gone", ["moved", "unmounted"])
def test_a_run_directory_that_is_gone_is_not_made_anew_for_records(run_dir: Path, tmp_path: Path, gone: str):
    run_dir.rename(tmp_path / "elsewhere")
    if gone == "unmounted":
        run_dir.mkdir()  # the mount point
    with pytest.raises(FileNotFoundError):
        spill.leave(run_dir, 1, "n1", [Record(0, 1.0, None, {"step": 1})])
    assert run_dir.exists() is (gone == "unmounted") and not (run_dir / ".spill").exists()
