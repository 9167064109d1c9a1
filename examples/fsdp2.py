"""Sharded training with FSDP2 (`fully_shard`), whose state is kept by three lines: the same script and the same losses in each of
these. It goes on with another number of ranks too.

python examples/fsdp2.py 40
torchrun --nproc_per_node 2 examples/fsdp2.py 40
resilient run --procs 2 examples/fsdp2.py 40      # goes on after whatever happens to its ranks
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import resilient
from resilient import worker

BATCH, WIDTH, LAYERS = 16, 32, 3


class Block(torch.nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.wide = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))
        return out


class Model(torch.nn.Module):
    """A few layers that learn to add numbers up."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def main(last_step: int) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on all ranks, before they are sharded
    model = Model()
    mesh = dist.init_device_mesh("cpu", (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)

    snapshots = resilient.attach(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in snapshots.steps(last_step):
        inputs, targets = batch(step, rank, ranks)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        dist.all_reduce(loss := loss.detach() / ranks)
        if rank == 0:
            print(f"step {step + 1} loss {loss.item()!r}", flush=True)
            worker.report({"step": step + 1, "loss": loss.item()})


def batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a step's samples, (batch, width), and what they sum to, (batch, 1)."""
    numbers = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, WIDTH, generator=numbers).chunk(ranks)[rank]
    return inputs, inputs.sum(1, keepdim=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    dist.destroy_process_group()
    os._exit(0)  # taken down with the interpreter, gloo's threads now and then abort a run that has succeeded
