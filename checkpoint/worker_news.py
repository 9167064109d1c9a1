"""What a worker reports to the snapshot daemon of its node: a datagram for each message.

`generation` is the worker's. Sizes are in bytes, durations in seconds.
"""

from checkpoint.framing import Message


class LayoutAnnounced(Message, frozen=True):
    """What a rank will write: the digest of the write plan, and files that describe it; see `checkpoint.tiers.blueprint`."""

    generation: int
    rank: int
    digest: str


class LayoutWriteFailed(Message, frozen=True):
    """A rank could not write down what it will write; it tries again."""

    generation: int
    rank: int
    reason: str
    errno: int | None = None


class StateCopied(Message, frozen=True):
    """A rank has copied its state of a step into the buffer of a lease.

    Attributes:
        wants: tiers that are to have the step.
        changed: whether anything but the small state has changed since the last snapshot.
        again: how often the step had been taken before, and left out by a rank.
    """

    generation: int
    rank: int
    step: int
    lease: int
    stall_s: float
    wants: tuple[str, ...]
    changed: bool
    size_bytes: int
    again: int = 0


class StepSkipped(Message, frozen=True):
    """A rank found no buffer for a step, or none when it was to take it again, or has nothing to copy, as `reason` says.

    Attributes:
        again: how often the step had been taken before, and left out by a rank.
        wants: tiers that were to have it.
    """

    generation: int
    rank: int
    step: int
    again: int = 0
    wants: tuple[str, ...] = ()
    reason: str = "no buffer was free"


class LeasePassed(Message, frozen=True):
    """A rank does without a lease, because other ranks have used it."""

    generation: int
    rank: int
    lease: int


class BufferBroken(Message, frozen=True):
    """A rank could not write into the buffer of a lease."""

    generation: int
    rank: int
    step: int
    lease: int
    reason: str
    errno: int | None = None


WorkerNews = LayoutAnnounced | LayoutWriteFailed | StateCopied | StepSkipped | LeasePassed | BufferBroken
