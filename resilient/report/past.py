"""What the report tells of a campaign's past, folded from its lines. Pure; what it holds does not grow with the number of steps."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from resilient import entries
from resilient.account import GOES_ON, PLANNED
from resilient.downtime import Downtime
from resilient.drawing.timeline import seconds_text
from resilient.entries import Count, Seconds, Time
from resilient.redaction import hidden_text
from resilient.report.envelope import Envelope
from resilient.report.heat import Heat

Line = Mapping[str, Any]

FAULTS = 20_000  # that are kept, the newest; a campaign with more is in need of something else than a report
WORDS = 4096  # characters of what a line says that are looked at
STORAGE = 100  # faults of tiers that are kept, the newest
TIME_WIDTH_S = 2.0**-6  # of a stretch of curves over time, at the beginning
STEP_WIDTH = 1.0
OF_LINKS = ("down", "flapped")  # states of a link that are told of its node


class Snapshot(msgspec.Struct, gc=False):
    """Its line of the ledger, as far as the report tells of it."""

    t: Time
    generation: Count
    host: str
    step: Count
    tier: str
    stall_s: Seconds
    bytes: Count = 0
    write_s: Seconds = 0.0
    count: Count = 1
    longest_stall_s: Seconds = 0.0


@dataclass
class Fault:
    """One fault and what became of it; times in unix seconds, `began_t` of what went wrong, `until_t` of its recovery."""

    fault_id: str
    t: float
    began_t: float
    kind: str
    ranks: list[int]
    nodes: list[int]
    hosts: list[str]
    step: int | None
    detail: str
    evidence: str
    actions: list[str] = field(default_factory=list)
    reason: str = ""
    downtime_s: float | None = None
    lost_steps: int | None = None
    until_t: float | None = None

    @property
    def planned(self) -> bool:
        return self.kind in PLANNED

    def culprit(self) -> str:
        """Whom it is blamed upon."""
        by_node = self.nodes and (self.kind == "node_lost" or not self.ranks)
        which, numbers = ("node", self.nodes) if by_node else ("rank", self.ranks)
        if not numbers:
            return ""
        text = f"{which}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:4]))}"
        hosts = ", ".join(dict.fromkeys(self.hosts[:4]))
        return text + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "") + (f" ({hosts})" if hosts else "")

    def down(self) -> str:
        """For how long ranks stood still, in words."""
        if self.downtime_s is not None:
            return seconds_text(self.downtime_s)
        went_on = self.kind == "storage" or (self.actions and all(each.replace(" ", "_") in GOES_ON for each in self.actions))
        return "ranks went on" if went_on else "not recovered"


@dataclass
class Job:
    """One job; times in unix seconds, steps of its metrics.

    Attributes:
        last_t: of the last that is known of it.
        changes: of the config since the job before it: lines of the ledger.
    """

    t: float
    host: str
    target_step: int | None
    layout: Mapping[str, Any]
    last_t: float
    exit_code: int | None = None
    ended: bool = False
    first_step: int | None = None
    last_step: int | None = None
    generations: int = 0
    faults: int = 0
    downtime_s: float = 0.0
    lost_steps: int = 0
    changes: list[Line] = field(default_factory=list)


@dataclass
class Tier:
    """What was written to a tier; bytes and seconds of all snapshots together, but for the longest stall of one."""

    snapshots: int = 0
    size_bytes: float = 0.0
    write_s: float = 0.0
    stall_s: float = 0.0
    longest_stall_s: float = 0.0
    last_step: int = 0
    last_t: float = 0.0
    every_steps: int | None = None
    committed: int = 0
    refused: int = 0


@dataclass
class Past:
    """All of it.

    Attributes:
        layout: of the newest generation, with its ranks as `world_size`.
        refused: checkpoints that were passed over, the newest.
    """

    jobs: list[Job] = field(default_factory=list)
    faults: deque[Fault] = field(default_factory=lambda: deque(maxlen=FAULTS))
    kinds: Counter[str] = field(default_factory=Counter)
    storage: deque[Fault] = field(default_factory=lambda: deque(maxlen=STORAGE))
    tiers: dict[str, Tier] = field(default_factory=dict)
    refused: deque[Line] = field(default_factory=lambda: deque(maxlen=STORAGE))
    heat: Heat = field(default_factory=Heat)
    layout: Mapping[str, Any] = field(default_factory=dict)
    loss_by_step: Envelope = field(default_factory=lambda: Envelope(STEP_WIDTH))
    loss_by_time: Envelope = field(default_factory=lambda: Envelope(TIME_WIDTH_S))
    tokens_by_step: Envelope = field(default_factory=lambda: Envelope(STEP_WIDTH))
    tokens_by_time: Envelope = field(default_factory=lambda: Envelope(TIME_WIDTH_S))
    steps_by_step: Envelope = field(default_factory=lambda: Envelope(STEP_WIDTH))  # steps a second
    steps_by_time: Envelope = field(default_factory=lambda: Envelope(TIME_WIDTH_S))
    validations_by_step: Envelope = field(default_factory=lambda: Envelope(STEP_WIDTH, 200))
    validations_by_time: Envelope = field(default_factory=lambda: Envelope(TIME_WIDTH_S, 200))

    @property
    def first_t(self) -> float | None:
        return self.jobs[0].t if self.jobs else None

    @property
    def last_t(self) -> float | None:
        return max((job.last_t for job in self.jobs), default=None)


class Fold:
    """Takes the lines of the ledger in order, and then those of the metrics."""

    def __init__(self) -> None:
        self.past = Past()
        self._hosts: dict[int, str] = {}  # by number of the node
        self._open: dict[str, Fault] = {}
        self._downtime = Downtime()

    def snapshots(self, found: Sequence[Snapshot]) -> None:
        """Events of which there may be one a step; all of one job, in order."""
        names = dict.fromkeys([each.tier for each in found])
        for name in names:
            own = found if len(names) == 1 else [each for each in found if each.tier == name]
            tier, stalls_s = self.past.tiers.setdefault(name, Tier()), [each.stall_s for each in own]
            tier.snapshots += sum([each.count for each in own])
            tier.size_bytes += sum([each.bytes for each in own])
            tier.write_s += sum([each.write_s for each in own])
            tier.stall_s += sum(stalls_s)
            longest_s = max([each.longest_stall_s if each.count > 1 else each.stall_s for each in own])
            tier.longest_stall_s = max(tier.longest_stall_s, longest_s)
            tier.last_step, tier.last_t = own[-1].step, own[-1].t
            self._job(max([each.t for each in own]), own[0].host)

    def _job(self, t: float, host: str) -> Job:
        """The job that something belongs to; one of which the first line was lost, where there is none."""
        if not self.past.jobs:
            self.past.jobs.append(Job(t, host, None, {}, t))
        job = self.past.jobs[-1]
        job.last_t = max(job.last_t, t)
        return job

    def event(self, line: Line) -> None:
        """Any other event, whole."""
        past, t = self.past, float(line["t"])
        if line["event"] == "run_started":
            self._open.clear()
            self._downtime.take(line)
            layout = line.get("layout")
            past.jobs.append(Job(t, line["host"], line["target_step"], layout if isinstance(layout, dict) else {}, t))
            return
        if line["event"] == "forked":  # which may be long before the first job
            return
        job = self._job(t, line["host"])
        match line["event"]:
            case "config_changed":
                job.changes.append(line)
            case "generation_started":
                members = line.get("members")
                numbers = members if isinstance(members, list) else range(len(line["nodes"]))
                self._hosts = {number: host for number, host in zip(numbers, line["nodes"], strict=False) if type(number) is int}
                layout = line.get("layout")
                past.layout = {**(layout if isinstance(layout, dict) else {}), "world_size": line["world_size"]}
                job.generations += 1
            case "fault":
                self._fault(line, t, job)
            case "action" if (fault := self._open.get(str(line["fault_id"]))) is not None:
                fault.actions.append(line["name"].replace("_", " "))
                fault.reason = fault.reason or _words(line["reason"])
            case "recovered":
                self._recovered(line, t, job)
            case "link" if line["state"] in OF_LINKS:
                self._hosts.setdefault(line["node"], line["host"])
                past.heat.add(line["host"], t, f"link {line['state']}")
            case "health" if not line["ok"]:
                past.heat.add(line["host"], t, "not fit")
            case "committed" if isinstance(tier := line.get("tier"), str):
                past.tiers.setdefault(tier, Tier()).committed += 1
            case "checkpoint_rejected":
                past.refused.append(line)
                if isinstance(tier := line.get("tier"), str):
                    past.tiers.setdefault(tier, Tier()).refused += 1
            case "cadence":
                past.tiers.setdefault(line["tier"], Tier()).every_steps = line["every_steps"]
            case "validation":
                loss = entries.validation_loss(line)
                step, at, value, group = (np.array([each]) for each in (line["step"], t, loss, line["generation"]))
                past.validations_by_step.add(step.astype(float), value.astype(float), np.zeros(1, np.int64))
                past.validations_by_time.add(at.astype(float), value.astype(float), group)
            case "run_finished":
                job.exit_code, job.ended, job.last_t = line["exit_code"], True, t

    def _fault(self, line: Line, t: float, job: Job) -> None:
        hosts = [self._hosts[node] for node in line["nodes"] if node in self._hosts]
        fault = Fault(
            line["fault_id"], t, t - float(line["detect_s"]), line["kind"], line["ranks"], line["nodes"], hosts, line["step"],
            _words(line["detail"]), _words(line["evidence"]),
        )  # fmt: skip
        self._open[fault.fault_id] = fault
        self.past.faults.append(fault)
        if fault.planned:
            return
        self.past.kinds[fault.kind] += 1
        if fault.kind == "storage":
            self.past.storage.append(fault)
        job.faults += 1
        for host in dict.fromkeys(hosts):
            self.past.heat.add(host, t, fault.kind.replace("_", " "))

    def _recovered(self, line: Line, t: float, job: Job) -> None:
        down = self._downtime
        before_s, before_steps = down.down_s, down.lost_steps
        down.take(line)
        job.downtime_s += down.down_s - before_s
        job.lost_steps += down.lost_steps - before_steps
        fault = self._open.pop(line["fault_id"], None)
        if fault is not None:
            fault.downtime_s, fault.lost_steps, fault.until_t = line["downtime_s"], line["lost_steps"], t

    def steps(
        self,
        t: list[float],
        step: list[int],
        generation: list[int],
        loss: list[float | None],
        tokens_per_s: list[float | None],
        step_s: list[float | None],
    ) -> None:
        """Lines of metrics: a list of each member."""
        past = self.past
        times, places, groups = np.array(t), np.array(step, np.float64), np.array(generation, np.int64)
        none = np.zeros(len(step), np.int64)
        took_s = np.array(step_s, np.float64)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            speed = np.where(took_s > 0, 1 / took_s, np.nan)
        for values, by_step, by_time in (
            (np.array(loss, np.float64), past.loss_by_step, past.loss_by_time),
            (np.array(tokens_per_s, np.float64), past.tokens_by_step, past.tokens_by_time),
            (speed, past.steps_by_step, past.steps_by_time),
        ):
            by_step.add(places, values, none)
            by_time.add(times, values, groups)
        if not past.jobs:
            self._job(min(t), "")
        starts = np.array([job.t for job in past.jobs])
        of_job = np.maximum(0, np.searchsorted(starts, times, side="right") - 1)
        for number in np.unique(of_job):
            job, own = past.jobs[number], of_job == number
            low, high = int(places[own].min()), int(places[own].max())
            job.first_step = low if job.first_step is None else min(job.first_step, low)
            job.last_step = high if job.last_step is None else max(job.last_step, high)
            if not job.ended:
                job.last_t = max(job.last_t, float(times[own].max()))


def _words(text: str) -> str:
    return hidden_text(text[:WORDS])
