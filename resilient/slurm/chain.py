"""The chain: one job of a campaign runs, and one waits behind it until the target is reached. Pure.

What happened so far stands in `chain.jsonl`, one record a line: `begun {name, former, behind}` (by `resilient submit`; jobs that
have not ended yet: of a chain that was over, and the last of one that goes on), `refused {reason}` (Slurm has taken no job of what
was begun last, which counts as not begun),
`submitted {job, after}`, `started {job, step}` (where the campaign stands, null: not known; of a job that finds the target reached,
too), `ended {job, exit_code}`, `cancelled {job}`, `stopped` (by `resilient stop`). A chain that is over stays over, whatever the
queue holds, until somebody submits again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from checkpoint.typed import built
from resilient.exits import Exit
from resilient.slurm.queue import QueuedJob

FILE = "chain.jsonl"
STUCK = 3  # jobs in a row that began at the same step: the next would, too

# Ends after which another job may go on; a job that ended without a word (killed, a node lost) is followed as well.
GOES_ON = (Exit.STOPPED, Exit.UNUSABLE)


@dataclass(frozen=True)
class Chain:
    """What the records come to.

    Attributes:
        jobs: that have started since the chain was begun, in order; a job that was requeued counts again.
        steps: that they began at, None where that is not known.
        over: the exit code that ended the chain; None while it goes on.
        begun_t: when somebody submitted it, unix seconds.
        former: jobs of an earlier chain that was over and had not ended then: how they end says nothing of this one.
        behind: jobs of an earlier chain that worked then, the first of this one waits for: how they end counts.
    """

    jobs: tuple[str, ...] = ()
    steps: tuple[int | None, ...] = ()
    over: Exit | None = None
    begun_t: float | None = None
    former: frozenset[str] = frozenset()
    behind: frozenset[str] = frozenset()

    @property
    def stuck(self) -> bool:
        """Whether the last jobs, this one included, have all begun at the same step."""
        last = self.steps[-STUCK - 1 :]
        return len(last) > STUCK and len(set(last)) == 1 and last[0] is not None


class _Record(msgspec.Struct, tag_field="what", tag=str.lower):
    t: Annotated[float, Meta(ge=0, le=1e11)]


class _Begun(_Record, tag="begun"):
    name: str
    former: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()


class _Refused(_Record, tag="refused"):
    reason: str


class _Submitted(_Record, tag="submitted"):
    job: str


class _Started(_Record, tag="started"):
    job: str
    step: int | None


class _Ended(_Record, tag="ended"):
    job: str
    exit_code: Literal[0, 69, 70, 75, 78]


class _Cancelled(_Record, tag="cancelled"):
    job: str


class _Stopped(_Record, tag="stopped"):
    pass


_Any = _Begun | _Refused | _Submitted | _Started | _Ended | _Cancelled | _Stopped


def whole(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those records that are records of a chain, without what a disk has lost of the others, and without submissions that Slurm has
    refused."""
    found: list[dict[str, Any]] = []
    for record in records:
        try:
            msgspec.convert(record, built(_Any))
        except (msgspec.ValidationError, RecursionError):
            continue
        if record["what"] != "refused":
            found.append(record)
        elif begun := [number for number, each in enumerate(found) if each["what"] == "begun"]:
            del found[begun[-1]]
    return found


def fold(records: Iterable[Mapping[str, Any]]) -> Chain:
    """The chain that was begun last."""
    jobs: list[str] = []
    steps: list[int | None] = []
    over: Exit | None = None
    begun_t: float | None = None
    former = behind = frozenset[str]()
    for record in records:
        match record.get("what"):
            case "begun":
                jobs, steps, over, begun_t = [], [], None, record.get("t")
                former, behind = frozenset(record.get("former", ())), frozenset(record.get("behind", ()))
            case "started":
                jobs.append(str(record["job"]))
                steps.append(record["step"])
            case "stopped":
                over = Exit.STOPPED
            case "ended" if record["exit_code"] not in GOES_ON and (record["job"] not in former or record["job"] in jobs):
                over = Exit(record["exit_code"])
    return Chain(tuple(jobs), tuple(steps), over, begun_t, former, behind)


def name(records: Iterable[Mapping[str, Any]]) -> str | None:
    """What the jobs are called; None if no chain was ever begun."""
    found = None
    for record in records:
        found = record["name"] if record.get("what") == "begun" else found
    return found


def standing(durable: Iterable[int], metrics_step: int | None) -> int | None:
    """Where a campaign stands: its newest checkpoint, or the furthest step that a script with checkpoints of its own has told."""
    return max(durable, default=0) or metrics_step


@dataclass(frozen=True)
class Submit:
    """Submit a job that starts once another has ended, and no other job of the chain runs; `after` None: at once."""

    after: str | None


@dataclass(frozen=True)
class Cancel:
    job_id: str


@dataclass(frozen=True)
class Plan:
    """What to do, and why no job is to follow where none is."""

    actions: tuple[Submit | Cancel, ...] = ()
    why_none: str = ""


def on_submit(chain: Chain, queue: Sequence[QueuedJob]) -> Plan:
    """Somebody wants the campaign to run.

    Nothing is to be done where a job of the chain waits, or runs and has not begun to work: it sees to the next itself. One that
    works and has none behind it is the last of its chain (`slurm.max_jobs`, no progress, or somebody has cancelled the next): the
    chain is begun anew behind it. A job of a chain that is over, or that is about to be gone, is none, and the new one waits for
    that. One that waits for nodes itself goes: its script may be an older one.
    """
    there = [job for job in queue if not (chain.over is not None or job.job_id in chain.former)]
    working = chain.behind.union(chain.jobs)
    if any(job.waits or (job.runs and job.job_id not in working) for job in there):
        return Plan()
    return Plan((*(Cancel(job.job_id) for job in queue if job.waits), Submit(None)))


def earlier(chain: Chain, queue: Sequence[QueuedJob]) -> dict[str, list[str]]:
    """What the record of a new chain says of the jobs of those before it: `former` and `behind`.

    Args:
        chain: the one before.
    """
    going = [job.job_id for job in queue if job.runs and chain.over is None and job.job_id not in chain.former]
    return {"former": [job.job_id for job in queue if job.job_id not in going], "behind": going}


def on_start(chain: Chain, own: str, queue: Sequence[QueuedJob], max_jobs: int) -> Plan:
    """A job has begun: exactly one must wait behind it, or none.

    Args:
        chain: with this job.
        queue: jobs of the chain that wait or run.
    """
    waiting = [job.job_id for job in queue if job.waits and job.job_id != own]
    why = ""
    if chain.over is not None:
        why = "the chain is over"
    elif len(chain.jobs) >= max_jobs:
        why = f"this is job {len(chain.jobs)} of the chain, and slurm.max_jobs is {max_jobs}"
    elif chain.stuck:
        why = f"the last {STUCK} jobs made no progress, and this one begins at step {chain.steps[-1]} as well"
    if why:
        return Plan(tuple(Cancel(job) for job in waiting), why)
    if not waiting:
        return Plan((Submit(own),))
    return Plan(tuple(Cancel(job) for job in waiting[1:]))


def on_end(chain: Chain, own: str, queue: Sequence[QueuedJob]) -> Plan:
    """A job ends: what waits behind it goes on, or is not needed.

    Args:
        chain: with this end.
    """
    if chain.over is None:
        return Plan()
    return Plan(tuple(Cancel(job.job_id) for job in queue if job.waits and job.job_id != own))
