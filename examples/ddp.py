"""Data parallel training with DDP, whose state is kept by three lines: the same script, and the same losses, in each of these.

python examples/ddp.py 40
torchrun --nproc_per_node 2 examples/ddp.py 40
resilient run --procs 2 examples/ddp.py 40      # goes on after whatever happens to its ranks
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import resilient
from resilient import worker

BATCH = 16  # of all ranks together


def main(last_step: int) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # DDP hands rank 0's weights to all; each rank drops out what it likes
    model = DistributedDataParallel(
        torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=last_step)
    seen = {"samples": 0}

    snapshots = resilient.attach(model=model, optimizer=optimizer, scheduler=scheduler, extra=seen)
    for step in snapshots.steps(last_step):
        inputs, targets = batch(step, rank, ranks)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        seen["samples"] += BATCH
        dist.all_reduce(loss := loss.detach() / ranks)
        if rank == 0:
            print(f"step {step + 1} loss {loss.item()!r} samples {seen['samples']}", flush=True)
            worker.report({"step": step + 1, "loss": loss.item()})


def batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a step's samples, (batch, 8), and what they sum to, (batch, 1)."""
    numbers = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 8, generator=numbers).chunk(ranks)[rank]
    return inputs, inputs.sum(1, keepdim=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    dist.destroy_process_group()
    os._exit(0)  # taken down with the interpreter, gloo's threads now and then abort a run that has succeeded
