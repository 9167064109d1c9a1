"""Named points between the effects of a save or a snapshot, where a crash would be most telling.

Owns the names, and an action for each that is normally absent. A crash test arms a point (to kill the process there);
nothing else ever does, and no setting or variable can.
"""

from collections.abc import Callable

POINTS = (
    "temporary_created",
    "metadata_written",
    "indices_written",
    "half_of_chunks_written",
    "chunks_written",
    "chunks_durable",
    "manifest_written",
    "manifest_durable",
    "directories_durable",
    "fence_checked",
    "old_set_aside",
    "renamed",
    "published",
    "pruned_by_name",
    "unlinked",
    "fence_written",
    "fence_replaced",
    "buffer_made",
    "buffer_ready",
    "snapshot_acquired",
    "snapshot_copied",
    "snapshot_reported",
    "seal_begun",
    "seal_summed",
    "seal_described",
    "sealed",
    "copy_begun",
    "half_of_copy_written",
    "copy_described",
    "copy_durable",
    "copy_renamed",
    "replica_begun",
    "replica_held",
    "flush_begun",
    "flush_journalled",
    "flush_written",
    "flush_shared",
    "finish_begun",
    "finish_shares_gone",
    "shard_forgotten",
)
"""In the order in which a save passes them; then those of raising a fence, and of a snapshot on its way through the tiers."""

_armed: dict[str, Callable[[], None]] = {}


def arm(name: str, action: Callable[[], None]) -> None:
    """Run `action` each time this process reaches the point. Raises KeyError for an unknown name."""
    if name not in POINTS:
        raise KeyError(f"no point {name!r}; there are {', '.join(POINTS)}")
    _armed[name] = action


def disarm() -> None:
    """Forget every armed action."""
    _armed.clear()


def reached(name: str) -> None:
    """Say that this process is at the point."""
    action = _armed.get(name)
    if action is not None:
        action()
