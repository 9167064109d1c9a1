"""Accelerate: a snapshot after every optimizer step, from which a loop goes on in the middle of an epoch; stops, phases, metrics.

    snapshots = Snapshots(accelerator, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)  # all as prepared
    for features, targets in snapshots.batches(steps):
        with accelerator.accumulate(model):
            ...

Owns the place in the data: epoch and batch, and the state of a sampler's own generator where the epoch began, so that a loop that
goes on finds its order again. Where that is drawn from the global random numbers it cannot: a loader that shuffles needs
`DataLoaderConfiguration(use_seedable_sampler=True)`, or a sampler with a generator.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DistributedType, synchronize_rng_states
from torch import Tensor
from torch.nn import Module
from torch.utils.data import IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import resilient
from resilient import worker
from resilient.state.position import dealt_out, samplers

DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
SHARDED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)  # parameters that only these can put together
_END = object()


class _Rest:
    """What is saved beside model, optimizers and schedulers; `batch` of `epoch` is the next one that each rank reads."""

    def __init__(self, accelerator: Accelerator, loader: Any) -> None:
        self._accelerator, self._scaler = accelerator, accelerator.scaler
        self._generators = [each.generator for each in _drawing(loader)]
        self._orders: Sequence[Tensor] = ()  # their states where the epoch began; before the first one, none
        self.epoch = self.batch = 0

    def begin_epoch(self) -> None:
        """Right before its iterator is made, also in the middle of it."""
        if not self._orders:
            self._note_orders()
        for generator, state in zip(self._generators, self._orders, strict=False):
            generator.set_state(state)

    def end_epoch(self) -> None:
        """The next batch is the first one of the next epoch."""
        self.epoch, self.batch = self.epoch + 1, 0
        self._note_orders()

    def _note_orders(self) -> None:
        for each in self._generators:
            synchronize_rng_states(["generator"], each)  # of ranks that do not draw, as where rank 0 deals batches out
        self._orders = [each.get_state() for each in self._generators]

    def state_dict(self) -> dict[str, Any]:
        scaler = self._scaler.state_dict() if self._scaler is not None else None
        place = {"epoch": self.epoch, "batch": self.batch, "ranks": self._accelerator.num_processes}
        return {**place, "orders": list(self._orders), "scaler": scaler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])
        now = self._accelerator.num_processes
        ranks = int(state.get("ranks", now))  # older snapshots do not say
        if ranks != now and not self._accelerator.split_batches:  # else a batch is that of all ranks together
            self.batch = dealt_out(self.batch, ranks, now)
        self._orders = state.get("orders", ())
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])


class Snapshots:
    """One per script, made on all ranks alike once everything is prepared. Without a supervisor its loop is a loop.

    Args:
        model: as prepared; plain, DDP, or sharded by FSDP2.
        optimizer: as prepared; or several.
        scheduler: as prepared; or several.
        loader: as prepared, whose epochs follow one another.
        extra: see `resilient.attach`. What `accelerator.register_for_checkpointing` was given before is kept, too.

    Raises ValueError where the state cannot be kept; else as `resilient.attach`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        model: Module,
        optimizer: Any,
        loader: Any,
        scheduler: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        kind = accelerator.distributed_type
        if kind in SHARDED or (kind is DistributedType.FSDP and not _is_fsdp2(accelerator)):
            raise ValueError(f"no snapshots are kept of a model that {kind.value} shards: use FSDP 2, or accelerator.save_state")
        if _shuffles_unseeded(loader):
            raise ValueError(
                "the loader draws another order in each attempt: give Accelerator a "
                "DataLoaderConfiguration(use_seedable_sampler=True), by which a random order follows from the number of the epoch, "
                "or the sampler a generator of its own, whose state is kept"
            )
        self._accelerator, self._loader = accelerator, loader
        self._stops = False
        self._rest = _Rest(accelerator, loader)
        optimizers = [getattr(each, "optimizer", each) for each in _several(optimizer)]
        schedulers = [getattr(each, "scheduler", each) for each in _several(scheduler)]
        others = extra or {}
        self._attached = resilient.attach(
            model=model,
            optimizer=optimizers,
            scheduler=schedulers,
            extra={
                "accelerate": self._rest,
                **_registered(accelerator, [model, *optimizers, *schedulers, *others.values()]),
                **others,
            },
        )

    @property
    def step(self) -> int:
        """How many optimizer steps are done; those of earlier attempts count."""
        return self._attached.step

    def batches(self, steps: int) -> Iterator[Any]:
        """The batches that are left until so many optimizer steps are done, epoch after epoch.

        A step is done when the next batch is asked for after gradients were synchronized. Ends early where it is asked to stop.
        A loop that is left by `break` or an exception has not done its step.

        Raises ValueError where the loader has no batch.
        """
        rest = self._rest
        try:
            while self.step < steps and not self._stops:
                before = (rest.epoch, rest.batch)
                yield from self._epoch(steps)
                if (rest.epoch, rest.batch) == before and not self._stops:
                    raise ValueError("the loader has no batch")
        except GeneratorExit:
            self._attached.leave()
            worker.loop_left(sys._getframe().f_back)
            raise
        self._attached.close()

    def report(self, **metrics: float) -> None:
        """Metrics of the step under way, such as its loss; those of the main process count."""
        if self._accelerator.is_main_process and self._accelerator.sync_gradients:
            worker.report({"step": self.step + 1, **metrics})

    def _epoch(self, steps: int) -> Iterator[Any]:
        """The rest of an epoch; ends where it does, at the last step, and where the runtime asks to stop."""
        rest, accelerator = self._rest, self._accelerator
        loader = _rest_of(accelerator, self._loader, rest.batch)
        for each in (self._loader, loader):  # both: the rest of a loader by which rank 0 deals batches out does not pass it on
            if hasattr(each, "set_epoch"):
                each.set_epoch(rest.epoch)
        rest.begin_epoch()
        # An epoch begins by drawing random numbers; in the middle of one they were drawn before, and are set after that.
        if not rest.batch and self._asked_to_stop():
            return
        batches, first = iter(loader), bool(rest.batch)
        while True:
            worker.infer("data")
            batch = next(batches, _END)
            worker.infer("step")
            if batch is _END:  # a step that is not whole goes on in the next epoch
                rest.end_epoch()
                return
            if first and self._asked_to_stop():
                return
            first = False
            yield batch
            rest.batch += 1
            if not accelerator.sync_gradients:
                continue
            if accelerator.gradient_state.end_of_dataloader:
                rest.end_epoch()
            self._attached.after_step()
            if self.step >= steps or not rest.batch or self._asked_to_stop():
                return

    def _asked_to_stop(self) -> bool:
        """Between two steps; before the first one of an attempt, random numbers are set to where they were."""
        self._stops = self._attached.should_stop() is not None
        return self._stops


