"""What the lines of a campaign come to: counters and last values, line by line. Pure."""

import copy
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from resilient.account import PARTS, STEP, Accounting, place_of
from resilient.committed import CommittedCheckpoints
from resilient.downtime import Downtime
from resilient.entries import validation_loss
from resilient.ledger import EVENTS, METRICS

STEP_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
SETTLED_S = 60.0  # after which the time line is taken to be known up to a moment

_MOST = 1e300  # whole numbers have no limit
_MOST_STEPS = 1 << 32
_LAST = ("loss", "grad_norm", "lr", "samples", "tokens", "tokens_per_s", "mfu", "memory_bytes")


@dataclass
class Totals:
    """All that was counted up to a line.

    Attributes:
        running: whether a job has started and said of no end; a `TotalsReader` asks whether its driver is there, too.
        last: numbers of the newest line of metrics, by their names there.
        step_counts: steps by duration, one more than there are bounds in `STEP_BUCKETS_S`.
        rank_seconds: seconds × ranks by part of the account.
    """

    name: str = ""
    running: bool = False
    exit_code: int | None = None
    jobs: int = 0
    generation: int = 0
    world_size: int = 0
    target_step: int | None = None
    step: int = 0
    step_t: float | None = None
    last: dict[str, float] = field(default_factory=dict)
    validation_loss: float | None = None
    step_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS_S) + 1))
    step_sum_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    links: Counter[str] = field(default_factory=Counter)
    snapshots: Counter[str] = field(default_factory=Counter)
    committed: Counter[str] = field(default_factory=Counter)
    checkpoints: CommittedCheckpoints = field(default_factory=CommittedCheckpoints)
    rejected: int = 0
    recovered: int = 0
    downtime: Downtime = field(default_factory=Downtime)
    stall_s: float = 0.0
    rank_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    goodput: float | None = None

    def take(self, line: Mapping[str, Any]) -> None:
        """The next line of the ledger or of the metrics, as `resilient.entries` lets it pass."""
        self.generation = max(self.generation, int(line["generation"]))
        if "event" in line:
            self._event(line)
        else:
            self._metrics(line)

    def _metrics(self, line: Mapping[str, Any]) -> None:
        if "step" in line:
            self.step, self.step_t = int(line["step"]), float(line["t"])
        for name in _LAST:
            value = line.get(name)
            if isinstance(value, float) or (type(value) is int and abs(value) < _MOST):
                self.last[name] = float(value)
        step_s = line.get("step_s")
        if step_s is not None:
            steps = steps_of(line)
            self.step_counts[bisect_left(STEP_BUCKETS_S, step_s)] += steps
            self.step_sum_s += step_s * steps

    def _event(self, line: Mapping[str, Any]) -> None:
        self.downtime.take(line)
        self.checkpoints.take(line)
        match line["event"]:
            case "run_started":
                self.name, self.target_step = line["name"], line["target_step"]
                self.running, self.exit_code = True, None
                self.jobs += 1
            case "run_finished":
                self.running, self.exit_code = False, line["exit_code"]
            case "generation_started":
                self.world_size = line["world_size"]
            case "fault":
                self.faults[line["kind"]] += 1
            case "action":
                self.actions[line["name"]] += 1
            case "recovered":
                self.recovered += 1
            case "link":
                self.links[line["state"]] += 1
            case "snapshot":
                self.snapshots[str(line.get("tier", ""))] += line.get("count", 1)
                self.stall_s += line["stall_s"]
            case "committed":
                self.committed[str(line.get("tier", ""))] += 1
            case "checkpoint_rejected":
                self.rejected += 1
            case "validation":
                self.validation_loss = validation_loss(line)


def steps_of(line: Mapping[str, Any]) -> int:
    """How many steps a line of metrics stands for: short ones are told together, by their mean."""
    steps = line.get("steps", 1)
    return steps if isinstance(steps, int) and 0 < steps < _MOST_STEPS else 1


class RollingAccount:
    """The account of a campaign that goes on, at a cost that does not grow with its length.

    Lines come in the order of their files, and those of the two files not in the order of their times: what is newer than
    `SETTLED_S` is kept, and put in order whenever somebody asks.

    Attributes:
        newest_t: time of the newest line of each file.
    """

    def __init__(self) -> None:
        self._settled = Accounting(keep=1)  # of incidents nobody asks
        self._recent: list[Mapping[str, Any]] = []
        self.newest_t = {EVENTS: 0.0, METRICS: 0.0}

    def take(self, line: Mapping[str, Any], file: str) -> None:
        """The next line of a file."""
        self.newest_t[file] = max(self.newest_t[file], line["t"])
        if "event" in line or line.get("step_s") is not None:
            self._recent.append(line)

    def settle(self, *, all_read: bool) -> None:
        """Take for settled what nothing is expected before any more. Args: all_read: both files were read to their ends."""
        self._recent.sort(key=_order)
        until_t = (max if all_read else min)(self.newest_t.values()) - SETTLED_S
        count = next((number for number, line in enumerate(self._recent) if line["t"] >= until_t), len(self._recent))
        for line in self._recent[:count]:
            _go_along(self._settled, line)
        del self._recent[:count]

    def seconds(self, now: float | None) -> tuple[dict[str, float], float | None]:
        """Seconds × ranks by part, and the goodput, once all was read. Args: now: unix seconds, while a job runs."""
        self.settle(all_read=True)
        accounting = copy.deepcopy(self._settled)
        for line in self._recent:
            _go_along(accounting, line)
        account = accounting.closed(now)
        return account.seconds, account.goodput


def _order(line: Mapping[str, Any]) -> tuple[float, int]:
    return float(line["t"]), place_of(line) if "event" in line else STEP


def _go_along(accounting: Accounting, line: Mapping[str, Any]) -> None:
    (accounting.event if "event" in line else accounting.step)(line)
