"""The account of a campaign: what every second of every rank went into.

The time line of each job is cut at what the ledger and the metrics tell, and every stretch gets one name, so that the parts sum to
the whole by construction. Pure: lines go in, sums come out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Line = Mapping[str, Any]

PARTS = {
    "productive": "steps that were computed for the first time",
    "data": "waiting for samples",
    "evaluation": "validation",
    "snapshot": "standing still for a copy of the state",
    "start": "from the start of a job to its first step",
    "detection": "from what went wrong until it was known",
    "restart": "from then until ranks were started again",
    "restore": "from then until the first step began",
    "rework": "steps that were computed again or cut off",
    "link": "waiting for a link",
    "finish": "from the last step to the end of a job",
    "idle": "between steps, for no reason that is known",
}
"""The parts of the account, and what they are."""

# Actions that stop no rank: the time stays with the steps.
GOES_ON = ("report", "recompute_batch", "skip_batch", "restart_agent", "exclude_node")
STALLS = ("snapshot", "script_checkpoint")  # events that tell how long ranks stood still after a step
PLANNED = ("time_limit", "preempted")  # faults that cost nothing by themselves: ranks compute until the drain stops them


@dataclass
class Incident:
    """One fault that cost time.

    Attributes:
        action: what was done about it.
        incident_id: of the first of the faults that met with it; its own where it is the first, or alone.
        lost_steps: that had to be computed again; None as long as that is not known.
        seconds: of wall time by part, from the fault to the recovery; what it cost. Of faults that overlap the first has it all.
    """

    fault_id: str
    incident_id: str
    t: float
    kind: str
    detail: str
    ranks: list[int]
    nodes: list[int]
    action: str = ""
    lost_steps: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Account:
    """Seconds × ranks by part, over all jobs; `wall_s` is their time."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    wall_s: float = 0.0
    incidents: list[Incident] = field(default_factory=list)

    @property
    def rank_s(self) -> float:
        """All of it."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float | None:
        """The share that was productive; None before there is anything."""
        return self.seconds["productive"] / self.rank_s if self.rank_s else None


def account(events: Iterable[Line], metrics: Iterable[Line], *, now: float | None = None) -> Account:
    """The account of a run directory's lines.

    Args:
        now: unix seconds, while the campaign runs; a job that ended without a word is taken to have ended with its last line.
    """
    timed = [line for line in events if "t" in line]
    steps = [line for line in metrics if line.get("step_s") is not None and "step" in line and "t" in line]
    clerk = _Clerk(timed)
    for line in sorted([*timed, *steps], key=_order):
        clerk.take(line)
    if now is not None and clerk.cursor is not None:
        clerk.spend(now, "productive" if clerk.phase == "run" else clerk.phase)
    return clerk.account


def _order(line: Line) -> tuple[float, int]:
    """By time; a step that ends at a moment belongs to what was before it."""
    return float(line["t"]), 0 if line.get("event") == "run_started" else 1 if "event" not in line else 2


class _Clerk:
    """Goes along the time line. `phase` is the part that the present stretch belongs to, "run" between steps."""

    def __init__(self, events: list[Line]) -> None:
        self.account = Account()
        self.cursor: float | None = None
        self.phase = "start"
        self._ranks = 1
        self._done = 0
        self._before: tuple[int, int] | None = None  # generation and step of the last line of metrics
        self._given_up = 0  # the generation that the last fault ended
        self._step_s = 0.0
        self._open: list[Incident] = []
        self._actions: dict[str, str] = {}
        for line in events:
            if line.get("event") == "action":  # the first one: a shrinking or growing that follows is told under the same fault
                self._actions.setdefault(line["fault_id"], line["name"])
        self._worlds = [(line["t"], line["world_size"]) for line in events if line.get("event") == "generation_started"]
        self._stalls: dict[tuple[int, int], float] = {}
        for line in events:
            if line.get("event") in STALLS:
                key = (line["generation"], line["step"])
                self._stalls[key] = max(self._stalls.get(key, 0.0), line["stall_s"])
        self._evaluated = {(line["generation"], line["step"]) for line in events if line.get("event") == "validation"}

    def spend(self, until: float, part: str) -> None:
        """Everything up to this moment that has no name yet gets this one."""
        assert self.cursor is not None
        seconds = max(0.0, until - self.cursor)
        self.cursor += seconds
        self.account.wall_s += seconds
        self.account.seconds[part] += seconds * self._ranks
        for incident in self._open[:1] if part not in ("productive", "data") else ():
            incident.seconds[part] = incident.seconds.get(part, 0.0) + seconds

    def take(self, line: Line) -> None:
        """The next line."""
        t = float(line["t"])
        if line.get("event") == "run_started":
            self.cursor, self.phase, self._before, self._open = t, "start", None, []
            self._ranks = next((world for at, world in self._worlds if at >= t), self._ranks)
            return
        if self.cursor is None:
            return
        match line.get("event"):
            case None:
                self._step(line, t)
            case "generation_started" if self._before is not None and self._before[0] == line["generation"]:
                self._ranks = line["world_size"]  # its first step was faster than the word of it
            case "generation_started":
                self.spend(t, "restart" if self.phase == "restart" else "start")
                self._ranks = line["world_size"]
                self.phase, self._before = "restore" if line["resumed_step"] else "start", None
            case "fault" if line["kind"] != "storage":
                self._fault(line, t)
            case "action" if line["name"] == "grow":
                self.spend(t, "rework" if self.phase == "run" else self.phase)
                self.phase = "restart"
            case "recovered":
                self._recovered(line)
            case "run_finished":
                self.spend(t, "finish" if self.phase in ("run", "finish") else self.phase)
                self.cursor = None

    def _step(self, line: Line, t: float) -> None:
        """A step has ended: the time before it, and its own."""
        assert self.cursor is not None
        if self.phase == "restart" and int(line["generation"]) <= self._given_up:
            return  # another rank ended its step after the fault, and will do so again
        step, step_s = int(line["step"]), float(line["step_s"]) * int(line.get("steps", 1))  # short steps are told together
        began = max(self.cursor, t - step_s)
        if self.phase == "link":  # the step that stalled: what is beyond a usual one was waiting
            began = max(self.cursor, t - (self._step_s or step_s))
            self.spend(began, "link")
        elif self.phase != "run":
            self.spend(began, self.phase)
        elif self._before is not None:
            self.spend(min(began, self.cursor + self._stalls.get(self._before, 0.0)), "snapshot")
            self.spend(began, "evaluation" if self._before in self._evaluated else "idle")
        self.spend(min(t, began + float(line.get("data_s") or 0.0)), "data")
        self.spend(t, "productive" if step > self._done else "rework")
        self._done, self._step_s = max(self._done, step), min(step_s, self._step_s or step_s) if self.phase == "link" else step_s
        self.phase, self._before = "run", (int(line["generation"]), step)

    def _fault(self, line: Line, t: float) -> None:
        action = self._actions.get(line["fault_id"], "")
        fields = {"detail": "", "ranks": [], "nodes": [], "detect_s": 0.0, **line}
        ids = line["fault_id"], line.get("incident_id") or line["fault_id"]
        incident = Incident(*ids, t, line["kind"], fields["detail"], fields["ranks"], fields["nodes"], action)
        self.account.incidents.append(incident)
        if action in GOES_ON or line["kind"] in PLANNED:
            return
        if action == "wait":
            self._open.append(incident)
            self.spend(t, "link")
            self.phase = "link"
            return
        self.spend(t - float(fields["detect_s"]), "rework" if self.phase == "run" else self.phase)
        self._open.append(incident)
        self.spend(t, "detection")
        self._given_up = int(line["generation"])
        self.phase = "restart" if action in ("restart_workers", "replace_node", "roll_back") else "finish"

    def _recovered(self, line: Line) -> None:
        for incident in self._open:
            if incident.fault_id == line["fault_id"]:
                incident.lost_steps = line["lost_steps"]
        self._open = [incident for incident in self._open if incident.fault_id != line["fault_id"]]
