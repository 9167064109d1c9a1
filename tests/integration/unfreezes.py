"""A script that trains its first layer from step 10 on, with the gradients of all ranks. Args: steps."""

import os
import sys

import torch
from torch import distributed as dist

import resilient
from resilient import worker

dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
model[0].requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
snapshots = resilient.attach(model=model, optimizer=optimizer)
for step in snapshots.steps(int(sys.argv[1])):
    model[0].requires_grad_(step >= 10)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    optimizer.step()
    dist.all_reduce(loss := loss.detach())
    if dist.get_rank() == 0:
        print(f"step {step + 1} loss {loss.item()!r}", flush=True)
        worker.report({"step": step + 1, "loss": loss.item()})
dist.destroy_process_group()
os._exit(0)
