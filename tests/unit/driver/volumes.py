"""Small file systems of a test's own, and a writer whose run directory is on one."""

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mounts import make_read_only

from resilient import ledger
from resilient.driver.lease import RunLease
from resilient.driver.spill_file import SpillFile
from resilient.driver.writer import Listeners, Writer
from resilient.protocol.disk import DiskSettings, ScalarSettings

MOUNTS = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: mounting a file system needs root")
PATIENCE_S = 120.0


def command(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


class Volume:
    """An ext4 on a loop device."""

    def __init__(self, directory: Path, mib: int = 16, options: str = "loop,errors=remount-ro") -> None:
        self.image, self.path, self._options = directory / "image", directory / "volume", options
        with self.image.open("wb") as file:
            file.truncate(mib << 20)
        command("mkfs.ext4", "-q", "-m", "0", "-O", "quota" if "quota" in options else "^has_journal", self.image)
        self.path.mkdir()
        self.mount()
        self.frozen = False

    def mount(self) -> None:
        command("mount", "-o", self._options, self.image, self.path)

    def freeze(self) -> None:
        command("fsfreeze", "-f", self.path)
        self.frozen = True

    def thaw(self) -> None:
        if self.frozen:
            self.frozen = False
            command("fsfreeze", "-u", self.path)

    def fill(self) -> None:
        """Leave no byte free."""
        with (self.path / "filling").open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    continue

    def empty(self) -> None:
        (self.path / "filling").unlink()

    def read_only(self) -> None:
        make_read_only(self.path)

    def gone(self) -> None:
        command("umount", "-l", self.path)

    def close(self) -> None:
        self.thaw()
        while self.path.is_mount():
            subprocess.run(["umount", "-l", str(self.path)], check=True)


@contextmanager
def volume(directory: Path, **settings: Any) -> Iterator[Volume]:
    made = Volume(directory, **settings)
    try:
        yield made
    finally:
        made.close()


class Writing:
    """A writer at work: puts a line of metrics every few milliseconds, and counts the turns of the event loop meanwhile."""

    def __init__(self, run_dir: Path, spill_dir: Path, *, scalars: bool = False) -> None:
        run_dir.mkdir(exist_ok=True)
        self.run_dir = run_dir
        self.lease = RunLease(run_dir)
        self.spill = SpillFile(spill_dir)
        self.troubles: list[str] = []
        self.wells: list[float] = []
        self.taken_over: list[str] = []
        self.defects: list[BaseException] = []
        self.step = 0
        self.kept = 0
        self.turns = 0
        settings = DiskSettings(
            run_dir=str(run_dir),
            token=self.lease.owner.token,
            lock_fd=self.lease.lock_fd,
            scalars=ScalarSettings(queue_size=1, interval=1) if scalars else None,
        )
        heard = Listeners(
            lambda detail, _: self.troubles.append(detail), self.wells.append, self.taken_over.append, self.defects.append
        )
        self.writer = Writer(settings, self.spill, heard)

    def put(self, size: int = 0) -> None:
        self.step += 1
        step = self.step
        self.writer.metrics({"step": step, "loss": 1 / step, "generation": 1, "t": 1e9 + step, "note": "x" * size})
        self.writer.event({"t": 1e9 + step, "event": "note", "generation": 1, "host": "n", "step": step})
        self.writer.written(lambda: setattr(self, "kept", max(self.kept, step)))

    async def turn(self) -> None:
        self.writer.tick()
        self.turns += 1
        await asyncio.sleep(0.005)

    async def until(self, what: Callable[[], object], why: str) -> None:
        """Go on putting lines until it holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, f"in vain: {why}; {self.troubles}, kept {self.kept} of {self.step}"
            self.put()
            await self.turn()

    def steps(self) -> tuple[list[int], list[int]]:
        """Of metrics and events; every line must be whole."""
        found = []
        for name in (ledger.METRICS, ledger.EVENTS):
            text = (self.run_dir / name).read_text()
            lines = list(ledger.read(self.run_dir / name))
            assert len(lines) == text.count("\n") and (not text or text.endswith("\n")), (name, text[-300:])
            found.append([line["step"] for line in lines])
        return found[0], found[1]

    def complete(self) -> None:
        """Every line once, whole, in order."""
        expected = list(range(1, self.step + 1))
        assert self.steps() == (expected, expected)
