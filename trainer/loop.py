"""The training loop: one rank's life from start-up to the last step."""

import functools
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint import CheckpointMismatch, NoUsableCheckpoint
from resilient import worker
from trainer import fit, gradients, kernels
from trainer.ahead import Ahead
from trainer.batches import Batches
from trainer.data.errors import DataError, MissingError, StorageError
from trainer.data.samples import Samples, Split, open_split
from trainer.device import device_of, least_memory, onto
from trainer.engine import Batch, make_engine
from trainer.garbage import collected_at_steps
from trainer.guard import Bad, BadBatch
from trainer.guard import limits as guard_limits
from trainer.heap import keep_freed_memory
from trainer.inspection import Inspection
from trainer.instruments import Instruments
from trainer.memory import most
from trainer.optimizer import make_optimizer, set_learning_rate
from trainer.parallel import build_stages, make_ranks, sharing
from trainer.parallel.data import DTYPES
from trainer.schedule import for_config
from trainer.shape import GPTShape, flops_per_token, peak_flops, shape_of
from trainer.sources import datasets, end_of_text, refused, vocabulary
from trainer.state import TrainingState, random_state, seed_random, set_random_state
from trainer.update import Update
from trainer.weights import initialize

log = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_S = 600.0  # without a supervisor
LOOK_EVERY = 8  # batches of a validation, between which ranks agree whether training is to stop


