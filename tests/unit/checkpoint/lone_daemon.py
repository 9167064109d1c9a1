"""One snapshot daemon as a program of its own, commanded by the test, which also is its worker."""

import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

from checkpoint import step_path
from checkpoint.daemon.jobs import HANG_S
from checkpoint.framing import Decoder, Message, encode
from checkpoint.handshake import daemon_keys
from checkpoint.protocol import BeginSession, DaemonNews, DaemonSettings, Sync, Synced, TierSettings
from checkpoint.tiers import session
from checkpoint.tiers.lease import LeaseWord

N = TypeVar("N", bound=Message)

PATIENCE_S = 120.0
TOKEN = "of the test"
PREPARED = """
import os, sys
from checkpoint import points
from checkpoint.daemon import daemon, jobs
from checkpoint.daemon.__main__ import main
point, reached, go, tier_s, memory_s, hang_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
def pause():
    points.disarm()
    os.write(reached, b".")
    os.read(go, 1)
if point:
    points.arm(point, pause)
if tier_s:
    daemon.TIER_S = float(tier_s)
daemon.MEMORY_S, jobs.HANG_S = float(memory_s), float(hang_s)
main()
"""


class LoneDaemon:
    """The daemon of a node with a tier in RAM, one on a disk and a durable one.

    Args:
        base: short path of a directory.
        pause_at: a point at which the daemon stops, in whichever thread comes by, until `go` is called.
        tier_s: `TIER_S` of the daemon; its `MEMORY_S` is as long as a test waits, where this, `pause_at` or `hang_s` is given.
        hang_s: `HANG_S` of the daemon.
        log_to: a descriptor for what it logs, in place of a file.
    """

    def __init__(
        self,
        base: Path,
        *,
        buffers: int = 2,
        pause_at: str | None = None,
        tier_s: float | None = None,
        hang_s: float = HANG_S,
        log_to: int | None = None,
    ) -> None:
        self.base, self.buffers = base, buffers
        self.ram, self.nvme, self.durable = base / "ram", base / "nvme", base / "durable"
        self.places = [self.ram]  # of buffers
        self.directory = base / "k"
        self.durable.mkdir(parents=True, exist_ok=True)  # as the driver does
        self.log = base / "log"
        reached, theirs_reached = os.pipe()
        theirs_go, go = os.pipe()
        self._reached, self._go = reached, go
        program = [sys.executable, "-m", "checkpoint.daemon"]
        if tier_s is not None or pause_at is not None or hang_s != HANG_S:
            pauses = [pause_at or "", str(theirs_reached), str(theirs_go)]
            times = ["" if tier_s is None else str(tier_s), str(PATIENCE_S), str(hang_s)]
            program = [sys.executable, "-c", PREPARED, *pauses, *times]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log if log_to is None else log_to,
                bufsize=0,
                pass_fds=(theirs_reached, theirs_go),
            )
        os.close(theirs_reached)
        os.close(theirs_go)
        self.decoder: Decoder[DaemonNews] = Decoder(DaemonNews)
        self.news: list[DaemonNews] = []
        self._unread: list[DaemonNews] = []

    def __enter__(self) -> "LoneDaemon":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        os.close(self._reached)
        os.close(self._go)

    def start(self, generation: int = 1) -> None:
        """Send the settings."""
        tiers = (
            TierSettings(name="nvme", durable=False, path=str(self.nvme), keep_last=2),
            TierSettings(name="durable", durable=True, path=str(self.durable), keep_last=3),
        )
        self.send(
            DaemonSettings(
                generation=generation,
                node=0,
                host="127.0.0.1",
                keys=daemon_keys(TOKEN),
                directory=str(self.directory),
                memory="ram",
                places=tuple(str(place) for place in self.places),
                buffers=self.buffers,
                tiers=tiers,
                nice=0,
            )
        )

    def begin(self, generation: int, ranks: int = 1, nodes: int = 1) -> Path:
        """A generation begins, of so many ranks on this node, which is the first of so many; the path of its session."""
        self.send(BeginSession(generation=generation, node_rank=0, nodes=nodes, first_rank=0, ranks=ranks))
        self.sync(generation)
        path = self.base / "session.json"
        common: dict[str, Any] = {
            "generation": generation,
            "nodes": nodes,
            "ranks": ranks,
            "mtbf_s": 1e5,
            "node": 0,
            "first_rank": 0,
        }
        tiers = [{"name": "ram", "every_steps": 1}, {"name": "durable", "every_steps": 1}]
        session.write(path, {**common, "mtbf_s": 1e5, "directory": str(self.directory), "tiers": tiers, "candidates": []})
        return path

    def sync(self, generation: int) -> Synced:
        """Everything that was sent before is dealt with."""
        self.send(Sync(generation=generation))
        return self.wait_for(Synced)

    def send(self, message: Message) -> None:
        self.write(encode(message))

    def write(self, data: bytes) -> None:
        """These bytes, whatever they are."""
        assert self.process.stdin is not None
        while data:
            data = data[self.process.stdin.write(data) or 0 :]

    def wait_for(self, kind: type[N]) -> N:
        """The next news of this kind; what comes before it is in `news`."""
        assert self.process.stdout is not None
        while True:
            while self._unread:
                found = self._unread.pop(0)
                self.news.append(found)
                if isinstance(found, kind):
                    return found
            assert _readable(self.process.stdout.fileno()), f"no {kind.__name__}: {self.log.read_text()}"
            data = os.read(self.process.stdout.fileno(), 1 << 20)
            assert data, f"the daemon is dead: {self.log.read_text()}"
            self._unread += self.decoder.feed(data)

    def reached(self) -> None:
        """Wait until the daemon is at the point."""
        assert _readable(self._reached), self.log.read_text()
        os.read(self._reached, 1)

    def go(self) -> None:
        """Let the daemon go on from there."""
        os.write(self._go, b".")

    def abandon(self) -> None:
        """The agent is dead: nobody reads what the daemon reports, nor tells it anything."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    @property
    def word(self) -> LeaseWord:
        return LeaseWord(self.directory / session.CONTROL)

    def wait_for_lease(self) -> tuple[int, int]:
        """Generation and buffer of the first lease that is there."""
        word, deadline = self.word, time.monotonic() + PATIENCE_S
        while (lease := word.read()).buffer is None:
            assert time.monotonic() < deadline, "there is no lease"
            time.sleep(0.001)
        return lease.generation, lease.buffer

    def held_path(self, step: int) -> Path:
        return step_path(self.ram, step)


def _readable(fd: int) -> bool:
    """Whether there is something to read before patience ends; whatever the number of the descriptor."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(PATIENCE_S * 1000))
