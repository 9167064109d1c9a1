"""`ckpt verify`: every byte of every checkpoint that a path means.

Owns the verdicts. Changes nothing; needs neither torch nor Zarr.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkpoint import manifest
from checkpoint.errors import DamagedCheckpoint
from checkpoint.tools.locations import CheckpointLocation
from checkpoint.verification import verify


@dataclass(frozen=True)
class Verdict:
    """What reading a checkpoint has shown.

    Attributes:
        path: of the checkpoint.
        tier: the tier's name, None where the checkpoint was named itself.
        step: that it is of.
        good: every byte is as it was written.
        reason: what is wrong where it is not good.
        bytes_read: of all its files.
        seconds: that it took.
    """

    path: str
    tier: str | None
    step: int
    good: bool
    reason: str | None
    bytes_read: int
    seconds: float


def size_bytes(path: Path) -> int:
    """What a checkpoint has to read; 0 where its manifest does not say."""
    try:
        return manifest.read(path).size_bytes
    except DamagedCheckpoint:
        return 0


def verdict(place: CheckpointLocation, progress: Callable[[int], None] | None = None) -> Verdict:
    """Read every byte of a checkpoint and compare it with its manifest."""
    read: list[int] = []

    def count(size: int) -> None:
        read.append(size)
        if progress is not None:
            progress(size)

    began = time.monotonic()
    reason = None
    try:
        verify(place.path, progress=count)
    except DamagedCheckpoint as error:
        reason = error.reason
    tier = None if place.tier is None else place.tier.name
    return Verdict(str(place.path), tier, place.step, reason is None, reason, sum(read), time.monotonic() - began)
