"""Finding the newest good checkpoint.

Owns the choice: newest first, every rank verifies its share, and all agree.
"""

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from checkpoint.agreement import Ranks
from checkpoint.errors import DamagedCheckpoint, NoUsableCheckpoint
from checkpoint.naming import step_path, steps
from checkpoint.verification import verify


def newest_good(
    root: Path, *, group: dist.ProcessGroup | None = None, on_reject: Callable[[int, str], None] | None = None
) -> Path | None:
    """The newest checkpoint of which every byte is as it was written. Collective: all ranks get the same answer.

    Args:
        root: where checkpoints are.
        group: as for `save`.
        on_reject: called on rank 0 with step and reason of each newer one that is damaged.

    Returns None if there are no checkpoints at all. Raises NoUsableCheckpoint if there are some and none is good;
    CheckpointError if the directory cannot be read.
    """
    ranks = Ranks(group)
    rejected: list[tuple[int, str]] = []
    for step in reversed(ranks.first(lambda: steps(root))):
        path = step_path(root, step)
        reasons = [reason for reason in ranks.all(_damage(path, ranks)) if reason is not None]
        if not reasons:
            return path
        rejected.append((step, reasons[0]))
        if ranks.rank == 0 and on_reject is not None:
            on_reject(step, reasons[0])
    if rejected:
        raise NoUsableCheckpoint(root, rejected)
    return None


def _damage(path: Path, ranks: Ranks) -> str | None:
    try:
        verify(path, part=ranks.rank, parts=ranks.count)
    except DamagedCheckpoint as error:
        return error.reason
    return None
