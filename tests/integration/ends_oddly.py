"""A script that is attached, and whose end is not as it should be: `ends_oddly.py WHAT STEPS`.

`waits`: all ranks end well, once there is a file `go`. `leaves`: in the snapshot of the last step, rank 1 has copied its state and
ends well without having reported it; rank 0 ends too.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import resilient
from checkpoint import points

what, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
snapshots = resilient.attach(model=model, optimizer=optimizer)
while snapshots.step < steps and not snapshots.should_stop():
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    if what == "leaves" and snapshots.step == steps - 1:
        dist.barrier()
        if rank == 1:
            points.arm("snapshot_copied", lambda: os._exit(0))
        snapshots.after_step()
        os._exit(0)
    snapshots.after_step()
    time.sleep(0.1)
snapshots.close()
dist.barrier()
while not Path("go").exists():
    time.sleep(0.01)
os._exit(0)
