"""The position of a data loader, and the epoch of its sampler.

Owns what is asked of a loader: `state_dict` where it has one (torchdata's StatefulDataLoader), and the `epoch` of a sampler.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

log = logging.getLogger(__name__)


class Position:
    """Where a loader is. Without one, nothing.

    Args:
        loader: a StatefulDataLoader, a DataLoader, or a sampler.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._samplers = [each for each in samplers(loader) if hasattr(each, "epoch") and hasattr(each, "set_epoch")]

    def capture(self) -> dict[str, Any]:
        """The position now. A stateful loader that has no iterator yet makes one, which takes a number from torch's generator."""
        found: dict[str, Any] = {}
        if self._samplers:
            found["epochs"] = [each.epoch for each in self._samplers]
        if self._stateful:
            found["state"] = self._loader.state_dict()
        return found

    def restore(self, saved: Sequence[dict[str, Any]], world_size: int, *, same: bool) -> None:
        """Go to a position.

        Args:
            saved: this rank's, or those of all ranks that there were then.
            same: as many ranks saved it; then the first one counts.

        Raises ValueError where they mean nothing for this number of ranks.
        """
        first = saved[0]
        for sampler, epoch in zip(self._samplers, first.get("epochs", ()), strict=False):
            sampler.set_epoch(epoch)
        if not self._stateful or "state" not in first:
            return
        if same:
            self._loader.load_state_dict(first["state"])
        elif self._is_distributed():
            self._go_to_sample(saved, world_size)
        elif all(_same(each["state"], first["state"]) for each in saved):
            self._loader.load_state_dict(first["state"])  # every rank reads the same
        else:
            raise ValueError(
                f"the positions of the data loader are those of {len(saved)} ranks that read different data by samplers of their "
                f"own, and there are {world_size} ranks now; a DistributedSampler's positions can be taken over"
            )

    def _is_distributed(self) -> bool:
        return any(hasattr(each, "num_replicas") for each in samplers(self._loader))

    def _go_to_sample(self, everyone: Sequence[dict[str, Any]], world_size: int) -> None:
        """A distributed sampler deals samples out in turn: what all ranks together have read are the first ones of the epoch."""
        read = {_batches_read(each["state"]) for each in everyone}
        if len(read) != 1:
            raise ValueError(
                f"the ranks had read different numbers of batches ({sorted(read)}), which mean nothing for {world_size} ranks"
            )
        batches = dealt_out(read.pop(), len(everyone), world_size)
        iterator = iter(self._loader)
        for _ in range(batches):
            next(iterator, None)
        self._loader.load_state_dict(self._loader.state_dict())  # the script's own iterator goes on from here


def dealt_out(batches: int, before: int, now: int) -> int:
    """How many batches of an epoch each of so many ranks has read, where each of the ranks before has read so many."""
    each, rest = divmod(batches * before, now)
    if rest:
        log.warning("%d batches that were read before cannot be dealt out to %d ranks, and are read again", rest, now)
    return each


def _batches_read(state: Mapping[str, Any]) -> int:
    """How many batches of its epoch a StatefulDataLoader has given, by its state. Raises ValueError where that does not say."""
    try:
        if "_num_yielded" in state:  # it reads in the process itself
            return int(state["_num_yielded"])
        return int(state["_snapshot"]["_snapshot_step"]) + int(state["_steps_since_snapshot"])  # of its workers, and since then
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"the state of the data loader does not say how many batches were read ({error!r}), so that other ranks cannot go on "
            "from it: give a StatefulDataLoader of torchdata, or go on with as many ranks"
        ) from None


def samplers(loader: Any) -> list[Any]:
    """A loader's samplers, the outer one first, also those that one of Accelerate's holds; a sampler alone."""
    found: list[Any] = []

    def add(each: Any) -> None:
        if each is not None and not any(each is other for other in found):
            found.append(each)
            add(getattr(each, "sampler", None))
            add(getattr(each, "batch_sampler", None))

    for each in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None), loader):
        add(each)
    return found


def _same(one: Any, other: Any) -> bool:
    from resilient.state.encoding import encode

    return encode(one) == encode(other)
