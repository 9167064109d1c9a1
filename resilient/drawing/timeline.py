"""What happened to a campaign, as far as a person asks: generations, checkpoints, faults, and what was done about each.

Pure: the lines of the ledger and of the metrics go in. A drawing or a report reads it; docs/architecture.md says which.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resilient.account import GOES_ON, PLANNED
from resilient.drawing.chart import finite, integer
from resilient.redaction import hidden_text

Line = Mapping[str, Any]

_GOES_ON = tuple(name.replace("_", " ") for name in GOES_ON)
_ENDS = {75: "stopped on request", 70: "gave up", 69: "environment unusable"}

LATEST_T = 1e12  # in unix seconds: the year 33658


@dataclass
class Incident:
    """Something that stopped the campaign, or might have; times in unix seconds.

    Attributes:
        began_t: of what went wrong, which is before it was found.
        pause: an end of the command rather than a fault in it.
        until_t: of the first step that was finished after it; None while there is none.
    """

    t: float
    began_t: float
    name: str
    what: str
    detail: str
    pause: bool = False
    done: str = ""
    until_t: float | None = None
    down_s: float | None = None
    lost_steps: int | None = None

    @property
    def went_on(self) -> bool:
        """Whether steps followed it, or were never stopped by it."""
        return self.until_t is not None or self.done in _GOES_ON

    def title(self, origin_t: float) -> str:
        """All that is known of it, on a line."""
        after = "" if self.down_s is None else f", {seconds_text(self.down_s)} down"
        again = "" if not self.lost_steps else f", {steps_text(self.lost_steps)} again"
        text = f"{self.name} at {moment_text(self.t - origin_t)}: {self.what}: {self.detail}".strip().removesuffix(": ")
        return f"{text}; {self.done or 'nothing was done'}{after}{again}"


@dataclass
class Timeline:
    """What a ledger tells of a campaign, as far as it is drawn.

    Attributes:
        generations: (t, number, ranks, resumed step).
        checkpoints: (t, step) of the durable tier.
    """

    name: str = ""
    target_step: int = 0
    first_t: float = 0.0
    last_t: float = 0.0
    step: int = 0
    generations: list[tuple[float, int, int, int]] = field(default_factory=list)
    checkpoints: list[tuple[float, int]] = field(default_factory=list)
    validations: list[tuple[float, float]] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)


def whole(events: Iterable[Line], metrics: Iterable[Line]) -> tuple[list[Line], list[Line]]:
    """The lines that have what every line has."""
    lines = [line for line in events if _timed(line) and isinstance(line.get("event"), str)]
    return lines, [line for line in metrics if _timed(line) and isinstance(line.get("step"), int)]


def _timed(line: Line) -> bool:
    """Whether it has unix seconds; numbers beyond `LATEST_T` are damage, and their differences may be infinite."""
    t = finite(line.get("t"))
    return t is not None and abs(t) < LATEST_T


def read(events: Sequence[Line], metrics: Sequence[Line]) -> Timeline:
    """What these whole lines tell."""
    found = Timeline()
    events = [line for line in events if line["event"] != "forked"]  # which may be long before the first job
    times = [float(line["t"]) for line in (*events, *metrics)]
    found.first_t, found.last_t = min(times, default=0.0), max(times, default=0.0)
    found.step = max((int(line["step"]) for line in metrics), default=0)
    open_: dict[str, Incident] = {}
    pause: Incident | None = None
    last_t: float | None = None
    runs = False
    for line in sorted([*events, *metrics], key=lambda line: float(line["t"])):
        t, before_t, last_t = float(line["t"]), last_t, float(line["t"])
        match line.get("event"):
            case None if pause is not None and pause.done:
                pause.until_t, pause.down_s = t, t - pause.t
                pause = None
            case "run_started":
                found.name, found.target_step = str(line.get("name", "")), integer(line.get("target_step"))
                if runs and before_t is not None:
                    # An end that nobody could tell of: the command was killed.
                    pause = Incident(before_t, before_t, "", "command killed", "without a last word", pause=True)
                    found.incidents.append(pause)
                if pause is not None:
                    pause.done = "command run again"
                runs = True
                open_.clear()  # what the job before it has not recovered from
            case "run_finished":
                code, runs = integer(line.get("exit_code")), False
                if code:
                    pause = Incident(t, t, "", f"ended with status {code}", _ENDS.get(code, ""), pause=True)
                    found.incidents.append(pause)
            case "generation_started":
                generation, ranks, resumed = (integer(line.get(key)) for key in ("generation", "world_size", "resumed_step"))
                found.generations.append((t, generation, ranks, resumed))
            case "validation" if (value := finite(line.get("val_loss"))) is not None:
                found.validations.append((t, value))
            case "committed" if isinstance(line.get("step"), int):
                found.checkpoints.append((t, int(line["step"])))
            case "fault" if line.get("kind") not in PLANNED:
                each = _incident(line, t)
                found.incidents.append(each)
                open_[each.name] = each
            case "action" if (incident := open_.get(str(line.get("fault_id")))) is not None and not incident.done:
                incident.done = str(line.get("name", "")).replace("_", " ")
            case "recovered" if (incident := open_.get(str(line.get("fault_id")))) is not None:
                incident.down_s, incident.lost_steps = finite(line.get("downtime_s")), integer(line.get("lost_steps"))
                incident.until_t = t
    return found


def _incident(line: Line, t: float) -> Incident:
    kind = str(line.get("kind", "fault")).replace("_", " ")
    ranks, nodes = (found if isinstance(found := line.get(key), list) else [] for key in ("ranks", "nodes"))
    culprit = _several("node", nodes) if nodes and (kind == "node lost" or not ranks) else _several("rank", ranks)
    detail = hidden_text(str(line.get("detail") or ""))
    detect_s = finite(line.get("detect_s")) or 0.0
    return Incident(t, t - detect_s, str(line.get("fault_id", "")), f"{kind}, {culprit}".removesuffix(", "), detail)


def _several(what: str, numbers: Sequence[object]) -> str:
    if not numbers:
        return ""
    shown = f"{what}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:4]))}"
    return shown if len(numbers) <= 4 else f"{shown} and {len(numbers) - 4} more"


def steps_text(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 120 else moment_text(seconds)


def moment_text(seconds: float) -> str:
    """Since the beginning: 0:42, 3:05, 2:10:07."""
    minutes, secs = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{secs:02}" if minutes >= 60 else f"{minutes}:{secs:02}"
