"""Attached: every 40th step rank 0 validates for `seconds`, while others wait; then the loop is left, and all evaluate as long.

words: how it validates (sleeps, spins) and for how long.
"""

import sys
import time

import torch
import torch.distributed as dist

import resilient
from resilient import worker


def validate(how: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if how == "sleeps":
            time.sleep(0.1)


def main(how: str, seconds: float) -> None:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    snapshots = resilient.attach(model=model, optimizer=optimizer)
    for step in snapshots.steps(1000):
        model(torch.ones(8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        if dist.get_rank() == 0:
            worker.report({"step": step + 1, "loss": 0.0})
        if step % 40 == 39:
            if dist.get_rank() == 0:
                validate(how, seconds)
            dist.barrier()
        if step == 99:
            break
    validate(how, seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