def _registered(accelerator: Accelerator, given: Sequence[object]) -> dict[str, Any]:
    """What the script has registered for checkpoints, by name, without what it gives by itself."""
    known = {id(each) for each in given} | {id(accelerator.unwrap_model(each)) for each in given if isinstance(each, Module)}
    found = [getattr(each, "scheduler", getattr(each, "optimizer", each)) for each in accelerator._custom_objects]
    return {f"registered {number}": each for number, each in enumerate(found) if id(each) not in known}


def _rest_of(accelerator: Accelerator, loader: Any, batches: int) -> Any:
    """A loader without its first batches of each rank.

    Where rank 0 deals batches out, Accelerate leaves out as many of the sampler's, of which each rank has had so many.
    """
    if not batches:
        return loader
    if isinstance(loader, DataLoaderDispatcher) and not loader.split_batches and not isinstance(loader.dataset, IterableDataset):
        batches *= accelerator.num_processes
    return accelerator.skip_first_batches(loader, batches)


def _is_fsdp2(accelerator: Accelerator) -> bool:
    return bool(getattr(accelerator, "is_fsdp2", False))


def _shuffles_unseeded(loader: Any) -> bool:
    """Whether a sampler of it draws the order of an epoch from the global random numbers."""
    return any(each.generator is None for each in _drawing(loader))


def _drawing(loader: Any) -> list[Any]:
    """Its samplers that draw an order at random; that of one which is told the epoch, as the seedable one is, follows from that."""
    return [each for each in samplers(loader) if isinstance(each, DRAWING) and not hasattr(each, "set_epoch")]


def _several(found: Any) -> Sequence[Any]:
    if found is None:
        return ()
    return found if isinstance(found, list | tuple) else (found,)
