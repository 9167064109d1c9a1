"""Faults: what went wrong, told from what was seen.

Pure: turns the ways in which workers ended into one `Fault` that names the culprit and not its victims. Detecting is the agents'
work, deciding what to do is `resilient.recovery.policy`.
"""

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from resilient.excerpts import head
from resilient.recovery import symptoms
from resilient.recovery.attempts import Attempt

LINE_CHARACTERS = 400  # of what an exception says, in a text of one line
NAMED = 8  # ranks or nodes in a text; of more, only the number is said

FREED_S = 60.0  # after a restart the memory of GPUs may still belong to processes that were killed
TOGETHER_S = 1.0  # a rank's end may be noticed so much later than that of a rank that it led to
INCIDENTS = "incidents"  # in the run directory: a folder of evidence for each fault that left some

_NUMBER = re.compile(r"-?\d+")

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

    `final` is the exit code of the run where trying again cannot help, else None. Of bad numbers `kind` is what they are and
    `since` the first step that had them. `causes` are the exceptions that it was raised from, or while they were handled: each as
    "type: text", the nearest first.
    """

    type: str
    message: str
    traceback: str
    t: float
    final: int | None = None
    kind: Literal["not_finite", "loss_spike"] | None = None
    since: int | None = None
    causes: str = ""

    @property
    def is_number(self) -> bool:
        """Whether it is `sys.exit` with an exit code."""
        return self.type == "SystemExit" and _NUMBER.fullmatch(self.message) is not None

    @property
    def words(self) -> str:
        """What it says, and what its causes say."""
        return f"{self.message}\n{self.causes}" if self.causes else self.message


@dataclass(frozen=True)
class OutOfMemory:
    """The kernel's OOM killer ended a worker: the cgroup whose limit it was and what that used at most, in bytes.

    All of that is None where the whole machine had no memory left, or nobody can tell the limit; `evidence` is who says so.
    """

    cgroup: str | None
    limit_bytes: int | None
    used_bytes: int | None
    evidence: str

    def __str__(self) -> str:
        if self.limit_bytes is None:
            return "the OOM killer"
        used = f", used {self.used_bytes / 2**20:,.0f} MiB" if self.used_bytes is not None else ""
        return f"the OOM killer (cgroup {self.cgroup}, limit {self.limit_bytes / 2**20:,.0f} MiB{used})"

    @property
    def verdict(self) -> symptoms.Class:
        """A limit is met again, wherever the worker runs; a machine without memory may be somebody else's doing."""
        return "node" if self.limit_bytes is None else "deterministic"


@dataclass(frozen=True)
class WorkerEnd:
    """How one worker ended.

    Attributes:
        exitcode: as `multiprocessing` gives it: negative for a signal.
        noticed_t: when its agent saw it, unix seconds.
        step: the last step that it finished, -1 if none in its generation.
        log: the last lines of its log, where it failed.
        crash: where it was when native code ended it, as `faulthandler` has it.
        oom: where it was killed for want of memory.
    """

    rank: int
    node: int
    pid: int
    exitcode: int
    noticed_t: float
    step: int
    phase: str
    raised: Raised | None = None
    log: str = ""
    crash: str = ""
    oom: OutOfMemory | None = None

    @property
    def failed(self) -> bool:
        return self.exitcode != 0

    @cached_property
    def victim(self) -> bool:
        """Whether it ended because another rank, or the link to it, has gone: it said so, or NCCL's watchdog did and ended it."""
        if self.raised is not None or not _aborted(self):
            return blames_a_peer(self.raised)
        found = symptoms.read(self.log)  # takes a millisecond, and of thousands of ranks all may be victims
        return found is not None and found.symptom.blames_a_peer

    @property
    def exception(self) -> Raised | None:
        """The exception that says why it ended; `sys.exit(3)` says no more than the exit code."""
        return None if self.raised is not None and self.raised.is_number else self.raised


