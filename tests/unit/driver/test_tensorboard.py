"""A file for TensorBoard that cannot be written costs next to nothing, and has all points once it can be."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from mounts import needs_root, small_disk

from resilient.driver import tensorboard
from resilient.driver.lease import LOCK
from resilient.driver.tensorboard import BATCH, ScalarFile

PATIENCE_S = 120.0
LINES = 3 * BATCH


class Encoding:
    """Stands for tensorboard's: a line is its step. Nothing is encoded before `imported`."""

    def __init__(self) -> None:
        self.imported = threading.Event()
        self.encoded = 0

    def __call__(self) -> tuple[bytes, tensorboard.Encode]:
        assert self.imported.wait(PATIENCE_S)
        return b"header\n", self._encode

    def _encode(self, step: int, t: float, scalars: Mapping[str, float]) -> bytes:
        self.encoded += 1
        return b"%d\n" % step


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> Encoding:
    encoding = Encoding()
    monkeypatch.setattr(tensorboard, "_encoding", encoding)
    monkeypatch.setattr(tensorboard, "FLUSH_S", 10 * PATIENCE_S)  # one try, and another at the end
    return encoding


@pytest.fixture
def scalars(tmp_path: Path, encoding: Encoding) -> ScalarFile:
    """Lines that wait for tensorboard to be imported."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).touch()
    scalars = ScalarFile(tmp_path / "run")
    for step in range(LINES):
        scalars.metrics({"step": step, "t": 1e9 + step, "loss": 0.5})
    return scalars


def wait_until_told(caplog: pytest.LogCaptureFixture) -> None:
    until = time.monotonic() + PATIENCE_S
    while "is tried again" not in caplog.text:
        assert time.monotonic() < until
        time.sleep(0.005)


def written(directory: Path) -> list[str]:
    (file,) = directory.glob("events*")
    return file.read_text().splitlines()


ALL = ["header", *map(str, range(LINES))]


def test_no_point_is_encoded_for_a_directory_that_is_away(
    tmp_path: Path, encoding: Encoding, scalars: ScalarFile, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "away")
    encoding.imported.set()
    wait_until_told(caplog)
    assert encoding.encoded == 0
    (tmp_path / "away").mkdir()
    scalars.finish(PATIENCE_S)
    assert encoding.encoded == LINES
    assert written(tmp_path / "away") == ALL


@needs_root
def test_few_points_are_encoded_at_a_time_for_a_file_system_that_is_full(
    tmp_path: Path, encoding: Encoding, scalars: ScalarFile, caplog: pytest.LogCaptureFixture
):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        (tmp_path / "run" / "tensorboard").symlink_to(disk)
        with pytest.raises(OSError, match="No space left"), (disk / "filling").open("ab", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        encoding.imported.set()
        wait_until_told(caplog)
        assert encoding.encoded == BATCH
        (disk / "filling").unlink()
        scalars.finish(PATIENCE_S)
        assert written(disk) == ALL


def test_as_many_points_wait_as_are_kept_also_while_some_are_being_written(
    tmp_path: Path, encoding: Encoding, monkeypatch: pytest.MonkeyPatch
):
    kept = 2 * BATCH
    monkeypatch.setattr(tensorboard, "KEPT", kept)
    (tmp_path / LOCK).touch()
    hangs, goes_on = threading.Event(), threading.Event()
    there = tensorboard.must_be_there

    def hang(run_dir: Path) -> None:
        hangs.set()
        assert goes_on.wait(PATIENCE_S)
        there(run_dir)

    monkeypatch.setattr(tensorboard, "must_be_there", hang)
    scalars = ScalarFile(tmp_path)

    def put(steps: range) -> None:
        for step in steps:
            scalars.metrics({"step": step, "t": 1e9 + step, "loss": 0.5})

    put(range(kept))
    encoding.imported.set()
    assert hangs.wait(PATIENCE_S)
    put(range(kept, 10 * kept))
    goes_on.set()
    scalars.finish(PATIENCE_S)
    steps = [*range(BATCH), *range(9 * kept, 10 * kept)]
    assert written(tmp_path / "tensorboard") == ["header", *map(str, steps)]
