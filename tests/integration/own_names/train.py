"""A script whose own modules have the names of packages of the runtime. Args: steps; the step behind which ranks stand still."""

import os
import sys
import time

import torch
from torch import distributed as dist

import resilient
from chaos import noisy
from resilient import worker
from trainer import Trainer

steps, *holds = map(int, sys.argv[1:])
dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
snapshots = resilient.attach(model=model, optimizer=trainer.optimizer)
for step in snapshots.steps(steps):
    if holds:
        from holding import GO_ON, hold

        time.sleep(0.0 if GO_ON.exists() else 0.05)  # the pace of a step: a rank is killed in the middle of the run
        hold(step, holds[0])
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    loss = trainer.step(noisy(inputs, step))
    if dist.get_rank() == 0:
        print(f"step {step + 1} loss {loss.item()!r}", flush=True)
        worker.report({"step": step + 1, "loss": loss.item()})
dist.destroy_process_group()
os._exit(0)
