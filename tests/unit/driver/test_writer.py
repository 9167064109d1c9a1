"""The writer against real file systems: lines whole, once and in order; the event loop never waits."""

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from volumes import MOUNTS, PATIENCE_S, Volume, volume
from writing import Writing, scalars_of, wait_for_end

from resilient import ledger, spill
from resilient.driver import spill_file, writer
from resilient.driver.disk_client import DiskClient
from resilient.driver.lease import LEASE, LOCK
from resilient.ledger import EVENTS, METRICS
from resilient.protocol.disk import PackLogs
from resilient.protocol.messages import Record

TROUBLES: dict[str, tuple[Callable[[Volume], None], Callable[[Volume], None], str]] = {
    "frozen": (Volume.freeze, Volume.thaw, "does not answer"),
    "full": (Volume.fill, Volume.empty, "No space left"),
    "read-only": (Volume.read_only, Volume.gone, "Read-only file system"),
    "unmounted": (Volume.gone, Volume.mount, "mounted"),
}


def test_lines_are_in_the_files_and_the_lease_is_given_up(tmp_path: Path, spill_dir: Path):
    async def run() -> None:
        work = Writing(tmp_path / "run", spill_dir, scalars=True)
        work.writer.start()
        await work.until(lambda: work.kept > 20, "lines are kept")
        await work.until(lambda: any((work.run_dir / "tensorboard").glob("events*")), "tensorboard is imported")
        work.writer.text("incidents/1/why.txt", "because")
        pid = work.writer.disk_pid
        assert await work.close()
        work.complete()
        assert (work.run_dir / "incidents/1/why.txt").read_text() == "because"
        assert not (work.run_dir / LEASE).exists() and not spill_dir.exists()
        wait_for_end(pid)
        assert scalars_of(work.run_dir / "tensorboard") == list(range(1, work.step + 1))

    asyncio.run(run())


@MOUNTS
@pytest.mark.parametrize("kind", TROUBLES)
def test_a_run_directory_that_does_not_work_stops_nobody_and_loses_nothing(
    tmp_path: Path, spill_dir: Path, kind: str, rounds: int, monkeypatch: pytest.MonkeyPatch
):
    begin, end, words = TROUBLES[kind]
    if kind != "frozen":  # a disk process that gets no core for two seconds is another trouble
        monkeypatch.setattr(writer, "STALL_S", PATIENCE_S)

    async def run(chance: random.Random, disk: Volume) -> None:
        work = Writing(disk.path / "run", spill_dir)
        work.writer.start()
        at = chance.randrange(1, 60)
        await work.until(lambda: work.step >= at, "a random moment")
        begin(disk)
        await work.until(lambda: work.troubles, "it is told")
        assert words in work.troubles[0]
        await work.until(lambda: not work.spill.empty, "lines are spilled")
        turns, step = work.turns, work.step
        await work.until(lambda: work.kept > step, "lines count as kept although the run directory does not work")
        await work.until(lambda: work.turns > turns + 100, "the loop goes on")
        end(disk)
        await work.until(lambda: work.wells, "it is told that all is well")
        await work.until(lambda: work.spill.empty, "the spill file is read back")
        assert await work.close()
        work.complete()
        assert not spill_dir.exists()

    for number in range(rounds):
        (tmp_path / str(number)).mkdir()
        with volume(tmp_path / str(number)) as disk:
            asyncio.run(run(random.Random(f"{kind} {number}"), disk))


@MOUNTS
def test_what_is_not_written_at_the_end_stays_in_a_spill_file_that_the_next_driver_takes_in_once(tmp_path: Path, spill_dir: Path):
    async def run(disk: Volume) -> tuple[Writing, int]:
        work = Writing(disk.path / "run", spill_dir)
        work.writer.start()
        await work.until(lambda: work.kept > 5, "lines are kept")
        pid = work.writer.disk_pid
        assert pid is not None
        disk.read_only()
        await work.until(lambda: work.troubles, "it is told")
        step = work.step
        await work.until(lambda: work.kept > step, "lines count as kept")
        assert not await work.close(0.5)
        assert work.spill.path.exists()
        return work, pid

    with volume(tmp_path) as disk:
        work, pid = asyncio.run(run(disk))
        disk.gone()
        wait_for_end(pid)  # it has the run directory's lock until then, and the next driver waits for that
        assert spill_file.take_in(work.run_dir, spill_dir)
        work.complete()
        assert spill_file.take_in(work.run_dir, spill_dir) == 0


