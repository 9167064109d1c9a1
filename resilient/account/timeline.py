"""What a line of the ledger or of the metrics tells of where the time goes, and the order of both. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from resilient.entries import StepEvent, StepMetrics

Line = Mapping[str, Any]

STORAGE = "storage"  # a kind of fault that costs nothing by itself: ranks go on without the tier


def in_order(events: Iterable[Line], metrics: Iterable[Line]) -> Iterator[tuple[bool, Line]]:
    """Both files in the order in which things happened, and whether each is an event.

    A line that is older than those before it in its file comes after them.
    """
    left, right = _timed(events, True), _timed(metrics, False)
    first, second = next(left, None), next(right, None)
    while first is not None or second is not None:
        if second is None or (first is not None and first[0] <= second[0]):
            assert first is not None
            yield True, first[1]
            first = next(left, None)
        else:
            yield False, second[1]
            second = next(right, None)


def _timed(lines: Iterable[Line], are_events: bool) -> Iterator[tuple[tuple[float, int], Line]]:
    latest = 0.0
    for line in lines:
        if "t" in line:
            latest = max(latest, float(line["t"]))
            yield (latest, place_of(line) if are_events else STEP), line


BEFORE, STEP, BEHIND = range(3)
"""Places of lines of the same time: a step that ends at a moment belongs to what was before it."""


def place_of(event: Line) -> int:
    """Where an event comes among lines of the same time."""
    return BEFORE if event.get("event") == "run_started" else BEHIND


class TimelineEntry(msgspec.Struct, array_like=True):
    """What a line tells of where the time goes.

    Attributes:
        event: "" for a step.
        seconds: of a step, of standing still, or until a fault was known.
        count: ranks of a generation, steps that were lost, the exit code, or the steps that a line of every step is the sum of.
        name: of an action, or the kind of a fault.
    """

    t: float
    event: str
    generation: int = 0
    step: int = 0
    seconds: float = 0.0
    data_s: float = 0.0
    count: int = 0
    fault_id: str = ""
    name: str = ""
    detail: str = ""
    ranks: list[int] = []
    nodes: list[int] = []
    incident_id: str = ""


def entry_of_step(line: Line) -> TimelineEntry | None:
    """What a line of metrics tells, if anything."""
    if line.get("step_s") is None or "step" not in line:
        return None
    seconds = seconds_of(float(line["step_s"]), line.get("steps", 1))
    return TimelineEntry(float(line["t"]), "", line.get("generation", 0), line["step"], seconds, float(line.get("data_s") or 0.0))


def seconds_of(step_s: float, steps: object) -> float:
    """What a line of metrics covers. Args: steps: short ones are told together, by their mean."""
    return step_s * steps if type(steps) is int and 0 < steps < 1 << 53 else step_s


def entry_of_step_metrics(line: StepMetrics) -> TimelineEntry | None:
    """Likewise."""
    if line.step is UNSET or line.step_s is None:
        return None
    return TimelineEntry(line.t, "", line.generation, line.step, seconds_of(line.step_s, line.steps), line.data_s or 0.0)


def entry_of_step_event(line: StepEvent) -> TimelineEntry | None:
    """What a line of the ledger tells that there may be of each step, if anything."""
    if line.event != "snapshot" or line.stall_s is None:
        return None
    return TimelineEntry(line.t, line.event, line.generation, line.step, line.stall_s, count=line.count)


def entry_of_event(line: Line) -> TimelineEntry | None:
    """What a line of the ledger tells, if anything."""
    event, t, generation = line["event"], float(line["t"]), line.get("generation", 0)
    match event:
        case "run_started":
            return TimelineEntry(t, event, generation)
        case "generation_started":
            return TimelineEntry(t, event, generation, line["resumed_step"] or 0, count=line["world_size"])
        case "snapshot" | "script_checkpoint":
            stall_s = line.get("stall_s")
            if not isinstance(stall_s, int | float):
                return None
            count = line.get("count", 1) if event == "snapshot" else 1
            return TimelineEntry(t, event, generation, line["step"], float(stall_s), count=count)
        case "validation":
            return TimelineEntry(t, event, generation, line["step"])
        case "fault" if line["kind"] == STORAGE:
            return TimelineEntry(t, STORAGE, generation, fault_id=line["fault_id"])
        case "fault":
            seconds, detail = float(line.get("detect_s", 0.0)), line.get("detail", "")
            ranks, nodes = line.get("ranks", []), line.get("nodes", [])
            names = line["fault_id"], line["kind"]
            return TimelineEntry(
                t, event, generation, 0, seconds, 0.0, 0, *names, detail, ranks, nodes, line.get("incident_id") or names[0]
            )
        case "action":
            return TimelineEntry(t, event, generation, fault_id=line["fault_id"] or "", name=line["name"])
        case "recovered":
            names = line["fault_id"], line.get("incident_id") or line["fault_id"]
            return TimelineEntry(t, event, generation, count=line["lost_steps"], fault_id=names[0], incident_id=names[1])
        case "run_finished":
            return TimelineEntry(t, event, generation, count=line.get("exit_code", 0))
    return None
