"""A script whose rank 1 keeps more with each step, and checks that all of it is there. `grows.py STEPS [before|after]`

`before` and `after`: in the first generation rank 1 dies when it has to announce more room for that, or has just done so.
"""

import os
import signal
import sys
from collections.abc import Sequence

import torch
from torch import distributed as dist

import resilient
from checkpoint import LocalShard, Snapshots
from resilient import worker

ENTRY = "." * 16_000

dist.init_process_group("gloo")
rank, dies = dist.get_rank(), sys.argv[2] if len(sys.argv) > 2 else None
start, announcements = Snapshots.start, 0


def deadly_start(snapshots: Snapshots, local_shards: Sequence[LocalShard]) -> None:
    global announcements
    announcements += 1
    if announcements == 2 and dies == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    start(snapshots, local_shards)
    if announcements == 2:
        os.kill(os.getpid(), signal.SIGKILL)


if dies is not None and rank == 1 and os.environ.get(worker.GENERATION_VARIABLE) == "1":
    Snapshots.start = deadly_start  # type: ignore[method-assign, assignment]
torch.manual_seed(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
extra: dict[str, list[str]] = {"all": []}
snapshots = resilient.attach(model=model, optimizer=optimizer, extra=extra)
for step in snapshots.steps(int(sys.argv[1])):
    if extra["all"] != [f"{each}{ENTRY}" for each in range(step) if rank == 1]:
        raise AssertionError(f"{len(extra['all'])} entries before step {step}")
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    if rank == 1:
        extra["all"].append(f"{step}{ENTRY}")
    dist.all_reduce(loss := loss.detach())
    if rank == 0:
        print(f"step {step + 1} loss {loss.item()!r}", flush=True)
        worker.report({"step": step + 1, "loss": loss.item()})
dist.destroy_process_group()
os._exit(0)