@MOUNTS
def test_the_process_of_the_driver_ends_while_the_file_system_is_frozen(tmp_path: Path, spill_dir: Path):
    async def run(disk: Volume) -> tuple[Writing, int]:
        work = Writing(disk.path / "run", spill_dir)
        work.writer.start()
        await work.until(lambda: work.kept > 5, "lines are kept")
        pid = work.writer.disk_pid
        assert pid is not None
        disk.freeze()
        await work.until(lambda: work.troubles, "it is told")
        assert not await work.close(0.5)
        return work, pid

    with volume(tmp_path) as disk:
        work, pid = asyncio.run(run(disk))
        orphan = psutil.Process(pid)
        assert orphan.is_running()
        disk.thaw()
        orphan.wait(PATIENCE_S)
        spill_file.take_in(work.run_dir, spill_dir)
        work.complete()


DRIVER = """
import asyncio, sys
from pathlib import Path
from writing import Writing

async def run():
    work = Writing(Path(sys.argv[1]), Path(sys.argv[2]))
    work.writer.start()
    while True:
        work.put()
        await work.turn()
        print(work.step, work.kept, len(work.troubles), int(not work.spill.empty), flush=True)

asyncio.run(run())
"""


@MOUNTS
@pytest.mark.parametrize("kind", ["frozen", "full", "well"])
def test_a_driver_that_is_killed_loses_nothing_that_counts_as_kept(tmp_path: Path, spill_dir: Path, kind: str, rounds: int):
    for number in range(rounds):
        (tmp_path / str(number)).mkdir()
        chance = random.Random(f"{kind} {number}")
        with volume(tmp_path / str(number)) as disk:
            run_dir = disk.path / "run"
            environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
            process = subprocess.Popen(
                [sys.executable, "-c", DRIVER, str(run_dir), str(spill_dir)], stdout=subprocess.PIPE, env=environ, text=True
            )
            assert process.stdout is not None
            after = chance.randrange(20, 120)
            spilled = kept = 0
            for line in process.stdout:
                step, kept, troubles, spilled = map(int, line.split())
                if step == after and kind != "well":
                    disk.freeze() if kind == "frozen" else disk.fill()
                if step > after and (kind == "well" or (troubles and spilled and chance.random() < 0.05)):
                    break
            children = psutil.Process(process.pid).children()
            process.kill()
            for line in process.stdout:
                kept = int(line.split()[1])
            process.wait()
            disk.thaw() if kind == "frozen" else disk.empty() if kind == "full" else None
            for child in children:
                child.wait(PATIENCE_S)
            spill_file.take_in(run_dir, spill_dir)
            work = Writing.__new__(Writing)
            work.run_dir = run_dir
            metrics, events = work.steps()
            assert metrics == list(range(1, len(metrics) + 1)) and len(metrics) >= kept
            assert events == list(range(1, len(events) + 1)) and len(events) >= kept


def test_a_disk_process_that_dies_is_followed_by_another_and_no_line_is_lost(tmp_path: Path, spill_dir: Path):
    async def run() -> None:
        work = Writing(tmp_path / "run", spill_dir)
        work.writer.start()
        for _ in range(2):
            step = work.step
            await work.until(lambda step=step: work.kept > step + 5, "lines are kept")
            pid = work.writer.disk_pid
            assert pid is not None
            work.put()
            os.kill(pid, signal.SIGKILL)
            await work.until(lambda pid=pid: work.writer.disk_pid != pid, "another one is there")
        assert await work.close()
        work.complete()

    asyncio.run(run())


