"""The processes of a lab's node (`daemon_lab`): its snapshot daemon and its worker, which may be told where to die.

The worker's state is a function of the step alone, so that what is restored can be compared to the last bit.
"""

import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from checkpoint_processes import kill_this_process

from checkpoint import LocalShard, points

ROWS = 12
LEASE_S = 60.0  # for a daemon to lease a buffer, which it does at once where it gets a processor


def values(name: str, step: int) -> torch.Tensor:
    """What an array holds after a step."""
    shape = {"model/weight": (ROWS, 64), "optimizer/moment": (ROWS, 64), "model/scale": (5,), "model/count": ()}[name]
    count = int(torch.tensor(shape).prod()) if shape else 1
    return (torch.arange(count, dtype=torch.float32) * 0.5 + 1000.0 * step + len(name)).reshape(shape)


def local_shards(rank: int, world: int, step: int) -> list[LocalShard]:
    """A rank's part: rows of two arrays, and a copy of two others."""
    part = -(-ROWS // world)
    low, high = min(rank * part, ROWS), min((rank + 1) * part, ROWS)
    sharded = [
        LocalShard(name, (ROWS, 64), (low, 0), values(name, step)[low:high].clone(), (part, 64))
        for name in ("model/weight", "optimizer/moment")
    ]
    whole = [
        LocalShard(
            name,
            tuple(values(name, 0).shape),
            (0,) * values(name, 0).dim(),
            values(name, step).clone(),
            (5,) * values(name, 0).dim(),
            rank,
            world,
        )
        for name in ("model/scale", "model/count")
    ]
    return [*sharded, *whole]


def daemon_child(
    pipe: Connection, inbox: str, outbox: str, point: str | None, after: int, stale_s: float, release_s: float, hang_s: float
) -> None:
    """A daemon that dies when it reaches a point for the `after`-th time. Args: stale_s, release_s, hang_s: as `Lab`'s."""
    from checkpoint.daemon import jobs
    from checkpoint.daemon.__main__ import main

    jobs.STALE_S, jobs.RELEASE_S, jobs.HANG_S = stale_s, release_s, hang_s

    os.dup2(os.open(inbox, os.O_RDONLY), 0)
    os.dup2(os.open(outbox, os.O_WRONLY), 1)
    _arm(point, after)
    main()
    os._exit(0)


class DaemonProgram:
    """A daemon as an agent starts it, in an interpreter of its own; a file lists what it imports, and when."""

    def __init__(self, inbox: Path, outbox: Path, imports: Path) -> None:
        script = 'exec "$0" -X importtime -m checkpoint.daemon <"$1" >"$2" 2>"$3"'
        self._process = subprocess.Popen(["sh", "-c", script, sys.executable, inbox, outbox, imports])

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def _arm(point: str | None, after: int) -> None:
    left = after

    def reached() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            kill_this_process()

    if point is not None:
        points.arm(point, reached)


def worker_child(pipe: Connection, store: str, path: str, root: str, rank: int, world: int, point: str | None) -> None:
    """A rank: restores, then takes a snapshot of every step that it is told."""
    import torch.distributed as dist

    from checkpoint import Snapshots, restore

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    snapshots = Snapshots(Path(path))
    mine = local_shards(rank, world, -1)
    rejected: list[Any] = []
    found = restore(
        Path(root), lambda state: mine, held=snapshots.session.candidates, on_reject=lambda *each: rejected.append(each)
    )
    step = 0
    if found is not None:
        step = found.step
        same = all(torch.equal(one.data, other.data) for one, other in zip(mine, local_shards(rank, world, step), strict=True))
        assert same and found.state["step"] == step, f"rank {rank}: what was restored is not step {step}"
    pipe.send((step, found.tier if found else None, rejected))
    snapshots.start(mine)
    pipe.send(snapshots.ready())
    _arm(point, 1)
    while True:
        order = pipe.recv()
        if order is None:
            break
        step, tiers, changed, wait_s = order
        for one, other in zip(mine, local_shards(rank, world, step if changed else step - 1), strict=True):
            one.data.copy_(other.data)
        copied = snapshots.take(step, mine, {"step": step}, frozenset(tiers), wait_s=wait_s).copied
        if wait_s == 0 and snapshots.left_out(copied):  # the last step
            copied = snapshots.take(step, mine, {"step": step}, frozenset(tiers), wait_s=LEASE_S, again=1).copied
        pipe.send(copied)
    pipe.close()
    os._exit(0)
