"""When a script changes what is saved: in the steps of its optimizers, as far as it is seen to keep to that.

Owns the hooks before those steps, by which a GPU changes tensors only behind the copies of them. A CUDA graph that is replayed runs
no hook, and is waited for like a step (`replays`). What nobody is told of before it happens is not waited for: weights that a
forward pass normalizes in place, or that a script updates by itself. So tensors are waited for there only after a step in which
every optimizer's hook ran, and never again once something of theirs has changed before that, or in a step without any.
"""

import logging
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from checkpoint import LocalShard, Snapshots
from resilient.state import replays

log = logging.getLogger(__name__)


class Stepping:
    """The optimizers of a script whose tensors are on a GPU.

    Args:
        local_shards: that are saved.
        stepped: of each of them, whether it is an optimizer's parameter or state.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        all_optimizers: Sequence[Optimizer],
        local_shards: Sequence[LocalShard],
        stepped: Sequence[bool],
    ) -> None:
        self._snapshots, self._stepped = snapshots, stepped
        self._tensors: list[torch.Tensor] = []  # that were saved last, as far as optimizers change them
        self._versions: list[int] = []  # of those, when the step began: a number that a change in place raises
        self.taken(local_shards)
        self._versions = self._present()
        self._keeps_to_steps = all(hasattr(each, "_optimizer_step_pre_hooks") for each in all_optimizers)
        self._ran: set[int] = set()  # optimizers whose hook did in this step
        self._recorded = False  # a step in a graph, in this step
        self._count = len(all_optimizers)
        for number, each in enumerate(all_optimizers) if self._keeps_to_steps else ():
            each.register_step_pre_hook(lambda *_, number=number: self._before_step(number))
        replays.tell(snapshots)

    def late(self) -> Sequence[bool]:
        """Of each local shard, whether it is told of before it changes; a step is over."""
        seen = self._keeps_to_steps and len(self._ran) == self._count
        return self._stepped if seen else ()

    def announced(self, local_shards: Sequence[LocalShard], stepped: Sequence[bool]) -> None:
        """Others are saved from now on."""
        self._stepped = stepped
        self.taken(local_shards)
        self._versions = self._present()

    def taken(self, local_shards: Sequence[LocalShard]) -> None:
        """A snapshot of these is under way."""
        saved = zip(local_shards, self._stepped, strict=True)
        self._tensors = [local_shard.data for local_shard, stepped in saved if stepped]

    def begin(self) -> None:
        """The next step begins."""
        if not self._ran and not self._recorded:
            self._check_unchanged()
        self._ran, self._recorded = set(), False
        self._versions = self._present()

    def _present(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]

    def _check_unchanged(self) -> None:
        """See whether something has changed since the step began, in which no optimizer has stepped."""
        if self._keeps_to_steps and self._present() != self._versions:
            self._keeps_to_steps = False
            log.warning("weights change outside of the optimizers' steps: from now on the GPU waits for copies of snapshots")

    def _before_step(self, number: int) -> None:
        if self._snapshots.recording:
            self._recorded = True  # and nothing changes before it is replayed
            return
        if not self._ran:
            self._check_unchanged()
        self._ran.add(number)
        self._snapshots.before_change()