@dataclass(frozen=True)
class Fault:
    """One incident.

    Attributes:
        step: the optimizer step that was being computed; None where there was none.
        cause: short and the same whenever the same thing happens again; `detail` is for people.
        detect_s: from the moment it showed on its node until it was known here.
        final: the exit code of the run where trying again cannot help.
        verdict: the class of the cause, where `resilient.recovery.symptoms` knows it.
        since: of bad numbers, the first step that had them.
        phase: that the culprit was in.
        attempt: what the attempt that it ended had come to, of a script that says nothing by itself.
        device: the device of the culprit does not work any more.
        files: what the culprit found to be missing or unreadable, where it may be there again in a while.
        generation: the last one that had begun.
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
    verdict: symptoms.Class | None = None
    since: int | None = None
    phase: str | None = None
    attempt: Attempt | None = None
    device: bool = False
    files: str | None = None
    generation: int | None = None

    @property
    def hung(self) -> bool:
        """Whether ranks were found that do not get on, and may still say why."""
        return self.kind in ("stopped", "hang", "collective_timeout")

    @property
    def signature(self) -> tuple[str, str, int | None]:
        """Two faults with the same signature are the same failure at the same step."""
        return self.kind, self.cause, self.step


# A rank that raised one of these, or what the table of symptoms has of lost peers, is a victim as long as there is anyone else to
# blame.
_PEER_GONE = re.compile(r"^(DistBackendError|DistNetworkError|DistStoreError|DistError):", re.MULTILINE)


def blames_a_peer(raised: Raised | None) -> bool:
    """Whether this exception, or one that it was raised from, is what a rank raises when another rank, or the link to it, has gone.

    Libraries wrap it: torch's pipeline raises an error of its stage from it, and a script's clean-up may fail after it.
    """
    if raised is None:
        return False
    found = symptoms.read(raised.words)
    return found.symptom.blames_a_peer if found is not None else _PEER_GONE.search(f"{raised.type}:\n{raised.causes}") is not None


def _aborted(end: WorkerEnd) -> bool:
    return end.exitcode == -signal.SIGABRT


def _diagnose(end: WorkerEnd) -> symptoms.Finding | None:
    """What the end of a worker says of its cause."""
    if end.exception is not None:
        found = symptoms.diagnose(f"{end.exception.type}: {end.exception.message}", end.log)
        return found or (symptoms.diagnose(end.exception.causes, end.log) if end.exception.causes else None)
    found = symptoms.diagnose(None, end.log)
    # What was killed from outside, or left by itself, did not end of a peer that it had lost.
    return None if found is not None and found.symptom.blames_a_peer and not _aborted(end) else found


def culprit(ends: Sequence[WorkerEnd], *, stopped: bool = False) -> WorkerEnd:
    """Of workers that ended in one generation, the one that failed first and by itself.

    Where all that failed are victims, it is one that had left them before with status 0, if there is one.

    Args:
        stopped: the generation had been asked to stop: it is right to end with status 0.
    """

    def order(end: WorkerEnd) -> tuple[bool, float, int]:
        when = end.raised.t if end.raised is not None else end.noticed_t
        return end.victim, when, end.rank

    first = min((end for end in ends if end.failed), key=order)
    if stopped or not first.victim:
        return first
    left = [end for end in ends if not end.failed and end.noticed_t <= first.noticed_t + TOGETHER_S]
    return min(left, key=_left_first, default=first)


def _left_first(end: WorkerEnd) -> tuple[int, float, int]:
    return end.step, end.noticed_t, end.rank


def left_early(waiting: Fault, left: Sequence[WorkerEnd], resumed_step: int | None) -> Fault:
    """The fault of a worker that has left with status 0, for which all others wait; NCCL tells them nothing of it.

    Args:
        waiting: the fault of those that wait.
        left: all that have left.
    """
    first = min(left, key=_left_first)
    step = computed(first.step, resumed_step)
    cause = "exit code 0"
    return replace(
        waiting,
        kind="exit",
        cause=cause,
        ranks=(first.rank,),
        nodes=(first.node,),
        step=step,
        detail=f"{cause}{_after(step)}; {waiting.detail}",
        evidence=f"{_ended_by(first, cause)}\n{waiting.evidence}",
        phase=first.phase,
    )


def _after(step: int | None) -> str:
    """Args: step: that was being computed."""
    return f" after step {step - 1}" if step is not None and step > 1 else ""


def _ended_by(end: WorkerEnd, how: str) -> str:
    return f"process {end.pid} of rank {end.rank} ended by {how} in phase {end.phase}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def computed(finished: int, resumed_step: int | None) -> int | None:
    """The step that was being computed; None while it is not known where the generation starts.

    Args:
        finished: the last one of this generation, below 0 if none.
    """
    return None if finished < 0 and resumed_step is None else max(finished, resumed_step or 0) + 1


def _line(raised: Raised) -> str:
    """An exception in a line that can be read."""
    return f"{raised.type}: {head(raised.message.strip().partition(chr(10))[0], LINE_CHARACTERS)}"


def from_ends(
    fault_id: str,
    ends: Sequence[WorkerEnd],
    *,
    resumed_step: int | None,
    now: float,
    restarted_t: float | None = None,
    stopped: bool = False,
    files: Sequence[str] = (),
) -> Fault:
    """The fault behind the workers of one generation that failed.

    Args:
        stopped: the generation had been asked to stop.
        restarted_t: when these workers took the places of others that had been killed, unix seconds; None: they were the first.
        resumed_step: the step the generation started from, for workers that had not finished one; None: not known yet.
        now: unix seconds.
        files: how the paths of the run's own data begin.
    """
    first = culprit(ends, stopped=stopped)
    step = computed(first.step, resumed_step)
    found = _diagnose(first) if first.raised is None or first.raised.final is None else None
    if (exception := first.exception) is not None:
        kind: Kind = "collective_timeout" if symptoms.waited_in_vain(exception.words) else "exception"
        kind = exception.kind or kind
        cause = exception.type
        detail = _line(exception)
        evidence = exception.traceback if exception.final is None else exception.message
        since = exception.t
    else:
        kind = "collective_timeout" if _aborted(first) and symptoms.waited_in_vain(first.log) else "exit"
        cause = _signal_name(-first.exitcode) if first.exitcode < 0 else f"exit code {first.exitcode}"
        detail = cause
        evidence = _ended_by(first, detail)
        evidence += f"\n{first.raised.traceback}" if first.raised is not None else ""
        evidence += f"\n{first.crash}" if first.crash else ""
        since = first.noticed_t
    if not first.failed:
        left = [end for end in ends if end.failed]
        ranks = f"rank{'s' if len(left) > 1 else ''} {listed(end.rank for end in left)}"
        detail += f"{_after(step)}, while {ranks} went on"
        evidence += "".join(f"\nrank {end.rank} lost it: {_line(end.raised)}" for end in left[:NAMED] if end.raised is not None)
    if first.oom is not None:
        cause, detail, found = "OOM killer", f"killed by {first.oom}", None
        evidence = f"{evidence}\n{first.oom.evidence}"
    verdict = found.symptom.verdict if found is not None else None
    if found is not None and found.symptom is symptoms.GPU_MEMORY and restarted_t is not None and since - restarted_t < FREED_S:
        verdict = "transient"
        detail += f", {max(0.0, since - restarted_t):.0f} s after a restart: a killed process may still have held some"
    if found is not None:
        detail += f"; {found.symptom.meaning}"
        if found.line not in evidence:
            evidence = f"{evidence.rstrip()}\nin its log: {found.line}"
    away = _files(first, files)
    if away is not None:
        detail += f"; missing or unreadable: {away}"
    return Fault(
        fault_id=fault_id,
        kind=kind,
        cause=cause,
        ranks=(first.rank,),
        nodes=(first.node,),
        step=step,
        detail=detail,
        evidence=evidence,
        detect_s=max(0.0, now - since),
        final=first.raised.final if first.raised is not None else None,
        verdict=first.oom.verdict if first.oom is not None else verdict,
        since=first.raised.since if first.raised is not None else None,
        phase=first.phase,
        device=found is not None and found.symptom.device,
        files=away,
    )


def _files(end: WorkerEnd, own: Sequence[str]) -> str | None:
    """What this rank found to be missing or unreadable, see `symptoms.unreadable_files`."""
    if end.exception is None or end.exception.final is not None:
        return None
    starting = end.step < 0 and end.phase in ("start", "load")
    return symptoms.unreadable_files(f"{end.exception.type}: {end.exception.words}", own, starting=starting)


def listed(numbers: Iterable[int]) -> str:
    """Ranks or nodes for a text: the first eight, ascending, and how many more there are."""
    ordered = sorted(numbers)
    return ", ".join(map(str, ordered[:NAMED])) + more(len(ordered) - NAMED)


def more(count: int) -> str:
    """What is said of those that are not named."""
    return f" and {count} more" if count > 0 else ""
