"""Warming up: what any process does once before and in its first step, done before the process is a rank.

The model is built and a step computed on weights of no account, as the rank that the process may become, in a group that only
pretends to communicate. So kernels are generated, lazy parts of PyTorch set up, and the layout's sharding worked out. Nothing
of it is left but what libraries keep to themselves: a rank's numbers do not depend on it.
"""

import logging
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from resilient.worker import DEVICE_VARIABLE, Config, Context, Layout, settle
from trainer import fit, gradients, kernels
from trainer.attention import Kernel
from trainer.batches import Batches, unfolded
from trainer.data.samples import open_split
from trainer.device import connect_alone, give_back, kind, make_ready, memory_of, of_standby, onto
from trainer.engine import make_engine
from trainer.guard import Limits
from trainer.loss import CrossEntropy
from trainer.optimizer import make_optimizer
from trainer.parallel import Ranks, build_stages, make_ranks, sharing
from trainer.parallel.build import build
from trainer.parallel.data import DTYPES
from trainer.shape import GPTShape, shape_of
from trainer.sources import datasets, end_of_text, vocabulary
from trainer.stages import Stage
from trainer.state import TrainingState
from trainer.update import Update
from trainer.weights import initialize

log = logging.getLogger(__name__)

MOST_PARAMETERS = 50_000_000  # beyond, memory would be missed, and warm kernels are not what a restart waits for


