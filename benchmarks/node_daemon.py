"""A snapshot daemon for `benchmarks/checkpoint.py`, commanded as an agent does."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Protocol

# There benchmarks/checkpoint.py would be the package `checkpoint`; of no use any more to whoever imports this, either.
sys.path = [place for place in sys.path if place != str(Path(__file__).parent)]

import torch.distributed as dist
from torch.distributed.tensor import DTensor

import checkpoint
from checkpoint import protocol
from checkpoint.framing import Decoder, Message, encode
from checkpoint.handshake import daemon_keys
from checkpoint.tiers import session


class Bench(Protocol):
    """One rank's share of the state."""

    rank: int
    base: Path
    state: dict[str, DTensor]

    def local_shards(self) -> list[checkpoint.LocalShard]: ...


class NodeDaemon:
    """The snapshot daemon of the node that all ranks are on; rank 0 commands it."""

    def __init__(self, bench: Bench, ranks: int) -> None:
        self.bench, self.ranks = bench, ranks
        self.place = Path(f"/dev/shm/resilient-benchmark-{os.getppid()}")
        self.root = bench.base / "flushed"

    def __enter__(self) -> "NodeDaemon":
        directory, path = self.place / "k", self.place / "session.json"
        if self.bench.rank == 0:
            shutil.rmtree(self.place, ignore_errors=True)
            self.place.mkdir(parents=True)
            self.root.mkdir(exist_ok=True)  # as a driver has; a daemon makes no durable tier
            self.process = subprocess.Popen(
                [sys.executable, "-m", "checkpoint.daemon"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self.send(
                protocol.DaemonSettings(
                    generation=1,
                    node=0,
                    host="127.0.0.1",
                    keys=daemon_keys(""),
                    directory=str(directory),
                    memory="ram",
                    places=(str(self.place / "ram"),),
                    buffers=2,
                    tiers=(protocol.TierSettings(name="durable", durable=True, path=str(self.root), keep_last=1),),
                )
            )
            self.wait_for(protocol.Listening)
            self.send(protocol.BeginSession(generation=1, node_rank=0, nodes=1, first_rank=0, ranks=self.ranks))
            common = {"generation": 1, "node": 0, "nodes": 1, "first_rank": 0, "ranks": self.ranks, "mtbf_s": 1e5, "candidates": []}
            tiers = [{"name": "ram", "every_steps": 1}]
            session.write(path, {**common, "directory": str(directory), "tiers": tiers})
        dist.barrier()
        self.snapshots = checkpoint.Snapshots(path)
        self.snapshots.start(self.bench.local_shards())
        assert self.snapshots.ready()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:  # the daemon may answer nothing any more, and the other ranks are ended
            if self.bench.rank == 0:
                self.process.kill()
                shutil.rmtree(self.place, ignore_errors=True)
            return
        dist.barrier()
        if self.bench.rank == 0:
            self.send(protocol.Clear(generation=1, tiers=("ram",)))
            self.wait_for(protocol.Cleared)
            self.process.stdin.close()
            self.process.wait()
            shutil.rmtree(self.place, ignore_errors=True)
        dist.barrier()

    def send(self, message: Message) -> None:
        self.process.stdin.write(encode(message))
        self.process.stdin.flush()

    def wait_for(self, kind: type[Message]) -> None:
        decoder: Decoder[protocol.DaemonNews] = Decoder(protocol.DaemonNews)
        while True:
            news = decoder.decode(self.process.stdout.readline())
            if isinstance(news, kind):
                return
            assert not isinstance(news, protocol.TierTrouble | protocol.JobFailed | protocol.NoRoom), news

    def cpu_s(self) -> float:
        if self.bench.rank:
            return 0.0
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def snapshot(self, step: int) -> float:
        """Take one and wait until it is sealed; seconds that this rank stood still."""
        for tensor in self.bench.state.values():
            tensor.to_local()[0, 0] += 1
        local_shards = self.bench.local_shards()
        dist.barrier()
        result = self.snapshots.take(step, local_shards, {}, frozenset(["ram"]), wait_s=10.0)
        assert result.copied
        if self.bench.rank == 0:
            self.wait_for(protocol.Held)
            self.send(protocol.Retain(generation=1, tier="ram", steps=(step,), upto=step))
        dist.barrier()
        return result.stall_s

    def flush(self, step: int) -> None:
        """Take a snapshot and wait until it is committed."""
        self.snapshot(step)
        if self.bench.rank == 0:
            job = {"tier": "durable", "key": protocol.SnapshotKey(step, 1), "generation": 1, "job_id": step, "shard": 0}
            self.send(protocol.StartJob(kind="flush", **job))
            self.wait_for(protocol.Flushed)
            self.send(protocol.StartJob(kind="commit", **job))
            self.wait_for(protocol.Committed)
