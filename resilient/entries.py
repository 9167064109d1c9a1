"""What a line of the ledger and of the metrics must have, so that those who read it find what they expect.

The two files hold what training scripts report besides what the driver writes, and disks lose bytes: a line may be any JSON object.
Owns the fields that the project's own readers rely on; a line may have others. Pure.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from checkpoint.typed import built

T = TypeVar("T")

Line = Mapping[str, Any]
Seconds = Annotated[float, Meta(ge=-1e11, le=1e11)]
Time = Annotated[float, Meta(ge=0, le=1e11)]  # unix seconds
Count = Annotated[int, Meta(ge=0, le=1 << 53)]


class _Entry(msgspec.Struct):
    t: Time
    event: str
    generation: Count
    host: str


class _RunStarted(_Entry, kw_only=True):
    name: str
    target_step: Count | None


class _ConfigChanged(_Entry, kw_only=True):
    key: str


class _GenerationStarted(_Entry, kw_only=True):
    nodes: list[str]
    world_size: Count
    resumed_step: Count | None


class _Step(_Entry, kw_only=True):
    step: Count


class _Forked(_Step, kw_only=True):
    parent: str


class _EveryStep(_Step, kw_only=True):
    """Where `count` is more than 1, of so many steps, the last of which is `step`."""

    count: Annotated[int, Meta(ge=1, le=1 << 53)] = 1


class _Snapshot(_EveryStep, kw_only=True):
    stall_s: Seconds


class _NoStepYet(_Entry, kw_only=True):
    waited_s: Seconds
    detail: str
    evidence: str


class _Rejected(_Step, kw_only=True):
    reason: str


class _Missed(_Rejected, kw_only=True):
    tier: str
    count: Count


class _Fault(_Entry, kw_only=True):
    fault_id: str
    kind: str
    ranks: list[Count]
    nodes: list[Count]
    step: Count | None
    detail: str
    evidence: str
    detect_s: Seconds
    phase: str | None = None
    verdict: str | None = msgspec.field(name="class", default=None)
    incident_id: str | None = None


class _Action(_Entry, kw_only=True):
    fault_id: str | None
    name: str
    reason: str
    incident_id: str | None = None
    step: Count | UnsetType = UNSET
    skip: list[tuple[Count, Count]] | UnsetType = UNSET
    in_a_row: Count | UnsetType = UNSET

    def __post_init__(self) -> None:
        rolls_back = self.name == "roll_back" or self.skip is not UNSET
        if rolls_back and (self.step is UNSET or self.skip is UNSET):
            raise ValueError("a roll-back has a step, and what is left out")


class _Recovered(_Step, kw_only=True):
    fault_id: str
    downtime_s: Seconds
    lost_steps: Count
    incident_id: str | None = None


class _Link(_Entry, kw_only=True):
    node: Count
    interface: str | None
    state: str
    detail: str | UnsetType = UNSET
    down_s: Seconds | None = None

    def __post_init__(self) -> None:
        if (self.state in ("up", "flapped") and self.down_s is None) or (self.state == "down" and self.detail is UNSET):
            raise ValueError("a link that is down says why, and one that was says for how long")


class _Finding(msgspec.Struct):
    check: str
    text: str


class _Health(_Entry, kw_only=True):
    node: Count
    ok: bool
    findings: list[_Finding]


class _ScriptCheckpoint(_Step, kw_only=True):
    rank: Count
    path: str


class _Cadence(_Step, kw_only=True):
    tier: str
    every_steps: Count


class _Validation(_Step, kw_only=True):
    val_loss: float | None  # null where it is not finite


class _Drain(_Entry, kw_only=True):
    signal: str
    took_s: Seconds
    step: Count | None


class _RunFinished(_Entry, kw_only=True):
    exit_code: Annotated[int, Meta(ge=-255, le=255)]
    step: Count | None


_EVENTS: Mapping[str, type[_Entry]] = {
    "run_started": _RunStarted,
    "forked": _Forked,
    "config_changed": _ConfigChanged,
    "generation_started": _GenerationStarted,
    "no_step_yet": _NoStepYet,
    "snapshot": _Snapshot,
    "replicated": _EveryStep,
    "committed": _Step,
    "checkpoint_missed": _Missed,
    "checkpoint_rejected": _Rejected,
    "fault": _Fault,
    "action": _Action,
    "recovered": _Recovered,
    "link": _Link,
    "health": _Health,
    "script_checkpoint": _ScriptCheckpoint,
    "cadence": _Cadence,
    "validation": _Validation,
    "drain": _Drain,
    "run_finished": _RunFinished,
}


class _Metrics(msgspec.Struct, kw_only=True):
    t: Time
    generation: Count
    step: Count | UnsetType = UNSET
    step_s: Seconds | None = None
    data_s: Seconds | None = None
    loss: float | None = None
    tokens_per_s: float | None = None


class StepMetrics(_Metrics, kw_only=True, gc=False):
    """A line of metrics, as far as the past of a campaign has anything of it."""

    steps: Any = 1  # that it is the mean of


class StepEvent(_Entry, kw_only=True, gc=False):
    """An event of which there may be one a step: a snapshot, which has `stall_s`, or its replication."""

    step: Count
    count: Annotated[int, Meta(ge=1, le=1 << 53)] = 1
    stall_s: Seconds | None = None


_STEP_METRICS, _STEP_EVENT = msgspec.json.Decoder(built(StepMetrics)), msgspec.json.Decoder(built(StepEvent))
_SNAPSHOT, _REPLICATED = (
    b'"event": "snapshot"',
    b'"event": "replicated"',
)  # spelled by the writer; lines that spell it otherwise only take longer


class Pace(msgspec.Struct, frozen=True):
    """What a step takes lately.

    The first step of a generation, which may compile and warm up, counts only where nothing else is known.

    Attributes:
        is_first: it is the time of such a step.
    """

    step_s: float | None = None
    is_first: bool = False

    def after(self, step_s: float, steps: Any, *, first: bool) -> "Pace":
        """With one line more: each step counts for a tenth.

        Args:
            steps: that the line is the mean of.
            first: whether it is the first line of its generation.
        """
        if self.step_s is None or self.is_first:
            return Pace(step_s, is_first=first or self.step_s is None)
        if first:
            return self
        kept = 0.9 ** min(1000, max(1, steps if isinstance(steps, int) else 1))
        return Pace(kept * self.step_s + (1.0 - kept) * step_s)


def step_metrics(lines: Sequence[bytes]) -> list[StepMetrics | None]:
    """Lines of metrics as they are written when all is well; None for any other, which may still be valid."""
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        return list(map(_STEP_METRICS.decode, lines))
    return [_one(line, _STEP_METRICS) for line in lines]


def step_events(lines: Sequence[bytes]) -> list[StepEvent | None]:
    """Likewise of the ledger; None for all other events."""
    decode = _STEP_EVENT.decode
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        return [_step_event(decode(line)) if _SNAPSHOT in line or _REPLICATED in line else None for line in lines]
    found = (_one(line, _STEP_EVENT) if _SNAPSHOT in line or _REPLICATED in line else None for line in lines)
    return [None if each is None else _step_event(each) for each in found]


def _step_event(found: StepEvent) -> StepEvent | None:
    is_snapshot = found.event == "snapshot" and found.stall_s is not None
    return found if is_snapshot or found.event == "replicated" else None


def _one(line: bytes, decoder: msgspec.json.Decoder[T]) -> T | None:
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def validation_loss(line: Line) -> float:
    """Of an event `validation`; NaN where it was not finite."""
    return math.nan if line["val_loss"] is None else float(line["val_loss"])


def is_event(line: Line) -> bool:
    """Whether a line of the ledger has what its event has."""
    name = line.get("event")
    return isinstance(name, str) and _fits(line, _EVENTS.get(name, _Entry))


def is_metrics(line: Line) -> bool:
    """Whether a line of metrics has its time and generation, and, where it has them, a step, a loss and times that are such."""
    return _fits(line, _Metrics)


def events(lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Those that are events."""
    return filter(is_event, lines)


def metrics(lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Those that are metrics."""
    return filter(is_metrics, lines)


def _fits(line: Line, kind: type[msgspec.Struct]) -> bool:
    try:
        msgspec.convert(line, built(kind))
    except (msgspec.ValidationError, RecursionError):
        return False
    return True