def test_lines_are_spilled_while_no_disk_process_can_be_had(tmp_path: Path, spill_dir: Path, monkeypatch: pytest.MonkeyPatch):
    async def run() -> None:
        work = Writing(tmp_path / "run", spill_dir)
        work.writer.start()
        await work.until(lambda: work.kept > 5, "lines are kept")
        assert await work.writer.flush(PATIENCE_S)
        pid = work.writer.disk_pid
        assert pid is not None
        with monkeypatch.context() as patch:
            patch.setattr(DiskClient, "_spawn", refused)
            os.kill(pid, signal.SIGKILL)
            while work.writer._disk.connected:  # nothing is on its way when it is found dead
                await asyncio.sleep(0.001)
            await work.until(lambda: not work.spill.empty, "lines are spilled")
            step, turns = work.step, work.turns
            await work.until(lambda: work.kept > step and work.turns > turns + 100, "they count as kept, and the loop goes on")
        await work.until(lambda: work.writer.disk_pid not in (None, pid), "another one is there")
        assert await work.close()
        work.complete()

    def refused(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    asyncio.run(run())


def test_who_finds_that_the_lease_was_taken_over_writes_nothing_more(tmp_path: Path, spill_dir: Path):
    async def run() -> None:
        work = Writing(tmp_path / "run", spill_dir)
        work.writer.start()
        await work.until(lambda: work.kept > 5, "lines are kept")
        path = work.run_dir / LEASE
        new = path.with_name("new")
        new.write_text(path.read_text().replace(work.lease.owner.token, "another"))
        new.replace(path)  # at once: an empty lease would be written anew
        await work.until(lambda: work.taken_over, "it is told")
        before = work.steps()
        for _ in range(50):
            work.put()
            await work.turn()
        assert work.steps() == before
        await work.writer.abandon()
        assert path.exists()
        work.lease.leave()
        spill_file.take_in(work.run_dir, spill_dir)

    asyncio.run(run())


def test_records_that_cannot_be_taken_in_hold_up_neither_lines_nor_the_end(tmp_path: Path, spill_dir: Path):
    async def run() -> None:
        work = Writing(tmp_path / "run", spill_dir)
        spill.leave(work.run_dir, 1, "n", [Record(0, 5.0, "note", {"step": 0})])
        (work.run_dir / METRICS).mkdir()  # so that it cannot be found out what is in the ledger already
        work.writer.start()
        for number in range(1, 4):
            work.writer.event({"t": float(number), "event": "note", "generation": 1, "host": "n", "step": number})
            assert await work.writer.flush(PATIENCE_S)
        assert not await work.writer.close(1.0)  # not all that agents have left is in the ledger
        work.lease.leave()
        assert [line["step"] for line in ledger.read(work.run_dir / EVENTS)] == [1, 2, 3]
        assert work.troubles == [] and not (work.run_dir / LEASE).exists()
        assert len(list((work.run_dir / ".spill").iterdir())) == 1

    asyncio.run(run())


def test_a_record_that_could_not_be_read_is_no_end_without_it_and_is_taken_in_once_it_can_be(
    tmp_path: Path, spill_dir: Path, caplog: pytest.LogCaptureFixture
):
    async def run(*, can_be_read: bool) -> None:
        caplog.clear()
        work = Writing(tmp_path / "run", spill_dir)
        work.writer.start()
        await work.until(lambda: "cannot be taken in" in caplog.text, "it is told")
        if can_be_read:
            kept.replace(left)
            async with asyncio.timeout(PATIENCE_S):
                while left.exists():  # nothing else comes: it is taken in between lines
                    await work.turn()
        assert await work.writer.flush(PATIENCE_S)
        assert await work.writer.close(PATIENCE_S if can_be_read else 1.0) == can_be_read
        work.lease.leave()
        assert work.troubles == []
        wait_for_end(work.writer.disk_pid)

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).touch()  # as of a run directory that is in use
    spill.leave(tmp_path / "run", 7, "n", [Record(0, 5.0, "left", {"step": 0})])
    (left,) = (tmp_path / "run" / ".spill").iterdir()
    kept = left.rename(tmp_path / "kept")
    left.symlink_to("/proc/self/mem")  # whose first bytes cannot be read: EIO, as of a server that does not answer
    asyncio.run(run(can_be_read=False))
    assert left.is_symlink()
    asyncio.run(run(can_be_read=True))
    (line,) = [line for line in ledger.read(tmp_path / "run" / EVENTS) if line["event"] == "left"]
    assert (line["generation"], line["t"]) == (7, 5.0)


def test_old_logs_are_packed_by_the_disk_process_and_what_is_no_archive_is_told(tmp_path: Path, spill_dir: Path):
    async def run() -> None:
        work = Writing(tmp_path / "run", spill_dir)
        logs = work.run_dir / "logs"
        for generation in range(1, 26):
            (logs / f"g{generation}").mkdir(parents=True)
            (logs / f"g{generation}" / "node0.log").write_text(f"{generation}\n")
        work.writer.start()
        answer = await work.writer.call(lambda number: PackLogs(call=number), PATIENCE_S)
        assert answer.error is None
        left = sorted(path.name for path in logs.iterdir())
        assert "g0001-g0100.tar.zst" in left and "g5" not in left and "g25" in left
        (logs / "g0001-g0100.tar.zst").write_text("something else, of some length")
        (logs / "g1").mkdir()
        answer = await work.writer.call(lambda number: PackLogs(call=number), PATIENCE_S)
        assert answer.error is not None and "no archive of folders" in answer.error
        assert await work.close()

    asyncio.run(run())