def run(config: worker.Config) -> bool:
    """Train until the target step, or until the runtime asks to stop; returns with the state saved: whether the target is reached.

    Raises:
        ConfigError: the ranks, the device or the data are not what the config needs.
        MissingError, StorageError: the data is gone, or cannot be read now.
        UnrecoverableError: no checkpoint can be gone on from.
        BadBatch: too many batches in a row were bad.
    """
    config = worker.decided_here(config)
    context = worker.init()
    logging.basicConfig(level=config.logging.level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        with worker.phase("load"):
            trainer = Trainer(config, context)
        trainer.train()
    except (MissingError, StorageError):
        raise  # it was there when the job began, and may be again
    except DataError as error:
        raise refused(config, error) from error
    dist.barrier()  # who leaves while others still connect, as where nothing is left to do, looks to them as if it had died
    dist.destroy_process_group()
    return trainer.state.progress.step >= config.train.steps


class Trainer:
    """A rank that is ready to train: its part of the model, its data, its place in the layout."""

    def __init__(self, config: worker.Config, context: worker.Context) -> None:
        self.config, self.context = config, context
        self._began = time.monotonic()
        layout = worker.settle(config, context.world_size, fewer=context.supervised)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        if config.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self.device = device_of(config, context)
        if self.device.type == "cpu":
            keep_freed_memory()
        _join(self.device, context)
        self.ranks = make_ranks(self.device, layout)
        seed_random(config.seed, self.ranks, config)
        self.vocabulary = vocabulary(config)
        shape = shape_of(config, self.vocabulary)
        given, config = config, self._fitting(shape, layout)
        self.config = config
        dtype = DTYPES[config.train.precision]
        kernel = kernels.settle(config, shape, layout, self.device, dtype)
        self.train_data: Samples = self._open("train")
        self._valid_data = self._open("valid") if self.config.data.split[1] > 0 else None
        self.stages = build_stages(config, shape, kernel, self.ranks, self.device)
        self.optimizer = make_optimizer(config, self.stages, sharing(self.ranks) if config.optimizer.name == "muon" else None)
        self.update = Update(self.optimizer, self.stages, config.optimizer.clip_grad)
        self.state = TrainingState(given, self.stages, self.optimizer, context, self.ranks)
        self.engine = make_engine(config, self.stages, self.ranks, self.device)
        self.batches = Batches(config, self.ranks, self.device, end_of_text(config))
        self.ahead = Ahead(functools.partial(self.batches.read, self.train_data))
        self.sizes = config.train.batches
        self.instruments = Instruments(config, context, self.device, flops_per_token(shape), self._peak())
        self.time_is_up = False
        try:
            self.state.resume(self._initialize)
        except (NoUsableCheckpoint, CheckpointMismatch) as error:
            raise worker.UnrecoverableError(str(error)) from error
        log.info(
            "rank %d of %d on %s: tp %d, cp %d, pp %d, dp %d, %s parameters in all, %s attention, %d micro batches, from step %d",
            *(context.rank, context.world_size, self.device, layout.tp, layout.cp, layout.pp, layout.dp),
            *(f"{shape.parameters:,}", kernel.value, layout.accumulation, self.state.progress.step),
        )

    def _fitting(self, shape: GPTShape, layout: worker.Layout) -> worker.Config:
        """The config with what it leaves to the GPU's memory decided. Raises UnrecoverableError where it cannot fit."""
        gpu_bytes = fit.gpu_bytes_of(self.config, least_memory(self.device)) if self.device.type == "cuda" else None
        config = fit.settled(self.config, shape, layout, gpu_bytes)
        problem = None if gpu_bytes is None else fit.too_much(config, shape, layout, gpu_bytes)
        if problem is not None and gpu_bytes is not None and most(config, shape, layout)[1].peak > gpu_bytes:
            raise worker.UnrecoverableError(f"{problem}; cluster.gpu_memory_gib: none tries it all the same")
        if problem is not None and self.context.rank == 0:
            log.warning("%s", problem)
        return config

    def _initialize(self) -> None:
        for stage in self.stages:
            initialize(stage, self.config.seed)

    def _peak(self) -> float | None:
        return peak_flops(torch.cuda.get_device_name(), self.config.train.precision) if self.device.type == "cuda" else None

    def _open(self, which: Split) -> Samples:
        config = self.config
        return open_split(datasets(config), config.data.split, which, config.model.seq_len, config.seed, vocab_size=self.vocabulary)

    def train(self) -> None:
        """Step after step, with validation and checkpoints where they are due."""
        config, progress = self.config, self.state.progress
        if progress.step == 0 and config.train.eval_interval:
            self._validate(last=False)  # what the training has to show for itself is measured against this
        elif progress.step == config.train.steps:
            worker.beat(progress.step)  # no step follows by which a recovery would be seen
            self._validate(last=True)  # in which the attempt that has saved this step may have ended
        with collected_at_steps() as collect, closing(self.ahead):
            self._steps(collect)
        self.instruments.close()
        if progress.step:
            self.state.save()

    def _steps(self, collect: Callable[[int], None]) -> None:
        config, progress = self.config, self.state.progress
        while progress.step < config.train.steps and worker.should_stop() is None and not self.time_is_up:
            if self.context.skips(progress.step + 1):
                self._leave_out()
            else:
                self._step()
            self.state.start()  # no earlier: after a fault the next step comes first
            last = progress.step == config.train.steps
            interval = config.train.eval_interval
            if last:
                self.state.save()  # first: what ends the run during a long validation costs no step
            if last or (interval and progress.step % interval == 0):
                self._validate(last=last)
            if not last:
                self.state.save_if_due()
            collect(progress.step)

    # -- one step ------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        config, progress, instruments = self.config, self.state.progress, self.instruments
        size = self.sizes.at(progress.consumed_samples)
        instruments.start_step(progress.step + 1, lambda: Inspection(self.stages, self.optimizer, self.device))
        with worker.phase("step"):
            random = random_state()
            rate = for_config(config, progress.consumed_samples + size)
            set_learning_rate(self.optimizer, rate)
            found, bad = self._attempt(size)
            if bad is not None:
                self._report(bad, "recompute_batch", "a fault of the hardware would not come again")
                self.optimizer.zero_grad()
                set_random_state(random)
                found, bad = self._attempt(size)
                if bad is not None:
                    self._skip(bad)
            if bad is None:
                progress.skipped = 0
                progress.updates += 1
                if config.train.guard.spike is not None and math.isfinite(found.loss):
                    progress.losses = [*progress.losses, found.loss][-config.train.guard.window :]
            instruments.computed()
            self.optimizer.zero_grad()
        progress.step += 1
        progress.consumed_samples += size
        self.time_is_up = found.extra > 0
        instruments.report(found, rate, size, progress, skipped=bad.kind if bad else None)
        worker.beat(progress.step)

    def _leave_out(self) -> None:
        """Pass by a batch that the runtime found to be bad whatever the weights."""
        progress = self.state.progress
        self.instruments.start_step(progress.step + 1)
        size = self.sizes.at(progress.consumed_samples)
        progress.step += 1
        progress.consumed_samples += size
        self.state.passed_by()
        self.instruments.left_out(progress)
        worker.beat(progress.step)

    def _attempt(self, size: int) -> tuple[gradients.Found, Bad | None]:
        """Compute the next global batch and change the weights by it, unless it is bad."""
        guard = self.config.train.guard
        limits = guard_limits(self.state.progress.losses, not_finite=guard.not_finite, spike=guard.spike, window=guard.window)
        measured = self._gradients(size)
        with self.instruments.span("optimizer"):
            return self.update.step(measured, limits)

    def _gradients(self, size: int) -> gradients.Measured:
        """Both passes over the next global batch."""
        instruments = self.instruments
        with worker.phase("data"), instruments.span("data"):
            batch, counted = self._next_batch(size)
            if self.config.data.mask_end_of_text:
                dist.all_reduce(counted, group=self.ranks.mesh.get_group("dp"))
            else:
                counted = torch.full_like(counted, size * self.config.model.seq_len)
        with instruments.span("forward_backward"):
            loss = self.engine.train(batch, counted)
        with instruments.span("reduce"):
            gradients.sum_tied(self.stages, self.ranks)
            return gradients.agree(self.stages, self.ranks, loss, counted, self._late())

    def _next_batch(self, size: int) -> tuple[Batch, Tensor]:
        """This rank's part of the next global batch, on the device; the one after it is read from here on."""
        progress = self.state.progress
        batch, counted = self.ahead.take(progress.consumed_samples, size)
        after = progress.consumed_samples + size
        if progress.step + 1 < self.config.train.steps:
            self.ahead.begin(after, self.sizes.at(after))
        return batch.to(self.device), onto(counted, self.device)

    def _late(self) -> float:
        """1 on the first rank once `exit_duration_min` has passed; under the supervisor, its driver watches the time."""
        limit = self.config.train.exit_duration_min
        alone = not self.context.supervised and self.context.rank == 0
        return float(alone and limit is not None and time.monotonic() - self._began > 60 * limit)

    def _skip(self, bad: Bad) -> None:
        progress, most = self.state.progress, self.config.train.guard.max_skips
        progress.skipped += 1
        if progress.skipped > most:
            step = progress.step + 1
            what = f"{progress.skipped} batches in a row are bad, the last one at step {step}: {bad.detail}"
            raise BadBatch(what, since=step - progress.skipped + 1, kind=bad.kind)
        reason = "bad again from the same weights: it is the data or the weights, not the hardware"
        self._report(bad, "skip_batch", reason, step=progress.step + 1, in_a_row=progress.skipped)

    def _report(self, bad: Bad, action: str, reason: str, **more: int) -> None:
        step = self.state.progress.step + 1
        log.warning("step %d: %s; %s", step, bad.detail, action)
        if self.context.rank == 0:
            which = {"fault_id": f"batch-{step}-{action}"}
            nothing: dict[str, object] = {"ranks": [], "nodes": [], "evidence": "", "detect_s": 0.0}
            worker.report({**which, "kind": bad.kind, "step": step, "detail": bad.detail, **nothing}, event="fault")
            worker.report({**which, "name": action, "reason": reason, **more}, event="action")

    # -- validation ----------------------------------------------------------------------------------------------------

    def _validate(self, *, last: bool) -> None:
        """Mean loss over the first `eval_iters` global batches of the validation split, always the same ones.

        Args:
            last: of the run. Others are left where training is to stop; of this one there would be no other.
        """
        config, size = self.config, self.config.train.global_batch_size
        if self._valid_data is None:
            return
        with worker.phase("eval"), torch.no_grad(), self.instruments.span("eval"):
            numbers = torch.zeros(2, dtype=torch.float64, device=self.device)
            for stage in self.stages:
                stage.eval()
            stopped = False
            for number in range(config.train.eval_iters):
                stopped = not last and number % LOOK_EVERY == 0 and self._stop_is_due()
                if stopped:
                    break
                batch, counted = self.batches.read(self._valid_data, number * size, size)
                loss = self.engine.evaluate(batch.to(self.device))
                if self.ranks.counts_loss:
                    counts = onto(counted, self.device).double() if self.ranks.cp_rank == 0 else torch.zeros_like(loss)
                    numbers += torch.stack([loss, counts])
            for stage in self.stages:
                stage.train()
            if stopped:
                log.warning("step %d: the validation is left out, for training is to stop", self.state.progress.step)
                return
            dist.all_reduce(numbers)
            total, tokens = numbers.tolist()
        if self.context.rank == 0:
            step, mean = self.state.progress.step, total / max(tokens, 1.0)
            log.info("step %d validation loss %.4f", step, mean)
            perplexity = {"val_ppl": math.exp(min(mean, 700.0))} if config.logging.validation_ppl else {}
            worker.report({"step": step, "val_loss": mean, **perplexity}, event="validation")

    def _stop_is_due(self) -> bool:
        """Whether any rank knows that training is to stop at the boundary that comes next; the same on all ranks."""
        if not self.context.supervised:
            return False
        due = torch.tensor(float(worker.stop_is_due()))  # on the CPU: no GPU waits for it
        dist.all_reduce(due, dist.ReduceOp.MAX)
        return bool(due)


def _join(device: torch.device, context: worker.Context) -> None:
    """Join the process group that the environment describes; alone, without one."""
    if "MASTER_ADDR" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(_backend(device), store=store, rank=context.rank, world_size=context.world_size)
        return
    timeout_s = context.collective_timeout_s or COLLECTIVE_TIMEOUT_S
    # NCCL is told its GPU: else it would guess one by the rank, and find out only at the first collective.
    bound = device if device.type == "cuda" else None
    dist.init_process_group(_backend(device), timeout=timedelta(seconds=timeout_s), device_id=bound)


def _backend(device: torch.device) -> str:
    # Objects and checkpoints travel over gloo, on the CPU, also where tensors travel over NCCL.
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
