"""The verdict: whether a campaign came through an experiment as it should. A pure function of what was observed.

Owns the invariants. It reads no file and no clock; `chaos.verdict.gathering` does.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from chaos.verdict.matching import Line, Matches, faults, match
from chaos.verdict.observation import Checked, JobRun, Observation, Weights
from chaos.verdict.outcome import OF_EACH, Outcome, between_jobs_s, may_end, outcome, stoppages
from resilient.account import GOES_ON, PLANNED
from resilient.downtime import downtime

ACCOUNT_ERROR = 0.005  # share of the rank seconds that the account may be off


@dataclass(frozen=True)
class Check:
    """One invariant. `detail` says what was found, in a sentence without a name of the check."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Verdict:
    """Numbers, and what they come to.

    Attributes:
        downtime_s: of all incidents and of the jobs that faults have ended, each second once.
        left_out: what was not to be injected after all, with the reason.
    """

    experiment: str
    seed: int
    checks: Sequence[Check]
    outcomes: Sequence[Outcome]
    goodput: float | None
    wall_s: float
    steps: int
    generations: int
    downtime_s: float
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def broken(self) -> list[str]:
        """Names of the invariants that do not hold."""
        return [check.name for check in self.checks if not check.ok]


OF_THE_RUN = {
    "reached": "the last job ended with 0 at the target step",
    "exits": "jobs ended early only where a fault may end them",
    "false alarms": "no fault was reported that nobody injected, and no checkpoint refused that nobody damaged",
    "losses": "every loss of every generation is that of the reference run without faults",
    "weights": "the final weights are those of the reference run without faults",
    "checkpoints": "each checkpoint is sound, and the newest one is of the target step",
    "processes": "no process outlived the run",
    "files": "nothing is left in RAM or in temporary places",
    "machine": "links, queues, rules, mounts and the range of ports are as they were",
    "account": "the parts of the account sum to wall time × ranks within 0.5 %",
    "goodput": "the share of productive time is known",
}
"""Invariants of the whole."""


def judge(seen: Observation) -> Verdict:
    """The verdict on what was seen."""
    reported = faults(seen.events)
    matches = match(seen.injections, seen.expected, reported, list(stoppages(seen)))
    outcomes = [outcome(seen, injection, matches) for injection in seen.injections]
    checks = [*_of_each(outcomes), *_of_the_run(seen, matches)]
    return Verdict(
        seen.experiment,
        seen.seed,
        checks,
        outcomes,
        goodput=seen.account.goodput,
        wall_s=seen.wall_s or seen.account.wall_s,
        steps=_last_step(seen),
        generations=sum(line["event"] == "generation_started" for line in seen.events),
        downtime_s=downtime(seen.events).down_s + between_jobs_s(seen),
        left_out=seen.left_out,
    )


# -- of each injection -------------------------------------------------------------------------------------------------


def _of_each(outcomes: Sequence[Outcome]) -> Iterator[Check]:
    for name, what in OF_EACH.items():
        wrong = [f"{each.id} ({each.fault}): {each.wrong[name]}" for each in outcomes if name in each.wrong]
        if name == "injected" and not outcomes:
            wrong = ["nothing was injected"]
        yield Check(name, not wrong, "; ".join(wrong) or what)


# -- of the whole ------------------------------------------------------------------------------------------------------


def _of_the_run(seen: Observation, matches: Matches) -> Iterator[Check]:
    found = {
        "reached": _reached(seen),
        "exits": _exits(seen),
        "false alarms": _false_alarms(seen, matches),
        "losses": _losses(seen),
        "weights": _weights(seen),
        "checkpoints": _checkpoints(seen),
        "processes": list(seen.left.get("processes", ())),
        "files": _files(seen),
        "machine": list(seen.left.get("machine", ())),
        "account": _account(seen),
        "goodput": [] if seen.account.goodput is not None else ["no rank second was accounted for"],
    }
    without = {"losses": seen.reference is None, "weights": seen.weights is None}
    for name, wrong in found.items():
        what = "there was nothing to compare with" if without.get(name) else OF_THE_RUN[name]
        yield Check(name, not wrong, _some(wrong) or what)


def _false_alarms(seen: Observation, matches: Matches) -> list[str]:
    """Faults that nobody injected, and checkpoints that were refused although nobody had damaged any."""
    damaged_t = min(
        (each.t for each in seen.injections if each.t is not None and seen.expected[each.id].rejected), default=math.inf
    )
    refused = [line for line in seen.events if line["event"] == "checkpoint_rejected" and line["t"] < damaged_t]
    refused = [line for line in refused if not line["reason"].startswith("rolled back")]
    return [
        *(f"{each.kind} ({each.detail}) in generation {each.generation}" for each in matches.strays),
        *(f"the checkpoint of step {line['step']} was refused: {line['reason']}" for line in refused),
    ]


def _files(seen: Observation) -> list[str]:
    """What is left on hosts that the run could reach to its end. A host that it had lost keeps what it holds, for whoever asks."""
    hosts: dict[int, str] = {}
    lost: set[str] = set()
    for line in seen.events:
        if line["event"] == "generation_started":
            hosts.update(zip(line["members"], line["nodes"], strict=True))
            lost -= set(line["nodes"])
        elif line["event"] == "fault" and line["kind"] == "node_lost":
            lost |= {hosts[node] for node in line["nodes"] if node in hosts}
    return [each for each in seen.left.get("files", ()) if not any(each.startswith(f"{host}: ") for host in lost)]


def _last_step(seen: Observation) -> int:
    return max((int(line["step"]) for line in seen.metrics), default=0)


