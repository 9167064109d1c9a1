"""A writer at work, and what it has written."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from volumes import PATIENCE_S

from resilient import ledger
from resilient.driver.lease import RunLease
from resilient.driver.spill_file import SpillFile
from resilient.driver.writer import Listeners, Writer
from resilient.protocol.disk import DiskSettings, ScalarSettings


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

    async def close(self, patience_s: float = PATIENCE_S) -> bool:
        """Whether all is written; the lease is given up."""
        done = await self.writer.close(patience_s)
        self.lease.leave()
        return done


def wait_for_end(pid: int | None) -> None:
    """Of a disk process, which writes the last points for TensorBoard after it has answered."""
    assert pid is not None
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(PATIENCE_S)


def scalars_of(directory: Path) -> list[int]:
    """Steps of the points in the only event file of a directory."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (file,) = directory.iterdir()
    return [event.step for event in EventFileLoader(str(file)).Load() if event.HasField("summary")]
