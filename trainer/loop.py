"""The training loop: one rank's life from start-up to the last step."""

import logging
import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from checkpoint import CheckpointMismatch, NoUsableCheckpoint
from resilient import worker
from trainer import attention
from trainer.data.errors import DataError
from trainer.data.samples import Samples, Split, open_split
from trainer.layout import settle
from trainer.model import GPT
from trainer.optimizer import make_optimizer, set_learning_rate
from trainer.parallel import Ranks, build_model, initialize, make_ranks, reshard, sync_gradients
from trainer.schedule import for_config
from trainer.shape import flops_per_token, peak_flops, shape_of
from trainer.sources import datasets, refused, vocabulary
from trainer.state import TrainingState

log = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def run(config: worker.Config) -> None:
    """Train until the target step, or until the runtime asks to stop; returns with the state saved.

    Raises:
        ConfigError: the ranks, the device or the data are not what the config needs.
        UnrecoverableError: no checkpoint can be gone on from.
    """
    context = worker.init()
    logging.basicConfig(level=config.logging.level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        with worker.phase("load"):
            trainer = Trainer(config, context)
        trainer.train()
    except DataError as error:
        raise refused(config, error) from error
    dist.destroy_process_group()


def _device(config: worker.Config, context: worker.Context) -> torch.device:
    wanted = config.cluster.device
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        torch.cuda.set_device(context.local_rank)
        return torch.device("cuda", context.local_rank)
    return torch.device("cpu")


class Trainer:
    """A rank that is ready to train: its part of the model, its data, its place in the layout."""

    def __init__(self, config: worker.Config, context: worker.Context) -> None:
        self.config, self.context = config, context
        layout = settle(config, context.world_size)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        torch.manual_seed(config.seed + context.rank)
        self.device = _device(config, context)
        _join(self.device, context)
        self.ranks: Ranks = make_ranks(self.device, layout.dp)
        self.accumulation = layout.accumulation
        self.vocabulary = vocabulary(config)
        shape = shape_of(config, self.vocabulary)
        self.flops_per_token = flops_per_token(shape)
        self.peak_flops = peak_flops(torch.cuda.get_device_name()) if self.device.type == "cuda" else None
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        self.kernel: SDPBackend = attention.choose(config.model.attention, self.device, dtype, shape.head_dim)
        self.train_data: Samples = self._open("train")
        self.model: GPT = build_model(shape, self.ranks, config.train.precision, self.device)
        self.optimizer = make_optimizer(config, self.model)
        self.state = TrainingState(config, self.model, self.optimizer, context)
        try:
            self.state.resume(lambda: initialize(self.model, config.seed))
        except (NoUsableCheckpoint, CheckpointMismatch) as error:
            raise worker.UnrecoverableError(str(error)) from error
        log.info(
            "rank %d of %d on %s: %s parameters, %s attention, %d accumulated micro batches, from step %d",
            *(context.rank, context.world_size, self.device, f"{shape.parameters:,}", self.kernel.name.lower()),
            *(self.accumulation, self.state.progress.step),
        )

    def _open(self, which: Split) -> Samples:
        config = self.config
        return open_split(datasets(config), config.data.split, which, config.model.seq_len, config.seed, vocab_size=self.vocabulary)

    def train(self) -> None:
        """Step after step, with validation and checkpoints where they are due."""
        config, progress = self.config, self.state.progress
        saved = progress.step if progress.step else None
        if progress.step == 0 and config.train.eval_interval:
            self._validate()  # what the training has to show for itself is measured against this
        while progress.step < config.train.steps and worker.should_stop() is None:
            self._step()
            last = progress.step == config.train.steps
            interval = config.train.eval_interval
            if last or (interval and progress.step % interval == 0):
                self._validate()
            if last or progress.step % config.checkpoint.every_steps == 0:
                self.state.save()
                saved = progress.step
        if progress.step and saved != progress.step:
            self.state.save()

    # -- one step ------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        config, progress = self.config, self.state.progress
        began = time.perf_counter()
        with worker.phase("step"):
            samples = progress.consumed_samples + config.train.global_batch_size
            rate = for_config(config, samples)
            loss = torch.zeros((), dtype=torch.float64, device=self.device)
            for number, (tokens, targets) in enumerate(self._micro_batches(self.train_data, progress.consumed_samples)):
                sync_gradients(self.model, number == self.accumulation - 1)
                part = self._loss(tokens, targets) / self.accumulation
                torch.autograd.backward(part)
                loss += part.detach().double()
            norm = self._clip()
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
            self.optimizer.zero_grad()
            mean = self._mean(loss)
        progress.step += 1
        progress.consumed_samples = samples
        self._report(mean, norm, rate, time.perf_counter() - began)
        worker.beat(progress.step)

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of a micro batch; tokens and targets (batch, seq)."""
        with sdpa_kernel(self.kernel):
            logits = self.model(tokens)  # (batch, seq, vocab)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def _micro_batches(self, data: Samples, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's micro batches of the global batch that starts at sample `first`: tokens and targets, (batch, seq)."""
        size = self.config.train.micro_batch_size
        for number in range(self.accumulation):
            start = first + (number * self.ranks.dp + self.ranks.dp_rank) * size
            with worker.phase("data"):
                window = torch.from_numpy(data.get(np.arange(start, start + size)))  # (batch, seq + 1)
                window = window.to(self.device)
            yield window[:, :-1], window[:, 1:]

    def _clip(self) -> float:
        """The global gradient norm, before gradients are scaled down to the limit."""
        limit = self.config.optimizer.clip_grad or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return float(whole)

    def _mean(self, value: Tensor) -> float:
        """Mean over the data-parallel ranks; the same double on each."""
        dist.all_reduce(value)
        return float(value) / self.ranks.dp

    # -- validation and reports ----------------------------------------------------------------------------------------

    def _validate(self) -> None:
        """Mean loss over the first `eval_iters` global batches of the validation split, always the same ones."""
        config = self.config
        if config.data.split[1] == 0:
            return
        with worker.phase("eval"), torch.no_grad():
            data = self._open("valid")
            loss = torch.zeros((), dtype=torch.float64, device=self.device)
            for batch in range(config.train.eval_iters):
                for tokens, targets in self._micro_batches(data, batch * config.train.global_batch_size):
                    loss += self._loss(tokens, targets).double()
            reshard(self.model)
            mean = self._mean(loss) / (config.train.eval_iters * self.accumulation)
        if self.context.rank == 0:
            step = self.state.progress.step
            log.info("step %d validation loss %.4f", step, mean)
            worker.report({"step": step, "val_loss": mean, "val_ppl": math.exp(min(mean, 700.0))}, event="validation")

    def _report(self, loss: float, norm: float, rate: float, step_s: float) -> None:
        if self.context.rank != 0:
            return
        progress = self.state.progress
        tokens = self.config.train.global_batch_size * self.config.model.seq_len
        speed = tokens / step_s
        achieved = speed * self.flops_per_token / self.context.world_size
        worker.report(
            {
                "step": progress.step,
                "loss": loss,
                "grad_norm": norm,
                "lr": rate,
                "samples": progress.consumed_samples,
                "tokens": progress.consumed_samples * self.config.model.seq_len,
                "step_s": step_s,
                "tokens_per_s": speed,
                "mfu": achieved / self.peak_flops if self.peak_flops else None,
            }
        )
        log.info("step %d loss %r grad_norm %.4f lr %.3e %.0f tokens/s", progress.step, loss, norm, rate, speed)


def _join(device: torch.device, context: worker.Context) -> None:
    """Join the process group that the environment describes; alone, without one."""
    if "MASTER_ADDR" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(_backend(device), store=store, rank=context.rank, world_size=context.world_size)
        return
    dist.init_process_group(_backend(device), timeout=COLLECTIVE_TIMEOUT)


def _backend(device: torch.device) -> str:
    # Objects and checkpoints travel over gloo, on the CPU, also where tensors travel over NCCL.
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
