"""Which fault of the ledger reports which injection.

Pure. A fault is reported by kind, culprit and time, and so it is matched: to the newest injection that it fits. What fits none is a
false alarm, or an injection that was taken for something else.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos.fault import Expectation
from chaos.injectors.context import Target
from chaos.verdict.record import Injection
from resilient import account

Line = Mapping[str, Any]

EARLY_S = 0.5  # clocks of nodes differ, and the time of an injection is taken before it is made
TOGETHER_S = 2.0  # two that strike within so long of each other may be seen as one
LATE_S = 180.0  # after the end of an injection, until it is reported: a hang is watched for a while, and so is a straggler
COMES_BACK = ("storage", "straggler")  # kinds that may be reported again and again, with recoveries between
DEGRADED = ("degrade", "degrade_tier")  # of the run directory, of a tier: it is tried again
GOES_ON = ("wait", *DEGRADED, *account.GOES_ON)  # actions that start no rank anew


@dataclass
class ReportedFault:
    """A fault as the ledger reports it, with what was done about it. Times in unix seconds.

    Attributes:
        job: which one of the campaign, from 0: its number of times.
        since_t: when it is said to have happened.
        recovered_t: None as long as it is not.
    """

    id: str
    job: int
    generation: int
    kind: str
    t: float
    since_t: float
    ranks: Sequence[int]
    nodes: Sequence[int]
    detail: str = ""
    actions: list[str] = field(default_factory=list)
    recovered_t: float | None = None
    downtime_s: float = 0.0
    lost_steps: int = 0

    def names(self, target: Target) -> bool:
        """Whether it blames this target."""
        if target.rank is not None and self.ranks:
            return target.rank in self.ranks
        return target.node is not None and target.node in self.nodes

    @property
    def until_t(self) -> float:
        """When it was recovered from; without end as long as it is not."""
        return float("inf") if self.recovered_t is None else self.recovered_t

    @property
    def stops_ranks(self) -> bool:
        """Whether ranks were stopped because of it."""
        return any(name not in GOES_ON for name in self.actions)

    @property
    def degraded(self) -> tuple[str, Sequence[int]] | None:
        """What is tried again because of it, a tier or the run directory, and on which nodes; None if nothing is."""
        return (self.detail.partition(":")[0], self.nodes) if any(name in DEGRADED for name in self.actions) else None


@dataclass(frozen=True)
class Stoppage:
    """A time in which ranks were stopped or started because of an injection. Unix seconds."""

    injection: str
    since_t: float
    until_t: float


@dataclass(frozen=True)
class Matches:
    """What belongs to what.

    Attributes:
        reported: by id of injection, in order of time.
        misread: the same, of faults of a kind that was not expected of it.
        covered: injections that nobody had to report, since another one, named here, was just being recovered from.
        strays: faults that nobody injected.
    """

    reported: Mapping[str, Sequence[ReportedFault]]
    misread: Mapping[str, Sequence[ReportedFault]]
    covered: Mapping[str, str]
    strays: Sequence[ReportedFault]


def faults(events: Iterable[Line]) -> list[ReportedFault]:
    """All faults of a ledger, in order. Ids are not enough: a stall that is waited for may share its id with what follows."""
    found: list[ReportedFault] = []
    job = -1
    for line in events:
        match line["event"]:
            case "run_started":
                job += 1
            case "fault":
                since_t = line["t"] - line.get("detect_s", 0.0)
                who = line.get("ranks", []), line.get("nodes", [])
                reported = ReportedFault(line["fault_id"], job, line["generation"], line["kind"], line["t"], since_t, *who)
                reported.detail = line.get("detail", "")
                found.append(reported)
            case "action":
                for reported in [each for each in found if each.job == job and each.id == line["fault_id"]][-1:]:
                    reported.actions.append(line["name"])
            case "recovered":
                for reported in found:
                    if (reported.job, reported.id, reported.recovered_t) == (job, line["fault_id"], None):
                        reported.recovered_t = line["t"]
                        reported.downtime_s, reported.lost_steps = line["downtime_s"], line["lost_steps"]
    return found


def match(
    injections: Sequence[Injection],
    expected: Mapping[str, Expectation],
    reported: Sequence[ReportedFault],
    stoppages: Sequence[Stoppage] = (),
) -> Matches:
    """Match all faults.

    Args:
        expected: by id of injection.
        stoppages: that no fault reports: ends of jobs.
    """
    done = [each for each in injections if each.t is not None]
    found: dict[str, list[ReportedFault]] = {each.id: [] for each in done}
    misread: dict[str, list[ReportedFault]] = {each.id: [] for each in done}
    strays = []
    left = []
    for fault in sorted(reported, key=lambda each: each.t):
        fits = [each for each in done if _of_a_kind(expected[each.id], fault) and _open(each, found[each.id], fault)]
        if fits:
            found[_best(fits, fault, expected).id].append(fault)
        else:
            left.append(fault)
    because = [Stoppage(name, each.since_t, each.until_t) for name, mine in found.items() for each in mine if each.stops_ranks]
    covered = {name: other for name, other in _covered(done, expected, [*because, *stoppages]).items() if not found[name]}
    for fault in left:
        fits = [each for each in done if not found[each.id] and each.id not in covered and _open(each, misread[each.id], fault)]
        if fits:
            misread[_best(fits, fault, expected).id].append(fault)
        else:
            strays.append(fault)
    return Matches(found, misread, covered, strays)


def _of_a_kind(expected: Expectation, fault: ReportedFault) -> bool:
    if expected.kinds:
        return fault.kind in expected.kinds
    return bool(fault.actions) and expected.actions.issuperset(fault.actions)


def _best(fits: Sequence[Injection], fault: ReportedFault, expected: Mapping[str, Expectation]) -> Injection:
    def fit(each: Injection) -> tuple[bool, bool, bool, float]:
        t = each.t or 0.0
        return fault.names(each.target), fault.kind in expected[each.id].kinds, t <= fault.t, t

    return max(fits, key=fit)


def _open(injection: Injection, so_far: Sequence[ReportedFault], fault: ReportedFault) -> bool:
    """Whether a fault may still come of an injection. One that was recovered from is over, unless it lasts, or is of a kind that
    comes back."""
    assert injection.t is not None
    if fault.t < injection.t - EARLY_S:
        return False
    end_t = max(injection.t, injection.undone_t or injection.t)
    if fault.kind == "storage":  # what is wrong there may be met whenever it is next read or written
        return True
    if so_far and fault.kind not in COMES_BACK:
        return fault.since_t <= max(end_t, *(each.until_t for each in so_far))
    return fault.since_t <= end_t + LATE_S


def _covered(done: Sequence[Injection], expected: Mapping[str, Expectation], stoppages: Iterable[Stoppage]) -> dict[str, str]:
    """Those that struck while ranks were stopped or started because of another one, or together with it."""
    begun = {each.id: each.t for each in done if each.t is not None}
    covered: dict[str, str] = {}
    for stop in stoppages:
        for name, t in begun.items():
            together = abs(t - begun[stop.injection]) <= TOGETHER_S
            if name != stop.injection and expected[name].kinds and (together or stop.since_t - EARLY_S <= t <= stop.until_t):
                covered.setdefault(name, stop.injection)
    return covered
