"""TensorBoard's directory through a writer: its troubles are none of the run directory's."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from volumes import MOUNTS, Volume, volume
from writing import Writing, scalars_of, wait_for_end

from resilient.driver.lease import LEASE


def place_nothing(at: Path, elsewhere: Path) -> None:
    at.symlink_to(elsewhere / "purged")


def place_a_file(at: Path, elsewhere: Path) -> None:
    at.write_text("not a directory")


def place_a_loop(at: Path, elsewhere: Path) -> None:
    at.symlink_to(at)


@pytest.mark.parametrize("place", [place_nothing, place_a_file, place_a_loop])
def test_tensorboards_directory_that_cannot_be_written_is_no_trouble_of_the_run_directory(
    tmp_path: Path, spill_dir: Path, place: Callable[[Path, Path], None]
):
    async def run() -> None:
        work = Writing(tmp_path / "run", spill_dir, scalars=True)
        place(work.run_dir / "tensorboard", tmp_path)
        work.writer.start()
        await work.until(lambda: work.kept > 20, "lines are kept")
        assert await work.close()
        work.complete()
        assert work.troubles == [] and not (work.run_dir / LEASE).exists()

    asyncio.run(run())


def test_points_that_tensorboard_could_not_be_given_are_written_once_its_directory_is_there(
    tmp_path: Path, spill_dir: Path, caplog: pytest.LogCaptureFixture
):
    async def run() -> None:
        work = Writing(tmp_path / "run", spill_dir, scalars=True)
        place_nothing(work.run_dir / "tensorboard", tmp_path)
        work.writer.start()
        await work.until(lambda: "is tried again" in caplog.text, "it is told")
        (tmp_path / "purged").mkdir()
        pid = work.writer.disk_pid
        assert await work.close()
        wait_for_end(pid)
        assert scalars_of(tmp_path / "purged") == list(range(1, work.step + 1))

    asyncio.run(run())


@MOUNTS
def test_tensorboards_directory_that_hangs_holds_up_neither_lines_nor_the_end(tmp_path: Path, spill_dir: Path):
    async def run(disk: Volume) -> int | None:
        work = Writing(tmp_path / "run", spill_dir, scalars=True)
        (work.run_dir / "tensorboard").symlink_to(disk.path)
        work.writer.start()
        await work.until(lambda: any(disk.path.glob("events*")), "points are written")
        disk.freeze()
        step = work.step
        await work.until(lambda: work.kept > step + 200, "lines are kept")
        pid = work.writer.disk_pid
        assert await work.close()
        work.complete()
        assert work.troubles == [] and not (work.run_dir / LEASE).exists()
        return pid

    with volume(tmp_path) as disk:
        pid = asyncio.run(run(disk))
        disk.thaw()
        wait_for_end(pid)


BROKEN = {
    "exception": "raise TypeError('Descriptors cannot be created directly.')",
    "missing module": "import a_package_that_nobody_has",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_tensorboard_that_cannot_be_imported_costs_its_points_and_no_disk_process(
    tmp_path: Path, spill_dir: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "site" / "tensorboard").mkdir(parents=True)
    (tmp_path / "site" / "tensorboard" / "__init__.py").write_text(f"{BROKEN[kind]}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)

    async def run() -> None:
        work = Writing(tmp_path / "run", spill_dir, scalars=True)
        work.writer.start()
        await work.until(lambda: work.writer.disk_pid is not None, "there is a disk process")
        pid = work.writer.disk_pid
        await work.until(lambda: "cannot be imported" in caplog.text or work.writer.disk_pid != pid, "it is told")
        assert work.writer.disk_pid == pid
        step = work.step
        await work.until(lambda: work.kept > step + 20, "lines are kept")
        assert await work.close()
        work.complete()
        assert work.writer.disk_pid == pid and caplog.text.count("cannot be imported") == 1

    asyncio.run(run())
