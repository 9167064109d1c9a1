"""Goes along the time line of a campaign and gives each stretch its name. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from resilient.account.late import KilledJob, killed_job, late_step
from resilient.account.parts import GOES_ON, PLANNED, Account, Incident, Kind, Run
from resilient.account.timeline import (
    STORAGE,
    Line,
    TimelineEntry,
    entry_of_event,
    entry_of_step,
    entry_of_step_event,
    entry_of_step_metrics,
    in_order,
)
from resilient.account.undisturbed import Note, noted, undisturbed
from resilient.entries import StepEvent, StepMetrics

STALLS = ("snapshot", "script_checkpoint")  # events that tell how long ranks stood still after a step
HELD, HELD_S = 64, 60.0  # lines, and seconds, for which a fault waits to be told what was done about it
KINDS = 64  # of faults that are told apart


def account(events: Iterable[Line], metrics: Iterable[Line], *, now: float | None = None) -> Account:
    """The account of a run directory's lines, with all incidents.

    Args:
        events: in the order of the ledger; metrics: in that of their file.
        now: unix seconds, while the campaign runs; a job that ended without a word is taken to have ended with its last line.
    """
    accounting = Accounting(keep=None)
    for is_event, line in in_order(events, metrics):
        if is_event:
            accounting.event(line)
        else:
            accounting.step(line)
    return accounting.closed(now)


@dataclass
class Accounting:
    """Goes along the time line; all of it is its state.

    Attributes:
        keep: of incidents and of jobs, the newest; None: all.
        cursor: unix seconds, up to which everything has a name; None: no job runs.
        phase: the part that the present stretch belongs to, "run" between steps.
        ranks: that there are, once that is `known` of the present job.
        span: seconds by part that are in no sum yet, all with the same number of ranks; `unweighted` those until it is known.
        before: generation and step of the last line of metrics.
        given_up: the generation that the last fault ended.
        open: numbers of incidents that are kept and not over, ascending; the first of `kept.incidents` has the number `dropped`.
        held: lines from a fault on of which nothing says yet what was done about it.
        idle_s: between steps since snapshots were last told by their sum, as far as nothing says what they were for.
        degraded: faults of storage that are not over, the newest.
        counted: steps that the incident that was recovered from last has cost, and its id.
        killed: the job whose last steps may still be told of.
    """

    keep: int | None = None
    kept: Account = field(default_factory=Account)
    dropped: int = 0
    cursor: float | None = None
    phase: str = "start"
    ranks: int = 1
    known: bool = True
    span: dict[str, float] = field(default_factory=dict)
    unweighted: dict[str, float] = field(default_factory=dict)
    done: int = 0
    before: tuple[int, int] | None = None
    given_up: int = 0
    step_s: float = 0.0
    open: list[int] = field(default_factory=list)
    notes: dict[tuple[int, int], Note] = field(default_factory=dict)
    held: list[TimelineEntry] = field(default_factory=list)
    idle_s: float = 0.0
    degraded: list[str] = field(default_factory=list)
    counted: tuple[str, int] = ("", 0)
    killed: KilledJob | None = None

    def event(self, line: Line) -> None:
        """The next line is one of the ledger."""
        self._add(entry_of_event(line))

    def step(self, line: Line) -> None:
        """The next line is one of metrics."""
        self._add(entry_of_step(line))

    def steps(self, metrics: Sequence[StepMetrics], events: Sequence[StepEvent]) -> None:
        """The next lines are these of both files, each in order: the same as line by line, in a part of the time."""
        at = event_at = 0
        while at < len(metrics) or event_at < len(events):
            between_steps = self.phase == "run" and self.cursor is not None and self.before is not None
            if between_steps and not self.held and not self.open:
                at, event_at = undisturbed(self, metrics, at, events, event_at)
            if event_at < len(events) and (at == len(metrics) or events[event_at].t < metrics[at].t):
                self._add(entry_of_step_event(events[event_at]))
                event_at += 1
            elif at < len(metrics):
                self._add(entry_of_step_metrics(metrics[at]))
                at += 1

    def _add(self, each: TimelineEntry | None) -> None:
        if each is None:
            return
        if self.held or each.event == "fault":
            self.held.append(each)
            self._release(all_=False)
        else:
            self._take(each)

    def closed(self, now: float | None) -> Account:
        """The account until now; the accounting takes no more lines. Args: now: as of `account`."""
        self._release(all_=True)
        if now is not None and self.cursor is not None:
            self._spend(now, "productive" if self.phase == "run" else self.phase)
        self._weigh(self.ranks)
        for sums in (self.kept.seconds, *(run.seconds for run in self.kept.runs)):
            sums.update({part: max(0.0, seconds) for part, seconds in sums.items()})  # what was booked otherwise later is rounded
        return self.kept

    def _release(self, *, all_: bool) -> None:
        """Go on with what was held back for the sake of faults, as far as it is known what was done about them."""
        while self.held:
            first = self.held[0]
            if first.event == "fault":
                done = (each.name for each in self.held if each.event == "action" and each.fault_id == first.fault_id)
                action = next(done, None)
                if action is None and not all_ and len(self.held) <= HELD and self.held[-1].t - first.t <= HELD_S:
                    return
                self._fault(first, action or "")
            else:
                self._take(first)
            del self.held[0]

    def _spend(self, until: float, part: str) -> None:
        """Everything up to this moment that has no name yet gets this one."""
        assert self.cursor is not None
        seconds = until - self.cursor
        if seconds <= 0:
            return
        self.cursor += seconds
        self.kept.wall_s += seconds
        self.span[part] = self.span.get(part, 0.0) + seconds
        if self.open and part not in ("productive", "data"):
            incident = self.kept.incidents[self.open[0] - self.dropped]
            for sums in (incident.seconds, self._kind(incident.kind).seconds):
                sums[part] = sums.get(part, 0.0) + seconds
        if self.kept.runs:
            run = self.kept.runs[-1]
            run.until_t = max(run.until_t, self.cursor)

    def _book(self, part: str, seconds: float, ranks: int | None) -> None:
        """Into the sums. Args: ranks: None: how many is not known yet."""
        if ranks is not None:
            self.kept.seconds[part] += seconds * ranks
        else:
            self.unweighted[part] = self.unweighted.get(part, 0.0) + seconds
        if self.kept.runs:
            sums = self.kept.runs[-1].seconds
            sums[part] = sums.get(part, 0.0) + seconds

    def _settle(self) -> None:
        """What was spent since the last time, into the sums."""
        for part, seconds in self.span.items():
            self._book(part, seconds, self.ranks if self.known else None)
        self.span = {}

    def _weigh(self, ranks: int) -> None:
        """So many ranks there are."""
        self._settle()
        self.ranks, self.known = ranks, True
        for part, seconds in self.unweighted.items():
            self.kept.seconds[part] += seconds * ranks
        if self.unweighted:
            self.unweighted = {}
            for note in self.notes.values():
                note.ranks = ranks if note.ranks is None else note.ranks

    def _kind(self, name: str) -> Kind:
        kinds = self.kept.kinds
        return kinds.setdefault(name if name in kinds or len(kinds) < KINDS else "other", Kind())

    def _take(self, line: TimelineEntry) -> None:
        t = line.t
        if line.event == "run_started":
            self._settle()
            self.killed = killed_job(self)
            self.cursor, self.phase, self.before, self.open = t, "start", None, []
            self.known, self.notes, self.idle_s = False, {}, 0.0
            self.degraded, self.counted = [], ("", 0)
            self.kept.runs.append(Run(t, t))
            if self.keep is not None:
                del self.kept.runs[: -self.keep]
            return
        if line.event in STALLS and line.count > 1:
            self._sum(line)
            return
        if line.event in STALLS or line.event == "validation":
            self._note(line)
            return
        if self.cursor is None:
            return
        match line.event:
            case "":
                self._step(line, t)
            case "generation_started":
                self._generation(line, t)
            case "action" if line.name in ("grow", "evacuate"):
                self._spend(t, "rework" if self.phase == "run" else self.phase)
                self.phase = "restart"
            case "storage":
                self.degraded = [*self.degraded[1 - HELD :], line.fault_id]
                self._count(STORAGE)
            case "recovered":
                self._recovered(line)
            case "run_finished":
                self._spend(t, "finish" if self.phase in ("run", "finish") else self.phase)
                self.cursor = None
                if self.kept.runs:
                    self.kept.runs[-1].exit_code = line.count

    def _generation(self, line: TimelineEntry, t: float) -> None:
        if self.killed is not None and self.killed.kept is None:
            self.killed.kept = line.step
        if self.kept.runs:
            self.kept.runs[-1].generation = line.generation
        if self.before is not None and self.before[0] == line.generation:
            self._weigh(line.count)  # its first step was faster than the word of it
            return
        self._spend(t, "restart" if self.phase == "restart" else "start")
        self._weigh(line.count)
        self.idle_s = 0.0
        self.phase, self.before = "restore" if line.step else "start", None

    def _step(self, line: TimelineEntry, t: float) -> None:
        """A step has ended: the time before it, and its own."""
        assert self.cursor is not None
        if self.killed is not None and line.generation <= self.killed.generation:
            late_step(self, self.killed, line)
            return
        if self.phase == "restart" and line.generation <= self.given_up:
            return  # another rank ended its step after the fault, and will do so again
        if self.kept.runs and line.generation < self.kept.runs[-1].generation:
            return  # what a lost node had not told of a generation that is over
        step, step_s = line.step, line.seconds
        began = max(self.cursor, t - step_s)
        if self.phase == "link":  # the step that stalled: what is beyond a usual one was waiting
            began = max(self.cursor, t - (self.step_s or step_s))
            self._spend(began, "link")
        elif self.phase != "run":
            self._spend(began, self.phase)
        elif self.before is not None:
            note = noted(self.notes, self.before)
            note.gap_s, note.ranks = max(0.0, began - self.cursor), self.ranks if self.known else None
            self._spend(self.cursor + note.snapshot_s, "snapshot")
            self.idle_s += note.idle_s
            self._spend(began, note.rest)
        self._spend(min(t, began + line.data_s), "data")
        self._spend(t, "productive" if step > self.done else "rework")
        self.done, self.step_s = max(self.done, step), min(step_s, self.step_s or step_s) if self.phase == "link" else step_s
        self.phase, self.before = "run", (line.generation, step)
        if self.kept.runs:
            self.kept.runs[-1].step = step

    def _note(self, line: TimelineEntry) -> None:
        """Ranks stood still after a step; the next one may have been finished already."""
        note = noted(self.notes, (line.generation, line.step))
        before_s, before, idle_s = note.snapshot_s, note.rest, note.idle_s
        if line.event == "validation":
            note.evaluated = True
        else:
            note.stall_s = max(note.stall_s, line.seconds)
        if note.gap_s and (note.snapshot_s, note.rest) != (before_s, before):
            for part, seconds in (
                (before, before_s - note.gap_s),
                (note.rest, note.gap_s - note.snapshot_s),
                ("snapshot", note.snapshot_s - before_s),
            ):
                self._book(part, seconds, note.ranks)
            self.idle_s = max(0.0, self.idle_s + note.idle_s - idle_s)

    def _sum(self, line: TimelineEntry) -> None:
        """Ranks stood still after steps that are told together."""
        seconds = min(line.seconds, self.idle_s)
        self.idle_s = 0.0
        for part, change_s in (("idle", -seconds), ("snapshot", seconds)):
            self._book(part, change_s, self.ranks if self.known else None)

    def _fault(self, line: TimelineEntry, action: str) -> None:
        if self.cursor is None:
            return
        incident = Incident(line.fault_id, line.incident_id, line.t, line.name, line.detail, line.ranks, line.nodes, action)
        self._keep(incident)
        planned = line.name in PLANNED
        if not planned:
            self._count(line.name)
        if action in GOES_ON or planned:
            return
        number = self.dropped + len(self.kept.incidents) - 1
        if action == "wait":
            self.open.append(number)
            self._spend(line.t, "link")
            self.phase = "link"
            return
        self._spend(line.t - line.seconds, "rework" if self.phase == "run" else self.phase)
        self.open.append(number)
        self._spend(line.t, "detection")
        self.given_up = line.generation
        self.phase = "restart" if action in ("restart_workers", "replace_node", "roll_back") else "finish"

    def _count(self, kind: str) -> None:
        self._kind(kind).faults += 1
        if self.kept.runs:
            self.kept.runs[-1].faults += 1

    def _keep(self, incident: Incident) -> None:
        incidents = self.kept.incidents
        incidents.append(incident)
        if self.keep is not None and len(incidents) > self.keep:
            del incidents[0]
            self.dropped += 1
            self.open = [number for number in self.open if number >= self.dropped]

    def _recovered(self, line: TimelineEntry) -> None:
        if line.fault_id in self.degraded:
            self.degraded.remove(line.fault_id)
            self._kind(STORAGE).recovered += 1
        still = []
        for number in self.open:
            incident = self.kept.incidents[number - self.dropped]
            if incident.fault_id != line.fault_id:
                still.append(number)
                continue
            incident.lost_steps = line.count
            lost_steps = self._counted(line)
            kind = self._kind(incident.kind)
            kind.recovered += 1
            kind.lost_steps += lost_steps
            if self.kept.runs:
                self.kept.runs[-1].lost_steps += lost_steps
        self.open = still

    def _counted(self, line: TimelineEntry) -> int:
        """Steps that were not counted yet: those of faults that met are the same ones."""
        incident_id, before = self.counted
        before = before if line.incident_id == incident_id else 0
        self.counted = line.incident_id, max(before, line.count)
        return self.counted[1] - before
