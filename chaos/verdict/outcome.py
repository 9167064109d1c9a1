"""What became of one injection, and whether that is what the ladder says. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from chaos.injectors.context import Target
from chaos.verdict.matching import Line, Matches, ReportedFault, Stoppage
from chaos.verdict.observation import JobRun, Observation
from chaos.verdict.record import Injection

OF_EACH = {
    "injected": "every fault was really injected",
    "recovered": "the run went on after each",
    "reported": "each was reported as what it was",
    "culprit": "the right rank or node was blamed",
    "action": "what was done about it is what the ladder says, and no more",
    "lost steps": "no more was computed again than what followed the newest snapshot",
}
"""Invariants of each injection."""

HELD = ("snapshot", "committed")  # events of what a run goes on from while its nodes are there
SAFE = ("replicated", "committed")  # and of what outlives a node


@dataclass(frozen=True)
class Outcome:
    """What became of one injection.

    Attributes:
        t: unix seconds; None if it was not injected.
        faults: ids of those that reported it, in the ledger.
        kinds: of them.
        detection_s: from the injection to the first of them; None if none did.
        downtime_s: from the injection, or the last step that was still finished after it, until steps were finished again.
        lost_steps: that were computed again.
        taken, expected: actions of the recovery ladder.
        covered_by: id of the injection that was being recovered from at that moment, so that nobody had to report this one.
        wrong: name of the invariant that does not hold, and why; empty if all is well.
    """

    id: str
    fault: str
    target: Target
    t: float | None
    recovered: bool = False
    faults: Sequence[str] = ()
    kinds: Sequence[str] = ()
    detection_s: float | None = None
    downtime_s: float | None = None
    lost_steps: int | None = None
    culprit: Literal["right", "wrong", "not asked"] = "not asked"
    taken: Sequence[str] = ()
    expected: Sequence[str] = ()
    covered_by: str = ""
    wrong: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.wrong


def outcome(seen: Observation, injection: Injection, matches: Matches) -> Outcome:
    """What became of an injection."""
    expected = seen.expected[injection.id]
    actions = sorted(expected.actions)
    if injection.t is None or injection.failed:
        why = injection.failed or "nobody knows when"
        return Outcome(injection.id, injection.fault, injection.target, injection.t, expected=actions, wrong={"injected": why})
    mine, misread = matches.reported[injection.id], matches.misread[injection.id]
    all_reported = sorted([*mine, *misread], key=lambda each: each.t)
    covered_by = matches.covered.get(injection.id, "")
    ended = _ended(seen, injection)
    wrong = {}
    if not injection.evidence:
        wrong["injected"] = "there is no evidence that it happened"
    not_over = [each for each in all_reported if not _is_over(seen, each, all_reported)]
    recovered = not not_over and _went_on(seen, injection, all_reported)
    if not recovered:
        still = ", ".join(f"{each.kind} ({each.id})" for each in not_over)
        wrong["recovered"] = f"{still} was not recovered from" if still else "no step beyond it was computed"
    if misread:
        wrong["reported"] = f"reported as {', '.join(_kinds(misread))} instead of {_or(expected.kinds)}"
    elif expected.kinds and not mine and not expected.may_pass and not covered_by:
        wrong["reported"] = f"nobody reported it; expected {_or(expected.kinds)}"
    culprit: Literal["right", "wrong", "not asked"] = "not asked"
    if expected.culprit and mine:
        culprit = "right" if all(each.names(injection.target) for each in mine) else "wrong"
        if culprit == "wrong":
            blamed = "; ".join(f"{each.kind} blames {_who(each)}" for each in mine if not each.names(injection.target))
            wrong["culprit"] = f"{blamed}, and it was {_target(injection.target)}"
    taken = list(dict.fromkeys(name for each in all_reported for name in each.actions))
    allowed = {*expected.actions, *(["finish_drain"] if any(_draining(seen.events, each) for each in mine) else [])}
    other = [name for name in taken if name not in allowed]
    if other:
        wrong["action"] = f"{', '.join(other)} instead of {_or(expected.actions)}"
    lost, beyond = _lost(seen, injection, all_reported, ended)
    if expected.lost_steps is not None and beyond > expected.lost_steps:
        wrong["lost steps"] = f"the run went on {beyond} steps before the newest snapshot; {expected.lost_steps} are allowed"
    return Outcome(
        injection.id,
        injection.fault,
        injection.target,
        injection.t,
        recovered=recovered,
        faults=list(dict.fromkeys(each.id for each in all_reported)),
        kinds=_kinds(all_reported),
        detection_s=max(0.0, all_reported[0].t - injection.t) if all_reported else None,
        downtime_s=_downtime_s(seen, injection, all_reported, ended),
        lost_steps=lost,
        culprit=culprit,
        taken=taken,
        expected=actions,
        covered_by=covered_by,
        wrong=wrong,
    )


def _went_on(seen: Observation, injection: Injection, reported: Sequence[ReportedFault]) -> bool:
    """Whether a step was computed afterwards that had not been before, or the run ended well."""
    assert injection.t is not None
    since_t = max([injection.t, *(each.t for each in reported)])
    before = max((line["step"] for line in seen.metrics if line["t"] <= since_t), default=0)
    on = any(line["t"] > since_t and line["step"] > before for line in seen.metrics)
    return on or (before >= seen.target_step and bool(seen.jobs) and seen.jobs[-1].code == 0)


def _is_over(seen: Observation, fault: ReportedFault, reported: Sequence[ReportedFault]) -> bool:
    """Whether a fault that had ranks stopped, or something tried again, was recovered from, or ended with its job.

    Of a tier that was told of twice, one recovery is told, under either id.
    """
    if fault.recovered_t is not None or _job_after(seen.events, fault.t):
        return True
    same = [each for each in reported if each.degraded is not None and each.degraded == fault.degraded]
    well = any(each.recovered_t is not None and each.recovered_t >= fault.t for each in same)
    return not fault.stops_ranks and (fault.degraded is None or well)


def _job_after(events: Sequence[Line], t: float) -> bool:
    return any(line["event"] == "run_started" and line["t"] > t for line in events)


def _ended(seen: Observation, injection: Injection) -> JobRun | None:
    """The job that ended before its time because of it."""
    for job in seen.jobs:
        if job.code and may_end(seen, injection, job):
            return job
    return None


def may_end(seen: Observation, injection: Injection, job: JobRun) -> bool:
    """Whether a job may have ended with its code because of an injection."""
    if injection.t is None or job.code not in seen.expected[injection.id].exits:
        return False
    return injection.t <= job.ended_t and max(injection.t, injection.undone_t or 0.0) >= job.began_t


def stoppages(seen: Observation) -> Iterator[Stoppage]:
    """Times from an injection that ended a job until the next one computes."""
    for injection in seen.injections:
        job = _ended(seen, injection)
        if job is not None and injection.t is not None:
            ended_t = job.ended_t
            until_t = min((line["t"] for line in seen.metrics if line["t"] > ended_t), default=math.inf)
            yield Stoppage(injection.id, injection.t, until_t)


def _draining(events: Sequence[Line], reported: ReportedFault) -> bool:
    """Whether the job was being stopped on request when a fault was reported."""
    drains = (line for line in events if line["event"] == "drain")
    return any(line["t"] - line["took_s"] - 0.001 <= reported.t <= line["t"] for line in drains)


def _downtime_s(seen: Observation, injection: Injection, reported: Sequence[ReportedFault], ended: JobRun | None) -> float | None:
    """Each second once, however many faults reported it. The ledger's downtimes begin when a fault showed, which may be later."""
    assert injection.t is not None
    if ended is not None:
        return _gap_s(seen, injection, ended)
    over = [(each, each.recovered_t) for each in reported if each.recovered_t is not None]
    if reported and not over:
        return None
    down_s, until_t = 0.0, injection.t
    for each, recovered_t in over:
        if each.downtime_s > 0:
            last_t = max((line["t"] for line in seen.metrics if line["t"] <= each.t), default=until_t)
            down_s += max(0.0, recovered_t - max(until_t, last_t))
            until_t = max(until_t, recovered_t)
    return down_s


