"""`attach`: snapshots of a training script's state, and the loop that takes them.

Owns the order of things: the state is restored before the loop, its random numbers right before the first step; a snapshot is taken
after a step is whole, and the last one is made sure of. What is saved, and its announcement, is `announcement`'s. Without a
supervisor a loop is a loop, and nothing is saved.
"""

import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.optim import Optimizer

import checkpoint
from checkpoint.agreement import Ranks as Peers
from resilient import worker
from resilient.state import arguments, documents, optimizers, randomness
from resilient.state.accumulation import Accumulation
from resilient.state.announcement import Announcement
from resilient.state.arrays import Arrays, Ranks, StateChangedShape
from resilient.state.documents import Documents
from resilient.state.modules import ModelTensors
from resilient.state.position import Position
from resilient.state.reading import Reading
from resilient.state.reads import Reads
from resilient.state.unsaved import Unsaved

log = logging.getLogger(__name__)

LAST_WAIT_S = 20.0  # for a buffer that is still being copied to a slower tier
KEY = "attached"  # of what the small state says of all that follows


def attach(
    *,
    model: Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: Any = None,
    extra: Any = None,
    loader: Any = None,
    group: dist.ProcessGroup | None = None,
) -> "Attached":
    """Go on from the newest snapshot, if there is one, and have snapshots taken from now on. All ranks call it, once.

    Call it when everything is made: after `init_process_group`, DDP, `fully_shard` or `parallelize_module`, and before the loop.
    A second call in a process is refused, since one would go on from the snapshots of the other: it may come only when the first
    loop is over or closed and has saved nothing, as without a supervisor.

    Args:
        model: plain, or with DTensor parameters on any mesh.
        optimizer: or several; all their parameters are the model's, or those of modules in `extra`.
        scheduler: or several, of learning rates: whatever has `state_dict` and `load_state_dict`.
        extra: a dict by strings, whose values are saved, and replaced when the script goes on: modules, things with `state_dict`,
            random generators, numbers, text, lists, small tensors; or one such thing.
        loader: whose position is saved, if it has a `state_dict` as torchdata's StatefulDataLoader, and the epoch of its sampler;
            or a sampler.
        group: one that carries objects (gloo does); None: the default group if it is gloo's, or else one that is made here.

    Raises UnrecoverableError for an argument of another kind and for a second call, where something cannot be saved, or where there
    are snapshots and none that this script can go on from; RuntimeError where there are several ranks and no process group.
    """
    if Attached._saved or Attached._open:
        raise worker.UnrecoverableError(
            "resilient.attach is called once in a process, as one would go on from the snapshots of the other: give further models "
            "as values of the dict extra, and several optimizers or schedulers as lists"
        )
    if worker.REGION_VARIABLE in os.environ and multiprocessing.parent_process() is not None:
        raise worker.UnrecoverableError(
            "resilient.attach is called in a process that the script has started, and not in the rank itself, for which alone "
            "there are snapshots: train in the rank, and have as many ranks as you need by --procs"
        )
    arguments.check(model=model, optimizer=optimizer, scheduler=scheduler, extra=extra, loader=loader, group=group)
    attached = Attached(model, _several(optimizer), _several(scheduler), extra, loader, group)
    Attached._open.add(attached)
    return attached


