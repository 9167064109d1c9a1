"""What ledger and metrics come to: a fold over their lines, whose state stays small however long the campaign is. Pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from resilient import entries, ledger
from resilient.account import PLANNED, Account, Accounting, in_order
from resilient.committed import CommittedCheckpoints
from resilient.downtime import Downtime
from resilient.entries import Pace, StepEvent, StepMetrics
from resilient.recovery.rollback import InvalidationRule, Stretch, merged, without_implied
from resilient.recovery.without_spare import Measuring

Line = Mapping[str, Any]

KEPT = 100  # incidents and jobs, the newest
RECENT = 8  # lines
_NUMBERS = 1 << 53

MISSED = "checkpoint_missed"

SAID = (
    "forked",
    "config_changed",
    "generation_started",
    "no_step_yet",
    "fault",
    "action",
    "recovered",
    MISSED,
    "checkpoint_rejected",
    "link",
    "health",
    "validation",
    "cadence",
    "drain",
)
"""Events that a person may want to read of."""


class Saved(msgspec.Struct, frozen=True):
    """The newest checkpoint that a script has written by itself. Attributes: t: unix seconds; None: not kept."""

    path: str
    step: int
    rank: int
    t: float | None = None


class Past(msgspec.Struct):
    """All of it. Times are unix seconds.

    Attributes:
        started: whether a job was; name, run_dir, target_step: as the last one says; began_at: its start's offset in the ledger.
        exit_code: of the last job, None where it has not ended; ended_step: that it says.
        generation: the highest that any line of the ledger names.
        metrics_step: the highest that any line of the metrics names; metrics_generation: likewise.
        pace: of steps, as it has been lately.
        recent: lines of the ledger, as JSON.
        left_out: devices that the newest generation does without, by node.
        skipped: batches that the trainer's guard has skipped in a row, up to `skipped_step`.
        rules, skip: what roll-backs have invalidated, by generation and step, and the data that is left out.
    """

    started: bool = False
    name: str = ""
    run_dir: str | None = None
    target_step: int | None = None
    began_at: int = 0
    exit_code: int | None = None
    ended_step: int | None = None
    generation: int = 0
    metrics_step: int | None = None
    metrics_generation: int = 0
    step: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    pace: Pace = msgspec.field(default_factory=Pace)
    checkpoint_step: int | None = None
    checkpoint_t: float = 0.0
    faults: int = 0
    recovered: int = 0
    downtime: Downtime = msgspec.field(default_factory=Downtime)
    measuring: Measuring = msgspec.field(default_factory=Measuring)
    validation_loss: float | None = None
    skipped: int = 0
    skipped_step: int | None = None
    recent: list[str] = []
    committed: CommittedCheckpoints = msgspec.field(default_factory=CommittedCheckpoints)
    saved: Saved | None = None
    left_out: dict[str, list[int]] = {}
    rules: list[tuple[int, int]] = []
    skip: list[Stretch] = []
    accounting: Accounting = msgspec.field(default_factory=lambda: Accounting(keep=KEPT), name="clerk")  # its name in the file

    def event(self, line: Line, at: int, *, valid: bool) -> None:
        """The next object of the ledger, whatever it is. Args: at: where its line begins; valid: see `entries.is_event`."""
        generation = line.get("generation")
        if type(generation) is int and 0 <= generation < _NUMBERS:
            self.generation = max(self.generation, generation)
        if not valid:
            return
        name = line["event"]
        if name in SAID:
            self.recent = [*_before(self.recent, line)[-(RECENT - 1) :], json.dumps(line)]
        match name:
            case "run_started":
                self.started, self.began_at, self.exit_code = True, at, None
                self.name, self.target_step = line["name"], line["target_step"]
                run_dir = line.get("run_dir")
                self.run_dir = run_dir if isinstance(run_dir, str) else self.run_dir
            case "committed" | "script_checkpoint":
                self.committed.take(line)
                self.checkpoint_step, self.checkpoint_t = line["step"], float(line["t"])
            case "fault" if line["kind"] not in PLANNED:
                self.faults += 1
            case "generation_started":
                self.left_out = _devices(line.get("left_out"))
            case "recovered":
                self.recovered += 1
            case "validation":
                self.validation_loss = entries.validation_loss(line)
            case "run_finished":
                self.exit_code, self.ended_step = line["exit_code"], line["step"]
        match name:
            case "checkpoint_rejected":
                self._reject(line)
            case "script_checkpoint":
                self.saved = Saved(line["path"], line["step"], line["rank"], float(line["t"]))
            case "action" if "skip" in line:
                self._roll_back(line)
            case "action" if line["name"] == "skip_batch":
                self.skipped, self.skipped_step = line.get("in_a_row", 0), line.get("step")
        self.downtime.take(line)
        self.measuring.take(line)
        self.accounting.event(line)

    def _reject(self, line: Line) -> None:
        """A checkpoint was refused: the newest is one that was not."""
        before = self.durable
        self.committed.take(line)
        if self.checkpoint_step in before and self.checkpoint_step not in self.durable:
            newest = self.committed.found[-1:]
            self.checkpoint_step, self.checkpoint_t = newest[0][1:] if newest else (None, 0.0)

    def _roll_back(self, line: Line) -> None:
        rules = [InvalidationRule(*each) for each in [*self.rules, (line["generation"], line["step"])]]
        self.rules = [(each.generation, each.step) for each in without_implied(rules)]
        self.skip = merged([*self.skip, *((int(first), int(last)) for first, last in line["skip"])])

    def metrics(self, line: Line, *, valid: bool) -> None:
        """The next object of the metrics, whatever it is. Args: valid: see `entries.is_metrics`."""
        step = line.get("step")
        if type(step) is int and 0 <= step < _NUMBERS:
            self.metrics_step = max(self.metrics_step or 0, step)
        if not valid:
            return
        self.accounting.step(line)
        if line["generation"] < self.metrics_generation:
            return  # what a lost node had not told of a generation that is over
        first = line["generation"] > self.metrics_generation
        self.metrics_generation = line["generation"]
        self.step, self.loss, self.tokens_per_s = line.get("step", 0), _number(line.get("loss")), _number(line.get("tokens_per_s"))
        step_s = _number(line.get("step_s"))
        self.pace = self.pace if step_s is None else self.pace.after(step_s, line.get("steps", 1), first=first)

    def steps(self, metrics: Sequence[StepMetrics], events: Sequence[StepEvent]) -> None:
        """The next lines of both files at once, between which no other lies; each in order. The same as line by line."""
        if events:
            newest = max([each.generation for each in events])
            self.generation = max(self.generation, newest)
            self.measuring.last_t = events[-1].t
        metrics_step, metrics_generation, pace = self.metrics_step, self.metrics_generation, self.pace
        newest_line = None
        for line in metrics:
            step = line.step
            if step is not UNSET and (metrics_step is None or step > metrics_step):
                metrics_step = step
            if line.generation >= metrics_generation:
                if line.step_s is not None:
                    pace = pace.after(line.step_s, line.steps, first=line.generation > metrics_generation)
                metrics_generation, newest_line = line.generation, line
        self.metrics_step, self.metrics_generation, self.pace = metrics_step, metrics_generation, pace
        if newest_line is not None:
            self.step = 0 if newest_line.step is UNSET else newest_line.step
            self.loss, self.tokens_per_s = newest_line.loss, newest_line.tokens_per_s
        self.accounting.steps(metrics, events)

    def account(self, now: float | None) -> Account:
        """Where the time went, until now; see `resilient.account.account`. Nothing may follow."""
        return self.accounting.closed(now)

    @property
    def step_s(self) -> float | None:
        """What a step takes lately."""
        return self.pace.step_s

    @property
    def durable(self) -> list[int]:
        """Steps of checkpoints that were committed and not refused, the newest."""
        return self.committed.steps

    @property
    def skipped_last(self) -> int:
        """Batches that were skipped up to the last step."""
        return self.skipped if self.skipped_step == self.step else 0

    @property
    def invalidated(self) -> list[InvalidationRule]:
        """What roll-backs have invalidated."""
        return [InvalidationRule(generation, step) for generation, step in self.rules]


def _before(recent: list[str], line: Line) -> list[str]:
    """The lines that stay before this one. Of steps that a tier misses one after the other the newest line stands for all: it has
    their count."""
    if line["event"] != MISSED:
        return recent
    at = len(recent)
    while at and (last := ledger.parsed(recent[at - 1].encode())) is not None and last.get("event") == MISSED:
        at -= 1
        if last.get("tier") == line["tier"]:
            return [*recent[:at], *recent[at + 1 :]]
    return recent


def _devices(told: object) -> dict[str, list[int]]:
    """Numbers of devices by node; what is none of that is left out, for a disk may have anything."""
    found = told if isinstance(told, dict) else {}
    return {
        node: [device for device in devices if type(device) is int and 0 <= device < _NUMBERS]
        for node, devices in found.items()
        if isinstance(node, str) and isinstance(devices, list)
    }


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def past_of(events: Iterable[Line], metrics: Iterable[Line]) -> Past:
    """What these lines come to, each in the order of its file."""
    past = Past()
    for is_event, line in in_order(events, metrics):
        if is_event:
            past.event(line, 0, valid=entries.is_event(line))
        else:
            past.metrics(line, valid=entries.is_metrics(line))
    return past
