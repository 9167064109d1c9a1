"""Files that are read from stay open in a small number, whatever a checkpoint consists of."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from checkpoint import CheckpointError, DamagedCheckpoint, LocalShard, descriptors, load, save, verify
from checkpoint.open_files import KEPT, OpenFiles
from checkpoint.tools import export
from checkpoint.tools.diff import Comparison

ARRAYS = 2 * KEPT + 20
FDS = Path("/proc/self/fd")


def shards(fill: float = 0.0) -> list[LocalShard]:
    return [LocalShard(f"x{number}", (3,), (0,), torch.full((3,), fill), (3,)) for number in range(ARRAYS)]


@contextmanager
def room_for(more: int) -> Iterator[None]:
    """This process may open so many files more."""
    before, taken = descriptors.current(), list[int]()
    descriptors.limit(1 + max(int(each.name) for each in FDS.iterdir()) + more)
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(more):
            os.close(taken.pop())
        yield
    finally:
        descriptors.limit(before)
        for each in taken:
            os.close(each)


def test_a_checkpoint_may_have_more_files_than_may_be_open(tmp_path: Path):
    one, other = (save(tmp_path / name, 1, shards(1.0), {}, generation=0).path for name in ("one", "other"))
    read = shards()
    with room_for(KEPT + 50):
        load(one, read)
        for form in ("torch", "zarr"):
            export.export(one, form, tmp_path / form)
    with room_for(2 * KEPT + 50):
        assert Comparison(one, other).run().equal
    assert all(torch.equal(each.data, torch.ones(3)) for each in read)


def test_a_checkpoint_may_have_more_files_than_may_be_open_while_it_is_written(tmp_path: Path):
    with room_for(KEPT + 50):
        path = save(tmp_path, 1, shards(1.0), {}, generation=0).path
    verify(path)
    assert not [each for each in FDS.iterdir() if each.resolve().is_relative_to(tmp_path)]


def test_a_write_that_fails_leaves_no_file_open(tmp_path: Path):
    with room_for(3), pytest.raises(CheckpointError, match="Too many open files"):
        save(tmp_path, 1, shards(1.0), {}, generation=0)
    assert not [each for each in FDS.iterdir() if each.resolve().is_relative_to(tmp_path)]


def test_a_process_that_may_open_no_more_files_calls_no_checkpoint_damaged(tmp_path: Path):
    path = save(tmp_path / "one", 1, shards(), {}, generation=0).path
    with (
        room_for(KEPT // 2),
        pytest.raises(CheckpointError, match=r"Too many open files; this process may have \d+ files open") as told,
    ):
        load(path, shards(), threads=1)
    assert not isinstance(told.value, DamagedCheckpoint)


def test_those_that_are_in_use_and_those_that_were_used_last_stay_open(tmp_path: Path):
    names = [str(number) for number in range(6)]
    for name in names:
        (tmp_path / name).write_text(name)
    opened: list[str] = []
    files = OpenFiles(kept=2)

    def read(name: str) -> str:
        def opener() -> int:
            opened.append(name)
            return os.open(tmp_path / name, os.O_RDONLY)

        with files.use(name, opener) as fd:
            return os.pread(fd, 1, 0).decode()

    reading, go = threading.Event(), threading.Event()

    def slow() -> None:
        with files.use("0", lambda: os.open(tmp_path / "0", os.O_RDONLY)) as fd:
            reading.set()
            go.wait()
            assert os.pread(fd, 1, 0) == b"0"
            opened.append("still there")

    thread = threading.Thread(target=slow)
    thread.start()
    reading.wait()
    assert [read(name) for name in ("1", "2", "1", "3", "1", "2", "0")] == ["1", "2", "1", "3", "1", "2", "0"]
    assert opened == ["1", "2", "3", "2"], "each once, but for the one that had not been used for longest"
    files.close()
    go.set()
    thread.join()
    assert opened[-1] == "still there"
    assert not [each for each in FDS.iterdir() if each.resolve().is_relative_to(tmp_path)]


def test_a_file_that_cannot_be_opened_is_tried_again(tmp_path: Path):
    files = OpenFiles()
    for _ in range(2):
        with pytest.raises(FileNotFoundError), files.use("x", lambda: os.open(tmp_path / "x", os.O_RDONLY)):
            pass
    (tmp_path / "x").touch()
    with files.use("x", lambda: os.open(tmp_path / "x", os.O_RDONLY)) as fd:
        assert os.fstat(fd).st_size == 0
    files.close()
