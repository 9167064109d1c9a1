"""Energy of this machine, from the counters of its GPUs (NVML) and of its processors (RAPL, in /sys/class/powercap).

Counters are read twice a second by a thread; the energy of a stretch of time lies between two readings. What is not there is not
measured, and nothing is estimated.
"""

import importlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from resilient import clock

POWERCAP = Path("/sys/class/powercap")
EVERY_S = 0.5

Read = Callable[[], float]  # joules, since some moment


@dataclass(frozen=True)
class Counter:
    """A counter of energy. Args: wraps_at: joules at which it begins anew; None: it does not."""

    source: str
    read: Read
    wraps_at: float | None = None


def counters(powercap: Path = POWERCAP) -> list[Counter]:
    """Those of this machine that can be read."""
    return [*_rapl(powercap), *_nvml()]


def _rapl(powercap: Path) -> list[Counter]:
    """Whole packages, `intel-rapl:0` but not the domains inside of them."""
    found = []
    for zone in sorted(powercap.glob("*-rapl:*")):
        if zone.name.count(":") != 1:
            continue
        with suppress(OSError, ValueError):
            wraps_at = int((zone / "max_energy_range_uj").read_text()) / 1e6
            int((zone / "energy_uj").read_text())  # root's alone on many machines
            found.append(Counter("RAPL", lambda zone=zone: int((zone / "energy_uj").read_text()) / 1e6, wraps_at))  # type: ignore[misc]
    return found


def _nvml() -> list[Counter]:
    """Each GPU that this process sees."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except Exception:  # noqa: BLE001 - no package, no driver, or no GPU
        return []
    found = []
    for handle in handles:
        with suppress(Exception):  # before Volta there is no such counter
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            found.append(
                Counter("NVML", lambda handle=handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)  # type: ignore[misc]
            )
    return found


class Meter:
    """Reads counters for as long as it is entered. A counter that fails is left out from then on."""

    def __init__(self, found: Sequence[Counter] | None = None) -> None:
        self._counters = list(counters() if found is None else found)
        self._last: list[float | None] = [None] * len(self._counters)
        self._times: list[float] = []
        self._joules: list[float] = []  # of all counters, since the first reading
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="energy", daemon=True)

    @property
    def source(self) -> str:
        """What it measures by; "" for nothing."""
        return " and ".join(sorted({each.source for each in self._counters}))

    def __enter__(self) -> "Meter":
        if self._counters:
            self.sample(clock.now())
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            self.sample(clock.now())

    def sample(self, t: float) -> None:
        """Read all counters. Args: t: now, in unix seconds."""
        more = 0.0
        for number, counter in enumerate(self._counters):
            try:
                joules = counter.read()
            except Exception:  # noqa: BLE001 - of a driver
                continue
            before, self._last[number] = self._last[number], joules
            if before is not None:
                more += joules - before + (counter.wraps_at or 0.0) * (joules < before)
        self._joules.append((self._joules[-1] if self._joules else 0.0) + more)
        self._times.append(t)

    def joules(self, began_t: float, ended_t: float) -> float | None:
        """Between two moments; None where nothing measures, or not all that time."""
        if not self._counters or len(self._times) < 2 or began_t < self._times[0] or ended_t > self._times[-1]:
            return None
        return self._at(ended_t) - self._at(began_t)

    def _at(self, t: float) -> float:
        after = min(max(bisect_right(self._times, t), 1), len(self._times) - 1)
        t0, t1 = self._times[after - 1], self._times[after]
        share = (t - t0) / (t1 - t0) if t1 > t0 else 1.0
        return self._joules[after - 1] + share * (self._joules[after] - self._joules[after - 1])
