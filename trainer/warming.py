"""Warming up: what any process does once before and in its first step, done before the process is a rank.

The model is built and a step computed on weights of no account, as the rank that the process may become, in a group that only
pretends to communicate. So kernels are generated, lazy parts of PyTorch set up, and the layout's sharding worked out. Nothing
of it is left but what libraries keep to themselves: a rank's numbers do not depend on it.
"""

import os

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from resilient.worker import DEVICE_VARIABLE, Config, Context, settle
from trainer import attention, gradients
from trainer.batches import Batches
from trainer.data.samples import open_split
from trainer.device import kind
from trainer.engine import make_engine
from trainer.optimizer import make_optimizer
from trainer.parallel import build_stages, make_ranks
from trainer.parallel.data import DTYPES
from trainer.shape import shape_of
from trainer.sources import datasets, end_of_text, vocabulary
from trainer.state import TrainingState
from trainer.weights import initialize

MOST_PARAMETERS = 50_000_000  # beyond, memory would be missed, and warm kernels are not what a restart waits for


def run(config: Config, rank: int, world_size: int) -> None:
    """Compute one step where ranks compute on the CPU; the memory of GPUs is for ranks alone.

    Args:
        rank, world_size: what the process will most likely be.
    """
    if kind(config, os.environ.get(DEVICE_VARIABLE)) == "cuda":
        return
    shape = shape_of(config, vocabulary(config))
    if shape.parameters > MOST_PARAMETERS or config.parallel.pp > 1 or config.train.compile:
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = torch.device("cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        ranks = make_ranks(device, settle(config, world_size, fewer=True))
        dtype = DTYPES[config.train.precision]
        kernel = attention.choose(config.model.attention, shape, device, dtype, documents=config.data.mask_documents)
        stages = build_stages(config, shape, kernel, ranks, device)
        optimizer = make_optimizer(config, stages)
        for stage in stages:
            initialize(stage, config.seed)
        TrainingState(config, stages, optimizer, Context(rank, rank, world_size, world_size, 0, None, False), ranks).arrays()
        samples = open_split(datasets(config), config.data.split, "train", config.model.seq_len, config.seed)
        batches = Batches(config, ranks, device, end_of_text(config))
        batch, counted = batches.read(samples, 0, config.train.micro_batch_size * ranks.layout.dp)
        loss = make_engine(config, stages, ranks, device).train(batch, counted)
        gradients.agree(stages, ranks, loss, counted, 0.0)
        optimizer.step()
    finally:
        dist.destroy_process_group()
