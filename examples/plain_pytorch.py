"""A plain PyTorch script that goes on where it ended, with nothing of this project but its checkpoints.

python examples/plain_pytorch.py checkpoints 20
torchrun --nproc_per_node 2 examples/plain_pytorch.py checkpoints 40     # goes on at step 20, with two ranks
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from checkpoint import ZarrReader, ZarrWriter, newest_good, prune


def main(root: Path, last_step: int) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.GELU(), torch.nn.Linear(33, 1))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    step = 0
    path = newest_good(root)  # every byte of it is verified, by all ranks together
    if path is not None:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": step}
        dcp.load(state, storage_reader=ZarrReader(path))  # whatever number of ranks wrote it
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step = state["step"]

    while step < last_step:
        numbers = torch.Generator().manual_seed(step)  # the batch follows from the step, so that none is seen twice
        inputs = torch.randn(16, 7, generator=numbers).chunk(ranks)[rank]
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            print(f"step {step} loss {loss.item():.9g}", flush=True)
        if step % 5 == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments, "step": step}, storage_writer=ZarrWriter(root, step))
            if rank == 0:
                prune(root, keep_last=3)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    dist.destroy_process_group()
    os._exit(0)  # taken down with the interpreter, gloo's threads now and then abort a run that has succeeded