def _reached(seen: Observation) -> list[str]:
    if not seen.jobs:
        return ["no job ran"]
    last = _last_step(seen)
    wrong = [f"the last job ended with {seen.jobs[-1].code}"] if seen.jobs[-1].code else []
    return wrong + ([f"step {last} of {seen.target_step} was the last one"] if last != seen.target_step else [])


def _exits(seen: Observation) -> list[str]:
    early = [(number, job) for number, job in enumerate(seen.jobs, 1) if job.code and number < len(seen.jobs)]
    return [
        f"job {number} ended with {job.code}, and no fault was to end it so"
        for number, job in early
        if not any(may_end(seen, injection, job) for injection in seen.injections)
    ]


def _losses(seen: Observation) -> list[str]:
    """Steps whose loss is not that of the reference run, and steps that nobody computed."""
    if seen.reference is None:
        return []
    theirs = {int(line["step"]): line.get("loss") for line in seen.reference}
    inexact_t = _inexact_t(seen)
    wrong, done = [], {step for back in seen.roll_backs for first, last in back.skip for step in range(first, last + 1)}
    for line in seen.metrics:
        if seen.invalidated(line):
            continue
        step, loss = int(line["step"]), line.get("loss")
        done.add(step)
        tolerance = seen.tolerance if line["t"] >= inexact_t else 0.0
        if step not in theirs or not _close(loss, theirs[step], tolerance):
            wrong.append(
                f"step {step} of generation {line['generation']}: {loss!r}, and that of the reference run is {theirs.get(step)!r}"
            )
    missing = sorted(set(theirs) - done)
    return wrong + ([f"step {missing[0]} and {len(missing) - 1} more have no loss"] if missing else [])


def _close(ours: object, theirs: object, tolerance: float) -> bool:
    if isinstance(ours, float | int) and isinstance(theirs, float | int) and tolerance:
        return math.isclose(ours, theirs, rel_tol=tolerance)
    return repr(ours) == repr(theirs)


def _inexact_t(seen: Observation) -> float:
    """From when on numbers may differ a little: the first fault that is not exact, or the first change of the number of ranks."""
    times = [each.t for each in seen.injections if each.t is not None and not seen.expected[each.id].exact]
    worlds = [line for line in seen.events if line["event"] == "generation_started"]
    times += [after["t"] for before, after in pairwise(worlds) if before["world_size"] != after["world_size"]]
    return min(times, default=math.inf)


def _weights(seen: Observation) -> list[str]:
    if seen.weights is None or not seen.weights.differing:
        return []
    tolerance = seen.tolerance if _inexact_t(seen) < math.inf else 0.0
    if tolerance and seen.weights.largest <= tolerance:
        return []
    return [f"{name} differs (by {seen.weights.largest:.3g} at most of all)" for name in seen.weights.differing]


def _checkpoints(seen: Observation) -> list[str]:
    """Damaged ones, but for those that an injection has spoilt and that were not the last word."""
    spoilt = json.dumps([dict(each.evidence) for each in seen.injections], default=str)
    newest = max((each.step for each in seen.checkpoints), default=0)
    wrong = [
        f"{each.path}: {each.damage}"
        for each in seen.checkpoints
        if each.damage and (each.step == newest or f"step-{each.step:08}" not in spoilt)
    ]
    if newest != seen.target_step and any(line["event"] == "snapshot" for line in seen.events):
        wrong.append(f"the newest one is of step {newest}, and not of step {seen.target_step}")
    return wrong


def _account(seen: Observation) -> list[str]:
    """Whether the account is the integral of ranks over the time of the jobs, as the ledger has them."""
    found, wanted = seen.account.rank_s, _rank_s(seen.events, seen.metrics)
    wrong = [f"{name} is {seconds:.2f} s" for name, seconds in seen.account.seconds.items() if seconds < 0]
    if abs(found - wanted) > ACCOUNT_ERROR * wanted:
        wrong.append(f"the parts sum to {found:.2f} rank seconds, and there were {wanted:.2f}")
    if seen.wall_s and seen.account.wall_s > seen.wall_s * (1 + ACCOUNT_ERROR):
        wrong.append(f"the account covers {seen.account.wall_s:.2f} s, and the experiment took {seen.wall_s:.2f} s")
    return wrong


def _rank_s(events: Sequence[Line], metrics: Sequence[Line]) -> float:
    """Ranks × time, of each job until it ended; of one that was killed, until it last told of its ranks."""
    starts = [float(line["t"]) for line in events if line["event"] == "run_started"]
    generations = sorted((float(line["t"]), int(line["world_size"])) for line in events if line["event"] == "generation_started")
    stopped = {
        reported.t for reported in faults(events) if not set(reported.actions).issubset(GOES_ON) and reported.kind not in PLANNED
    }
    of_ranks = [line for line in events if line["event"] in ("run_started", "generation_started") or line["t"] in stopped]
    whole, world = 0.0, 1
    for start, following in pairwise([*starts, math.inf]):
        ends = [float(line["t"]) for line in events if line["event"] == "run_finished" and start <= line["t"] < following]
        times = [float(line["t"]) for line in (*metrics, *of_ranks) if start <= line["t"] < following]
        end = ends[0] if ends else max(times)
        cuts = [(t, ranks) for t, ranks in generations if start <= t < following]
        world = cuts[0][1] if cuts else world
        for (t, ranks), (until, _) in pairwise([(start, world), *cuts, (end, 0)]):
            whole, world = whole + max(0.0, until - t) * ranks, ranks
    return whole


def _some(wrong: Sequence[str], most: int = 5) -> str:
    return "; ".join([*wrong[:most], *([f"{len(wrong) - most} more"] if len(wrong) > most else [])])


__all__ = ["OF_EACH", "OF_THE_RUN", "Check", "Checked", "JobRun", "Observation", "Outcome", "Verdict", "Weights", "judge"]