def _gap_s(seen: Observation, injection: Injection, ended: JobRun) -> float | None:
    """From the last step of a job that ended before its time to the first of the next one; None if there is none."""
    assert injection.t is not None
    next_t = min((line["t"] for line in seen.metrics if line["t"] > ended.ended_t), default=None)
    last_t = max((line["t"] for line in seen.metrics if line["t"] <= ended.ended_t), default=injection.t)
    return None if next_t is None else float(next_t - max(last_t, injection.t))


def between_jobs_s(seen: Observation) -> float:
    """The time after all jobs that injections have ended, each once."""
    gaps: dict[float, float] = {}
    for injection in seen.injections:
        ended = _ended(seen, injection) if injection.t is not None and not injection.failed else None
        if ended is not None:
            gaps[ended.ended_t] = max(gaps.get(ended.ended_t, 0.0), _gap_s(seen, injection, ended) or 0.0)
    return sum(gaps.values())


def _lost(seen: Observation, injection: Injection, reported: Sequence[ReportedFault], ended: JobRun | None) -> tuple[int, int]:
    """Steps that were computed again, and by how many the run went on from before the newest snapshot that there was.

    Without a node, the newest one that its buddy had a copy of: what is copied behind the training's back is some steps late.
    """
    stops = [(each.since_t, each.t, each.nodes) for each in reported if each.stops_ranks]
    lost = sum({each.recovered_t: each.lost_steps for each in reported}.values())
    if ended is not None and injection.t is not None:
        stops.append((injection.t, ended.ended_t, ()))
    beyond = 0
    for since_t, until_t, nodes in stops:
        later = [line for line in seen.events if line["event"] == "generation_started" and line["t"] >= until_t]
        started = [line for line in later if line["resumed_step"] is not None]  # None: it ended before it knew
        if not started:
            continue
        resumed = int(started[0]["resumed_step"])
        kept = HELD if set(nodes) <= set(started[0]["members"]) else SAFE
        # What older generations had beyond the start of this one was lost before, and judged there.
        before = [line for line in seen.events if line["event"] == "generation_started" and line["t"] <= since_t]
        known = [line for line in before if line["resumed_step"] is not None]
        since, start = (known[-1]["generation"], int(known[-1]["resumed_step"])) if known else (0, 0)
        if ended is not None:
            done = [line for line in seen.metrics if line["t"] <= until_t and line["generation"] >= since]
            lost = max((int(line["step"]) for line in done), default=start) - resumed
        held = [line for line in seen.events if line["event"] in kept and line["t"] <= since_t]
        mine = [int(line["step"]) for line in held if line["generation"] >= since and not seen.invalidated(line)]
        least = start if kept is HELD else resumed  # what a generation began with need not have a copy yet
        beyond = max(beyond, max(mine, default=least) - resumed)
    return max(0, lost), beyond


def _kinds(reported: Sequence[ReportedFault]) -> list[str]:
    return list(dict.fromkeys(each.kind for each in reported))


def _or(words: frozenset[str]) -> str:
    return " or ".join(sorted(words)) or "nothing"


def _who(reported: ReportedFault) -> str:
    ranks, nodes = ", ".join(map(str, reported.ranks)), ", ".join(map(str, reported.nodes))
    return f"rank {ranks}" if ranks else f"node {nodes}" if nodes else "nobody"


def _target(target: Target) -> str:
    return f"rank {target.rank}" if target.rank is not None else f"node {target.node}"
