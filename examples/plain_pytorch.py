"""A plain PyTorch script that goes on where it ended: checkpoints, and the calls by which a supervisor knows how it is doing.

python examples/plain_pytorch.py checkpoints 20
torchrun --nproc_per_node 2 examples/plain_pytorch.py checkpoints 40     # goes on at step 20, with two ranks
resilient run examples/plain_pytorch.yaml                                # and is started again whatever happens to them
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
from resilient import worker


def main(root: Path, last_step: int) -> None:
    generation = worker.init().generation  # 0 without a supervisor, where none of these calls does anything
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

    while step < last_step and not worker.should_stop():
        with worker.phase("step"):
            loss = train(model, optimizer, step, rank, ranks)
        step += 1
        worker.beat(step)
        if rank == 0:
            worker.report({"step": step, "loss": loss})
            print(f"step {step} loss {loss:.9g}", flush=True)
        if step % 5 == 0:
            with worker.phase("snapshot"):
                weights, moments = get_state_dict(model, optimizer)
                writer = ZarrWriter(root, step, generation=generation)
                dcp.save({"model": weights, "optimizer": moments, "step": step}, storage_writer=writer)
                if rank == 0:
                    prune(root, keep_last=3)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, ranks: int) -> float:
    numbers = torch.Generator().manual_seed(step)  # the batch follows from the step, so that none is seen twice
    inputs = torch.randn(16, 7, generator=numbers).chunk(ranks)[rank]
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    dist.destroy_process_group()
    os._exit(0)  # taken down with the interpreter, gloo's threads now and then abort a run that has succeeded
