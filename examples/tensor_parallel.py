"""Tensor parallel training (`parallelize_module`), whose state is kept by three lines: the same script, the same losses, in each of
these. It goes on with another number of ranks too.

python examples/tensor_parallel.py 40
torchrun --nproc_per_node 2 examples/tensor_parallel.py 40
resilient run --procs 2 examples/tensor_parallel.py 40      # goes on after whatever happens to its ranks
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import resilient
from resilient import worker

BATCH, WIDTH, LAYERS = 16, 32, 3


class Block(torch.nn.Module):
    """A residual layer. Its norm is the same on all ranks; of the wide layer each has some columns, of the narrow one some rows."""

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
    torch.manual_seed(0)  # the same weights, and the same data, on all ranks
    model = Model()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # parameters are DTensors and plain ones
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)

    snapshots = resilient.attach(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in snapshots.steps(last_step):
        inputs, targets = batch(step)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item()!r}", flush=True)
            worker.report({"step": step + 1, "loss": loss.item()})


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A step's samples, (batch, width), and what they sum to, (batch, 1)."""
    numbers = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, WIDTH, generator=numbers)
    return inputs, inputs.sum(1, keepdim=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    dist.destroy_process_group()
    os._exit(0)  # taken down with the interpreter, gloo's threads now and then abort a run that has succeeded