def run(config: Config, rank: int, world_size: int) -> None:
    """Compute one step where ranks compute on the CPU. On a GPU, whose memory is for ranks, only have it ready, if there is room.

    Args:
        rank, world_size: what the process will most likely be.
    """
    if kind(config, os.environ.get(DEVICE_VARIABLE)) == "cuda":
        if config.resilience.gpu_standby is not False:
            on_gpu(config, rank, world_size, of_standby())
        return
    shape = shape_of(config, vocabulary(config))
    if shape.parameters > MOST_PARAMETERS or config.parallel.pp > 1 or config.train.compile is True:
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = torch.device("cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        ranks = make_ranks(device, settle(config, world_size, fewer=True))
        dtype = DTYPES[config.train.precision]
        kernel = kernels.choose(config.model.attention, shape, device, dtype, documents=config.data.mask_documents)
        stages = build_stages(config, shape, kernel, ranks, device)
        optimizer = make_optimizer(config, stages)
        for stage in stages:
            initialize(stage, config.seed)
        TrainingState(config, stages, optimizer, Context(rank, rank, world_size, world_size, 0, None, False), ranks).arrays()
        samples = open_split(datasets(config), config.data.split, "train", config.model.seq_len, config.seed)
        batches = Batches(config, ranks, device, end_of_text(config))
        batch, counted = batches.read(samples, 0, config.train.micro_batch_size * ranks.layout.dp)
        loss = make_engine(config, stages, ranks, device).train(batch.to(device), onto(counted, device))
        gradients.agree(stages, ranks, loss, counted, 0.0)
        optimizer.step()
    finally:
        dist.destroy_process_group()


def on_gpu(config: Config, rank: int, world_size: int, device: torch.device) -> None:
    """Have a context, cuBLAS, NCCL, and the kernels of attention, which are tried out on a small example; that alone is held.

    Where there is room, also the kernels of a layer, of the loss and of the optimizer, compiled or not: CUDA loads each one only
    when it is first launched. What a GPU that refuses has left in this process is not known, so that it ends, and the rank will be
    another one.
    """
    shape, spread = shape_of(config, vocabulary(config)), settle(config, world_size, fewer=True)
    try:
        gpu_bytes = fit.gpu_bytes_of(config, memory_of(device))
        config = fit.settled(config, shape, spread, gpu_bytes)
        if not fit.holds_standby(config, shape, spread, gpu_bytes):
            return
        if config.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is set up
        dtype = DTYPES[config.train.precision]
        make_ready(device, dtype)
        connect_alone(device)
        if fit.has_room_to_warm_kernels(config, shape, spread, gpu_bytes):
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            torch.use_deterministic_algorithms(config.train.deterministic)
            kernel = kernels.foreseen(config, shape, spread, device, dtype)
            compute_layer(config, shape, spread, kernel, device, rank)
            kernels.ran(kernel, config, shape, spread, device, dtype)
        else:
            kernels.choose(config.model.attention, shape, device, dtype, documents=config.data.mask_documents)
        give_back(device)
    except RuntimeError as error:
        log.warning("%s is not held ready for a standby: %s", device, error)
        raise SystemExit(1) from None


def compute_layer(config: Config, shape: GPTShape, spread: Layout, kernel: Kernel, device: torch.device, rank: int) -> None:
    """Have the kernels of a rank's step: a layer of each kind computes forward and backward and is changed by the optimizer,
    tokens are looked up, and the loss computes; where they are compiled, the rank's first step compiles none of them.

    What ranks of this node have compiled is read from Inductor's cache on disk. To PyTorch it is the same how many layers there
    are, and which process group shards them; the group here only pretends to communicate.

    Args:
        config: as `fit.settled` gives it.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=spread.world_size)
    try:
        ranks = make_ranks(device, spread)
        dtype = DTYPES[config.train.precision]
        _step_of_a_layer(config, shape, kernel, ranks, device)
        if ranks.pp_rank == 0:
            _embed(config, shape, device)
        _accumulate(device)
        give_back(device)
        if ranks.counts_loss:
            tokens = config.train.micro_batch_size * shape.seq_len
            hidden = torch.zeros(config.train.micro_batch_size, shape.seq_len, shape.hidden, dtype=dtype, device=device)
            weight = torch.zeros(shape.vocab, shape.hidden, dtype=dtype, device=device)
            targets = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=device)
            loss = CrossEntropy(compiled=config.train.compile is True)
            torch.autograd.backward(loss(hidden.requires_grad_(), weight.requires_grad_(), targets) / tokens)
    finally:
        dist.destroy_process_group()


def _step_of_a_layer(config: Config, shape: GPTShape, kernel: Kernel, ranks: Ranks, device: torch.device) -> None:
    middle = Stage(1, 3, range(min(2, config.train.recompute_every)))  # without embedding and head, which are large
    stage = build(config, shape, kernel, ranks, device, middle)
    optimizer = make_optimizer(config, [stage], sharing(ranks) if config.optimizer.name == "muon" else None)
    rows = config.train.micro_batch_size
    batch = unfolded(torch.zeros(rows, shape.seq_len + 1, dtype=torch.int64), config, end_of_text(config)).to(device)
    given = torch.zeros(rows, shape.seq_len, shape.hidden, dtype=DTYPES[config.train.precision], device=device)
    found = stage(given.requires_grad_() * 1, batch.positions, batch.documents)  # as from the layer before, which is no leaf
    torch.autograd.backward(found, torch.ones_like(found))
    zero, one = torch.zeros((), dtype=torch.float64, device=device), torch.ones((), dtype=torch.int64, device=device)
    measured = gradients.agree([stage], ranks, zero, one, 0.0)
    guard = config.train.guard
    limits = Limits(not_finite=guard.not_finite, highest=None if guard.spike is None else math.inf, usual="")  # of what is judged
    Update(optimizer, [stage], config.optimizer.clip_grad).step(measured, limits)


def _embed(config: Config, shape: GPTShape, device: torch.device) -> None:
    """Embed a micro batch and differentiate it; what is launched depends on the tokens, and not on the size of the vocabulary."""
    few = torch.zeros(2, shape.hidden, dtype=DTYPES[config.train.precision], device=device)
    tokens = torch.zeros(config.train.micro_batch_size, shape.seq_len, dtype=torch.int64, device=device)
    found = F.embedding(tokens, few.requires_grad_())
    torch.autograd.backward(found, torch.ones_like(found))


def _accumulate(device: torch.device) -> None:
    """What micro batches come to: their gradients, which add up, and the number by which their losses are divided."""
    gradient = torch.zeros(2, device=device)
    gradient.add_(gradient).mul_(1 / torch.full_like(torch.ones((), dtype=torch.int64, device=device), 1))
