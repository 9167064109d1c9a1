"""Faults: what went wrong, told from what was seen.

Pure: turns the ways in which workers ended into one `Fault` that names the culprit and not its victims. Detecting is the agents'
work, deciding what to do is `resilient.policy`.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "exit",
    "exception",
    "stopped",
    "hang",
    "collective_timeout",
    "link_down",
    "node_lost",
    "straggler",
    "not_finite",
    "loss_spike",
    "storage",
    "preempted",
    "time_limit",
]


@dataclass(frozen=True)
class Raised:
    """An exception that ended a worker: its type's name, its text, the whole traceback, when (unix seconds).

    `final` is the exit code of the run where trying again cannot help, else None.
    """

    type: str
    message: str
    traceback: str
    t: float
    final: int | None = None


@dataclass(frozen=True)
class WorkerEnd:
    """How one worker ended.

    Attributes:
        exitcode: as `multiprocessing` gives it: negative for a signal.
        noticed_t: when its agent saw it, unix seconds.
        step: the last step that it finished, -1 if none in its generation.
    """

    rank: int
    node: int
    pid: int
    exitcode: int
    noticed_t: float
    step: int
    phase: str
    raised: Raised | None = None

    @property
    def failed(self) -> bool:
        return self.exitcode != 0


@dataclass(frozen=True)
class Fault:
    """One incident.

    Attributes:
        step: the optimizer step that was being computed; None where there was none.
        cause: short and the same whenever the same thing happens again; `detail` is for people.
        detect_s: from the moment it showed on its node until it was known here.
        final: the exit code of the run where trying again cannot help.
    """

    fault_id: str
    kind: Kind
    cause: str
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    step: int | None
    detail: str
    evidence: str
    detect_s: float
    final: int | None = None

    @property
    def signature(self) -> tuple[str, str, int | None]:
        """Two faults with the same signature are the same failure at the same step."""
        return self.kind, self.cause, self.step


# How an exception reads in a rank whose peer has gone (samples of gloo, NCCL and the store are in the tests). A rank that
# raised one of these is a victim as long as there is anyone else to blame.
_PEER_GONE_TYPES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"})
_PEER_GONE_TEXTS = (
    "[/pytorch/third_party/gloo",
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Software caused connection abort",
    "NCCL communicator was aborted",
    "remote process exited",
    "Socket Timeout",
)
_TIMED_OUT_TEXTS = ("Timed out waiting", "Watchdog caught collective operation timeout", "wait timeout after")


def blames_a_peer(raised: Raised | None) -> bool:
    """Whether this exception is what a rank raises when another rank, or the link to it, has gone."""
    if raised is None:
        return False
    return raised.type in _PEER_GONE_TYPES or any(text in raised.message for text in _PEER_GONE_TEXTS + _TIMED_OUT_TEXTS)


def culprit(ends: Sequence[WorkerEnd]) -> WorkerEnd:
    """Of workers that failed in one generation, the one that failed first and by itself."""

    def order(end: WorkerEnd) -> tuple[bool, float, int]:
        when = end.raised.t if end.raised is not None else end.noticed_t
        return blames_a_peer(end.raised), when, end.rank

    return min((end for end in ends if end.failed), key=order)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def from_ends(fault_id: str, ends: Sequence[WorkerEnd], *, resumed_step: int, now: float) -> Fault:
    """The fault behind the workers of one generation that failed.

    Args:
        resumed_step: the step the generation started from, for workers that had not finished one.
        now: unix seconds.
    """
    first = culprit(ends)
    if first.raised is not None:
        timed_out = any(text in first.raised.message for text in _TIMED_OUT_TEXTS)
        kind: Kind = "collective_timeout" if timed_out else "exception"
        cause = first.raised.type
        detail = f"{cause}: {first.raised.message.partition(chr(10))[0]}"
        evidence = first.raised.traceback if first.raised.final is None else first.raised.message
        since = first.raised.t
    else:
        kind = "exit"
        cause = _signal_name(-first.exitcode) if first.exitcode < 0 else f"exit code {first.exitcode}"
        detail = cause
        evidence = f"process {first.pid} of rank {first.rank} ended by {detail} in phase {first.phase}"
        since = first.noticed_t
    return Fault(
        fault_id=fault_id,
        kind=kind,
        cause=cause,
        ranks=(first.rank,),
        nodes=(first.node,),
        step=max(first.step, resumed_step) + 1,
        detail=detail,
        evidence=evidence,
        detect_s=max(0.0, now - since),
        final=first.raised.final if first.raised is not None else None,
    )
