"""What can go wrong with a checkpoint: one exception for each cause.

Owns the exception types and nothing else; imports nothing, so that any process may use them.
Every message says what, where, and what to do.
"""

from collections.abc import Sequence
from pathlib import Path


class CheckpointError(Exception):
    """A checkpoint could not be written, read or published."""


class DamagedCheckpoint(CheckpointError):
    """The files of a committed checkpoint are not what its manifest says."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is damaged: {reason}; use an older checkpoint or a copy of this one")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type["DamagedCheckpoint"], tuple[Path, str]]:
        return type(self), (self.path, self.reason)


class CheckpointMismatch(CheckpointError):
    """The checkpoint is sound, but holds something else than what was asked of it."""


class NoUsableCheckpoint(CheckpointError):
    """There are checkpoints, and none of them is good."""

    def __init__(self, root: Path, rejected: Sequence[tuple[int, str]]) -> None:
        listed = "".join(f"\n  step {step}: {reason}" for step, reason in rejected)
        super().__init__(
            f"none of the {len(rejected)} checkpoints in {root} can be used:{listed}\n"
            "restore one of them from a copy, or move them all away to begin again from nothing"
        )
        self.root = root
        self.rejected = tuple(rejected)

    def __reduce__(self) -> tuple[type["NoUsableCheckpoint"], tuple[Path, tuple[tuple[int, str], ...]]]:
        return type(self), (self.root, self.rejected)


class StaleGeneration(CheckpointError):
    """A newer generation has taken over; this process may not publish any more."""

    def __init__(self, root: Path, generation: int, newest: int) -> None:
        super().__init__(
            f"generation {generation} may not publish in {root}: generation {newest} has taken over; "
            "end this process, its successor owns the checkpoints"
        )
        self.root = root
        self.generation = generation
        self.newest = newest

    def __reduce__(self) -> tuple[type["StaleGeneration"], tuple[Path, int, int]]:
        return type(self), (self.root, self.generation, self.newest)
