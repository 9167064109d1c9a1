"""What a campaign reports while it is broken: its ledger and its metrics, read as they grow.

Owns what is known of the run at this moment; decides nothing.
"""

import math
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from chaos.orchestration.tail import Tail
from chaos.verdict.matching import DEGRADED, GOES_ON
from resilient import entries, ledger
from resilient.driver.lease import holder

Event = Mapping[str, Any]


SUCCESSOR_S = 60.0  # for the next job of a chain
ASK_S = 1.0
STEPS_KEPT = 16


class Watch:
    """Times in unix seconds."""

    def __init__(self, run_dir: Path) -> None:
        self._events, self._metrics = Tail(run_dir / ledger.EVENTS), Tail(run_dir / ledger.METRICS)
        self.step = 0  # that was finished last
        self.furthest = 0  # the highest of all, though it may have been lost since
        self.furthest_t = 0.0
        self._finished: deque[float] = deque(maxlen=STEPS_KEPT)  # when the last ones were
        self.steps: list[tuple[float, float]] = []  # seconds and loss of each, as they came
        self.faults: list[Event] = []
        self.generation: Event | None = None  # how the newest one started
        self.driver_host = ""
        self.target_step: int | None = None  # of the newest job; None: it has none
        self.started_t = 0.0  # when the newest job was
        self._open: dict[str, float] = {}
        self._degraded: set[str] = set()  # faults of tiers that are not well again
        self._well_t = 0.0  # when one of them was
        self._exit_code: int | None = None
        self._free_t: float | None = None  # since when nobody runs it
        self._asked_t = 0.0

    def poll(self) -> Sequence[Event]:
        """Read on; the events that are new."""
        events = list(entries.events(self._events.read()))
        for event in events:
            match event["event"]:
                case "run_started":
                    self.driver_host, self.target_step = event["host"], event["target_step"]
                    self.started_t, self._exit_code = event["t"], None
                    self._open.clear()  # what a driver that was killed had open, nobody closes
                    self._degraded.clear()
                case "generation_started" if "members" in event:
                    self.generation = event
                case "run_finished":
                    self._exit_code = event["exit_code"]
                case "fault":
                    self.faults.append(event)
                case "action" if event["name"] in ("grow", "departed"):
                    pass  # of nodes that are back, or are of the job no more, after the recovery
                case "action" if event["name"] in DEGRADED:
                    self._degraded.add(event["fault_id"])
                case "action" if event["name"] not in GOES_ON:
                    self._open[event["fault_id"]] = event["t"]
                case "recovered":
                    self._open.pop(event["fault_id"], None)
                    if event["fault_id"] in self._degraded:
                        self._degraded.discard(event["fault_id"])
                        self._well_t = event["t"]
        for line in entries.metrics(self._metrics.read()):
            if "step" not in line:
                continue  # what a script reports between steps
            if line["step"] > self.furthest:
                self.furthest, self.furthest_t = line["step"], line["t"]
            if self._finished and line["t"] <= self._finished[-1]:
                continue  # what a node had not reported when it was lost comes later
            self.step = line["step"]
            self._finished.append(line["t"])
            loss = line.get("loss", 0.0)
            if loss is None:  # it was not finite, or nothing was computed
                loss = 0.0 if line.get("skipped") == "rolled_back" else math.nan
            self.steps.append((line.get("step_s") or 0.0, loss))
        return events

    def reported_since(self, t: float, kinds: frozenset[str]) -> bool:
        """Whether a fault of one of these kinds was reported since then."""
        return any(fault["t"] >= t and fault["kind"] in kinds for fault in self.faults)

    def goes_on_since(self, t: float, steps: int = 1) -> bool:
        """Whether so many steps were finished since then, and no rank is being started anew."""
        return sum(finished_t > t for finished_t in self._finished) >= steps and not self._open

    @property
    def tiers_are_well(self) -> bool:
        """Whether no tier is being tried again."""
        return not self._degraded

    def tiers_stay_well(self, steps: int) -> bool:
        """Whether so many steps were finished since no tier is tried again: what is wrong with many files is told of one by one."""
        return self.tiers_are_well and self.goes_on_since(self._well_t, steps)

    def ended(self, run_dir: Path) -> int | None:
        """The exit code of a run that is over, and that nobody has started again for a while; None while it is not.

        Of one that could not tell its own, that of a killed process.
        """
        if time.monotonic() < self._asked_t + ASK_S:
            return None
        self._asked_t = time.monotonic()
        if holder(run_dir) is not None:
            self._free_t = None
            return None
        self._free_t = self._free_t or time.monotonic()
        if time.monotonic() < self._free_t + SUCCESSOR_S:
            return None
        return -signal.SIGKILL if self._exit_code is None else self._exit_code

    def steady(self, count: int) -> tuple[float, bool] | None:
        """Seconds of a step, and whether all losses are finite, once so many were finished; None before."""
        if len(self.steps) < count:
            return None
        seen = self.steps[-count:]
        return median(seconds for seconds, _ in seen), all(math.isfinite(loss) for _, loss in seen)