class Attached:
    """What `attach` returns. All ranks call its methods alike.

    Attributes:
        step: how many steps are done; those of earlier attempts count.
        context: of `resilient.worker`.
    """

    _open: ClassVar[WeakSet["Attached"]] = WeakSet()  # in this process, those that are in use
    _saved: ClassVar[bool] = False  # one of this process has begun to save, and nobody else may go on from that

    def __init__(
        self,
        model: Module,
        all_optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        extra: Any,
        loader: Any,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.context = worker.init()
        worker.loop_comes()
        self.step = 0
        self.from_cache = False  # the state was read from a tier before the durable one: it is a few steps old
        self._optimizers, self._schedulers, self._extra = all_optimizers, schedulers, extra
        self._unsaved: Unsaved | None = None
        self._reads: Reads | None = None
        others = extra if isinstance(extra, Mapping) else {"module": extra}
        beside = {name: value for name, value in others.items() if isinstance(value, Module)}
        self._position = Position(loader)
        self._position.capture()  # a stateful loader makes its iterator now, with a supervisor or without
        self._random: Mapping[str, Any] = {}
        self._begun = self._started = self._outgrown = False
        self._given_up = ""  # why there are no more snapshots of this rank
        self._takes = 0
        self._saved_step: int | None = None
        self._taken_step: int | None = None  # of which a snapshot was taken or left out, with all other ranks
        self._again = 0  # how often that step was taken again since
        self._snapshots: checkpoint.Snapshots | None = None
        if self.context.session is None:
            return
        try:
            self._models = [ModelTensors(model), *(ModelTensors(value, f"extra/{name}/") for name, value in beside.items())]
        except ValueError as error:
            raise worker.UnrecoverableError(f"the state cannot be saved: {error}") from error
        self._documents = Documents(
            modules=self._models, all_optimizers=all_optimizers, schedulers=schedulers, extra=extra, position=self._position
        )
        self._accumulation = Accumulation(self._models, all_optimizers)
        group = group or _group(self.context.world_size)
        self._peers = Peers(group)
        self._snapshots = checkpoint.Snapshots(self.context.session, group=group)
        self._announcement = Announcement(
            snapshots=self._snapshots,
            models=self._models,
            all_optimizers=all_optimizers,
            documents=self._documents,
            peers=self._peers,
            generation=self.context.generation,
        )
        with worker.phase("load"):
            self._resume(self._snapshots, group)
            try:
                self._documents.check()  # what cannot be saved is said now, and not after the first step
                self._options()
            except (TypeError, ValueError, StateChangedShape) as error:
                raise worker.UnrecoverableError(f"the state cannot be saved: {error}") from error
        if self.step:
            self._reads = Reads(loader)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """The steps that are left, as `range(total)` counts them; each is done when the next one is asked for.

        Ends early where the runtime asks to stop. A loop that is left by `break` or an exception has not done its step.
        """
        self.begin()
        try:
            while self.step < total and self.should_stop() is None:
                yield self.step
                self.after_step()
        except GeneratorExit:  # an exception in here leaves the phase where it failed
            self.leave()
            worker.loop_left(sys._getframe().f_back)
            raise
        finally:
            self._open.discard(self)
        self.close()

    def begin(self) -> None:
        """A step begins; before the first one, random generators are set to where they were. `steps` and `should_stop` call it."""
        worker.infer("step")
        if self._begun:
            return
        self._begun = True
        if self._random:
            randomness.restore(self._random)

    def should_stop(self) -> str | None:
        """Before each step, the first one too: the reason to leave the loop now, else None; the state is saved then."""
        self.begin()
        reason = worker.should_stop()
        if reason is not None:
            self.close()
        return reason

    def after_step(self, step: int | None = None) -> None:
        """A step is done: the heartbeat, and a snapshot where one is due.

        Args:
            step: how many are done now; None: one more.
        """
        self.end_step(step)
        self.take_due()

    def end_step(self, step: int | None = None) -> None:
        """A step is done, and something is done behind it that belongs to its state: the heartbeat. `take_due` follows on that.

        Args:
            step: as of `after_step`.
        """
        if not self._begun:
            self.begin()
        self.step = self.step + 1 if step is None else step
        worker.beat(self.step)
        if self._snapshots is None:
            return
        self._start()
        self._accumulation.end_step(self.step)
        if self._unsaved is not None:
            self._unsaved.end_step()
        if self._reads is not None and self._reads.end_step(self.step):
            self._reads = None

    def take_due(self) -> None:
        """The state of the step that was ended is whole: a snapshot where one is due. Once for each, before the next one begins."""
        if self._snapshots is None:
            return
        tiers = self._snapshots.due(self.step)
        if tiers:
            self._take(self._snapshots, tiers)
        if self._announcement.stepping is not None:
            self._announcement.stepping.begin()

    def save(self) -> bool:
        """Take a snapshot of the present step for the durable tier, due or not; whether there was a buffer for it.

        All ranks call it at the same step, for it waits until all of them have: where only one does, it never returns.
        """
        if self._snapshots is None:
            return False
        self._start()
        again = self._taken_step == self.step and self._snapshots.left_out(self._saved_step == self.step)
        return self._take(self._snapshots, self._durable(), wait_s=LAST_WAIT_S, again=again)

    def close(self) -> None:
        """The loop is over: make sure that its last step is saved. `steps` and, when it is to stop, `should_stop` call it."""
        self.leave()
        if self._snapshots is None or not self._started:
            return
        if self._snapshots.left_out(self._saved_step == self.step):
            self._take(self._snapshots, self._durable(), wait_s=LAST_WAIT_S, again=True)

    def leave(self) -> None:
        """The loop is left, as by `break`: what the script does then, such as a last evaluation, is no step. `close` calls it."""
        self._open.discard(self)
        if self._unsaved is not None:
            self._unsaved.close()
        if self._reads is not None:
            self._reads.close()
        worker.infer("start")

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def _durable(self) -> frozenset[str]:
        assert self._snapshots is not None
        durable = self._snapshots.session.durable
        return frozenset([durable[0]] if durable is not None else [])

    def _start(self) -> None:
        """Announce what is saved, once: after the first step, when the optimizers have their states."""
        if self._started:
            return
        self._started = Attached._saved = True
        with worker.phase("snapshot"):
            try:
                self._announcement.announce()
            except StateChangedShape as error:
                raise worker.UnrecoverableError(f"{error}: no state is whole") from None
            self._unsaved = Unsaved(self._models, self._optimizers, self._schedulers, self._extra, self._documents.trained)

    def _take(self, snapshots: checkpoint.Snapshots, tiers: frozenset[str], wait_s: float = 0.0, *, again: bool = False) -> bool:
        self._takes += 1
        self._again = 0 if self._taken_step != self.step else self._again + again
        self._taken_step = self.step
        if self._saved_step == self.step:
            self._saved_step = None  # until this one is copied as well, for what is left out of it is reported
        with worker.phase("snapshot"):
            snapshots.before_change()  # numbers of optimizers are gathered where they were before
            try:
                # A rank that has given up comes too, for the others wait for it there.
                surely = wait_s > 0.0 or not tiers.isdisjoint(self._durable())
                self._announcement.make_room(self.step, surely=surely, given_up=bool(self._given_up))
                if self._given_up or not self._announcement.announce_changes(self._takes):
                    snapshots.leave_out(self.step, tiers, again=self._again, why=self._given_up)
                    return False
                local_shards, groups = self._announcement.local_shards(), self._options()
                if self._unsaved is not None:
                    self._unsaved.snapshot(self._takes)
            except documents.TooLong as error:
                if not self._outgrown:
                    log.warning("the snapshot of step %d is left out, and more room is made for later ones: %s", self.step, error)
                self._outgrown = True
                snapshots.leave_out(self.step, tiers, again=self._again, why=f"{error}")
                return False
            except StateChangedShape as error:
                if not self._given_up:
                    log.error("no snapshots from step %d on, until the next attempt begins: %s", self.step, error)
                self._given_up = self._given_up or f"{error}"
                snapshots.leave_out(self.step, tiers, again=self._again, why=self._given_up)
                return False
            self._outgrown = False
            small: dict[str, Any] = {
                "step": self.step,
                "generation": self.context.generation,
                KEY: {**self._announcement.about, "groups": groups},
            }
            stepping = self._announcement.stepping
            late = stepping.late() if stepping is not None else ()
            result = snapshots.take(
                self.step, local_shards, small, tiers, changed=False, wait_s=wait_s, again=self._again, late=late
            )
            if stepping is not None:
                stepping.taken(local_shards)
        if result.copied:
            self._saved_step = self.step
        return result.copied

    def _options(self) -> list[Any]:
        """The options of the optimizers. Raises StateChangedShape for what cannot be saved."""
        try:
            return [optimizers.options(each, f"optimizer {number}") for number, each in enumerate(self._optimizers)]
        except (TypeError, ValueError) as error:
            raise StateChangedShape(f"{error}") from error

    # -- going on ------------------------------------------------------------------------------------------------------

    def _resume(self, snapshots: checkpoint.Snapshots, group: dist.ProcessGroup | None) -> None:
        durable = snapshots.session.durable
        name, root = durable if durable is not None else ("durable", Path())
        into: list[Reading] = []

        def local_shards(state: Mapping[str, Any]) -> list[checkpoint.LocalShard]:
            into[:] = [self._to_read(state)]
            return into[0].local_shards()

        def alike() -> list[int]:
            found: list[int] = into[0].fingerprints.tolist()
            return found

        def rejected(step: int, tier: str, reason: str) -> None:
            worker.report({"step": step, "tier": tier, "reason": reason}, event="checkpoint_rejected")

        held = snapshots.session.candidates
        try:
            found = checkpoint.restore(
                root,
                local_shards,
                tier=name,
                held=held,
                group=group,
                on_reject=rejected,
                alike=alike,
                durable_step=snapshots.session.durable_step,
            )
            if found is not None:
                self._go_on(found.step, into[0])
                self.from_cache = found.tier != name
        except (checkpoint.NoUsableCheckpoint, checkpoint.CheckpointMismatch, ValueError) as error:
            raise worker.UnrecoverableError(str(error)) from error
        if self.context.rank == 0:
            worker.report({"step": self.step, "tier": found.tier if found is not None else name}, event="resumed")

    def _to_read(self, state: Mapping[str, Any]) -> Reading:
        """What a checkpoint with such a state is read into. Raises CheckpointMismatch."""
        peers = self._peers
        try:
            about = state[KEY]
            count, size, own = int(about["ranks"]), int(about["document_bytes"]), bool(about["own_parameters"])
            if len(about["tables"]) != len(self._optimizers):
                raise ValueError(
                    f"it has the states of {len(about['tables'])} optimizers, and this script has {len(self._optimizers)}"
                )
            if own and count != peers.count:
                raise ValueError(f"its parameters are those of {count} ranks that had different ones, and there are {peers.count}")
            tables = []
            for optimizer, table in zip(self._optimizers, about["tables"], strict=True):
                tables.append(optimizers.from_json(table, len(optimizers.parameters_of(optimizer))))
                optimizers.make(optimizer, tables[-1])
            row = peers.rank if count == peers.count else 0
            found = Arrays(self._models, self._optimizers, tables, Ranks(row, count, own_parameters=own))
            rows = 1 if count == peers.count else count
            documents_read = torch.zeros((rows, size), dtype=torch.uint8)
            fingerprints = torch.zeros(rows if about.get("fingerprint", False) else 0, dtype=torch.int64)
        except (KeyError, TypeError, ValueError) as error:
            raise checkpoint.CheckpointMismatch(f"the checkpoint is not of this script: {error}") from error
        return Reading(found, documents_read, fingerprints, row, count, about["groups"])

    def _go_on(self, step: int, read: Reading) -> None:
        peers = self._peers
        read.found.spread()
        for optimizer, groups in zip(self._optimizers, read.groups, strict=True):
            optimizers.set_options(optimizer, groups)
        self._random = self._documents.restore(read.rows, peers.count, same=read.count == peers.count)
        self.step = self._saved_step = step
        self._position.capture()  # a stateful loader makes its iterator before the random numbers are set
        if not self._random:
            randomness.reseed(step)


def _several(found: Any) -> tuple[Any, ...]:
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (found,)


def _group(world_size: int) -> dist.ProcessGroup | None:
    """A group that carries objects; None for the default one. Raises RuntimeError."""
    if world_size == 1:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(f"there are {world_size} ranks and no process group: call init_process_group before resilient.attach")
    return None if dist.get_backend() == dist.Backend.GLOO else dist.new_group(backend="gloo")
