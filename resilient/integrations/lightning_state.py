"""What Lightning's Trainer keeps beside model and optimizers, as part of a snapshot.

Owns its loops' counters, schedulers, precision, callbacks, data module, and what checkpoint hooks add (`lightning_hooks`); and the
place in the data: the epoch, its batches that are done, and the random numbers with which its order was drawn. Lightning's own way
to go on makes the loader's iterator before the sampler knows its epoch, and steps some schedulers twice; both are set right here.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from resilient.integrations import lightning_hooks
from resilient.state import randomness
from resilient.state.position import dealt_out, samplers

DONE = ("ready", "started", "processed")  # counts of a batch that are those of completed ones between two batches


class Rest:
    """What is saved beside model and optimizers. Args: own: the callback that has it saved."""

    def __init__(self, trainer: Any, own: object) -> None:
        self.trainer = trainer
        self._own = own
        self.loaded: Mapping[str, Any] | None = None
        self.epoch_random = randomness.capture()  # before the epoch's iterator was made
        self.epoch_orders: list[torch.Tensor] = []  # and the samplers' own generators; the first epoch has those of the script
        self.loaders: list[Any] = []  # after the last batch that counts
        self._ranks = trainer.world_size  # that there were when it was saved
        self.ended: bool | None = None  # the training has: whether with a whole epoch

    def state_dict(self) -> dict[str, Any]:
        trainer, fit_loop = self.trainer, self.fit_loop()
        return {
            "fit_loop": fit_loop,
            "ranks": trainer.world_size,
            "epoch_orders": self.epoch_orders,
            "schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
            "lr": [[group["lr"] for group in each.param_groups] for each in trainer.optimizers],
            "precision": trainer.precision_plugin.state_dict(),
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
            "hooks": lightning_hooks.saved(trainer, fit_loop, self._own),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state

    def own_state(self) -> dict[str, Any]:
        """What ranks have of their own: callbacks may keep the time, or a metric of this rank's data."""
        callbacks = {each.state_key: each.state_dict() for each in self.trainer.callbacks}
        return {"loaders": self.loaders, "epoch_random": self.epoch_random, "callbacks": callbacks}

    def load_own_state(self, state: Mapping[str, Any], *, same: bool) -> None:
        """Of another number of ranks, callbacks go on from the first one's, as from a checkpoint of Lightning's."""
        other = {} if same else {"loaders": [], "epoch_random": self.epoch_random}
        if self.loaded is not None:
            self.loaded = {**self.loaded, **state, **other}

    def begin_epoch(self) -> None:
        """The next iterator is that of another epoch: what its order is drawn with."""
        self.epoch_random = randomness.capture()
        self.epoch_orders = [each.get_state() for each in _generators(self._loaders)]

    @property
    def _loaders(self) -> list[Any]:
        found: list[Any] = self.trainer.fit_loop._data_fetcher.combined_loader.flattened
        return found

    def fit_loop(self, *, with_loaders: bool = False) -> dict[str, Any]:
        """The counters of the loops as between two batches of an epoch; and as Lightning has them, the places of loaders."""
        state: dict[str, Any] = self.trainer.fit_loop.state_dict()
        state["state_dict"] = {}
        epochs, batches = state["epoch_progress"], state["epoch_loop.batch_progress"]
        batches["is_last_batch"] = False
        for scope in ("total", "current"):
            if self.ended is False:  # the epoch was counted, and goes on if there are more steps
                epochs[scope]["completed"] -= 1
            done = epochs[scope]["completed"]
            epochs[scope] = {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}
            if self.ended and scope == "current":
                batches[scope]["completed"] = 0
            batches[scope].update(dict.fromkeys(DONE, batches[scope]["completed"]))
        if with_loaders and self.loaders and batches["current"]["completed"]:
            state["state_dict"]["combined_loader"] = self.loaders
        return state

    def begin(self) -> None:
        """Right before the fit: all but what Lightning changes until its first step."""
        assert self.loaded is not None
        trainer = self.trainer
        trainer.fit_loop.load_state_dict(self.loaded["fit_loop"])
        trainer.precision_plugin.load_state_dict(self.loaded["precision"])
        lightning_hooks.load(trainer, self.loaded["fit_loop"], self.loaded.get("hooks", {}), self._own)
        for each in trainer.callbacks:
            if self.loaded["callbacks"].get(each.state_key):
                each.load_state_dict(self.loaded["callbacks"][each.state_key])
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(self.loaded["datamodule"])
        self.epoch_random, self.epoch_orders = self.loaded["epoch_random"], self.loaded["epoch_orders"]
        self.loaders = self.loaded["loaders"]
        self._ranks = self.loaded.get("ranks", trainer.world_size)  # older snapshots do not say
        if not trainer.current_epoch:  # its iterator is made before the fit tells anything
            randomness.restore(self.epoch_random)

    def go_to_batch(self) -> None:
        """The loaders are made: have the next batch be the one after those that are done.

        Lightning has made an iterator before the sampler knew its epoch.
        """
        fit_loop = self.trainer.fit_loop
        fetcher = fit_loop._data_fetcher
        epoch, done = fit_loop.epoch_progress.current.processed, fit_loop.epoch_loop.batch_progress.current.completed
        loaders = self._loaders
        if self._ranks != self.trainer.world_size and any(hasattr(each, "num_replicas") for each in _samplers(loaders)):
            done = dealt_out(done, self._ranks, self.trainer.world_size)
            vars(fit_loop.epoch_loop.batch_progress.current).update(dict.fromkeys((*DONE, "completed"), done))
        for sampler in (each for each in _samplers(loaders) if hasattr(each, "set_epoch")):
            sampler.set_epoch(epoch)
        if self.loaders:
            for loader, state in zip(loaders, self.loaders, strict=True):
                loader.load_state_dict(state)
            iter(fetcher)
        if self.loaders and done:
            return
        if epoch:
            randomness.restore(self.epoch_random)
            for generator, state in zip(_generators(loaders), self.epoch_orders, strict=True):
                generator.set_state(state)
            iter(fetcher)
        for _ in range(done):
            next(fetcher)
        fetcher.fetched -= done  # the loop adds them by itself

    def first_step(self) -> None:
        """Right before it: what resuming has changed is set again."""
        loaded, self.loaded = self.loaded, None
        if loaded is None:
            return
        trainer = self.trainer
        trainer.fit_loop.epoch_loop.on_load_checkpoint(loaded["fit_loop"]["epoch_loop.state_dict"])
        for config, state in zip(trainer.lr_scheduler_configs, loaded["schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        for optimizer, rates in zip(trainer.optimizers, loaded["lr"], strict=True):
            for group, lr in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = lr

    def note_loaders(self) -> None:
        """A step is done: where the loaders are, if all can be told to go there.

        One whose length nobody knows is read a batch ahead, and the state of one whose sampler Lightning has wrapped, to deal its
        samples out to ranks, lacks their order: of these the batches that are done are read again.
        """
        loaders, sized = self._loaders, self.trainer.fit_loop._data_fetcher.length is not None
        able = sized and all(
            hasattr(each, "state_dict") and hasattr(each, "load_state_dict") and not _wrapped(each) for each in loaders
        )
        self.loaders = (
            [each.state_dict() for each in loaders] if able and self.trainer.fit_loop._data_fetcher.length is not None else []
        )


def _samplers(loaders: Iterable[Any]) -> list[Any]:
    return [each for loader in loaders for each in samplers(loader)]


def _wrapped(loader: Any) -> list[Any]:
    """The samplers of a loader that Lightning's DistributedSamplerWrapper holds."""
    inner = (getattr(getattr(each, "dataset", None), "_sampler", None) for each in samplers(loader))
    return [each for each in inner if each is not None]


def _generators(loaders: Iterable[Any]) -> list[torch.Generator]:
    """The generators of its own by which a sampler draws an order, each once."""
    found: list[torch.Generator] = []
    for each in (sampler for loader in loaders for sampler in (*samplers(loader), *_wrapped(loader))):
        generator = getattr(each, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
            found.append(generator)
    return found
