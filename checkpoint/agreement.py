"""Agreement of the ranks that save or load together: what one finds out, all know.

Owns the collectives. A failure of one rank becomes the same CheckpointError on all of them; nobody is left waiting.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist

from checkpoint.errors import CheckpointError

T = TypeVar("T")

EXPECTED = (CheckpointError, OSError, ValueError, RuntimeError, MemoryError)
"""What may go wrong on one rank and must then be known to all; anything else is a defect of the program."""


class Outcome(Generic[T]):
    """What became of some work: its result, or why there is none."""

    def __init__(self, rank: int, work: Callable[[], T]) -> None:
        self.result: T | None = None
        self.error: CheckpointError | None = None
        try:
            self.result = work()
        except CheckpointError as error:
            self.error = error
        except EXPECTED as error:
            self.error = CheckpointError(f"rank {rank}: {type(error).__name__}: {error}")


class Ranks:
    """The ranks of a process group that carries objects (gloo does).

    Args:
        group: None for the default group, or for this process alone where torch.distributed is not in use.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        alone = not (dist.is_available() and dist.is_initialized())
        self._group = group
        self.rank = 0 if alone else dist.get_rank(group)
        self.count = 1 if alone else dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this rank is not in the group it was given; call only on the ranks of the group")

    def all(self, value: T) -> list[T]:
        """Everyone's value by rank, on every rank."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self._group)
        return found

    def to_first(self, value: T) -> list[T]:
        """Everyone's value by rank on rank 0, nothing on the others."""
        if self.count == 1:
            return [value]
        found: list[Any] | None = [None] * self.count if self.rank == 0 else None
        dist.gather_object(value, found, group=self._group, group_dst=0)
        return found or []

    def first(self, work: Callable[[], T]) -> T:
        """Rank 0 works, everyone gets the result. Raises CheckpointError on every rank if it fails."""
        shared = [Outcome(0, work) if self.rank == 0 else None]
        if self.count > 1:
            dist.broadcast_object_list(shared, group=self._group, group_src=0)
        outcome = cast(Outcome[T], shared[0])
        if outcome.error is not None:
            raise outcome.error
        return cast(T, outcome.result)


def results(outcomes: "list[Outcome[T]]") -> list[T]:
    """Everyone's result. Raises CheckpointError naming all that failed, and why."""
    failures = [str(each.error) for each in outcomes if each.error is not None]
    if failures:
        raise CheckpointError("; ".join(failures))
    return [cast(T, each.result) for each in outcomes]
