"""The clock: unix seconds that never jump, for whatever is measured in them.

Somebody may set the clock of a machine: by hand, by NTP, after a virtual machine was moved. Who then compares two times takes the
jump for silence, and nodes that are well for lost. This clock is right when a driver starts, and from then on goes as the monotonic
one does. Processes that a driver starts on its machine go by the same, so that times which one writes down and another one reads
can be compared.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path

_VARIABLE = "RESILIENT_CLOCK"  # the boot that it holds for, and what unix seconds were when the monotonic clock was at zero
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def _begin() -> tuple[str, float]:
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    known, _, zero = os.environ.get(_VARIABLE, "").partition(" ")
    return boot, float(zero) if zero and known == boot else time.time() - time.monotonic()


_BOOT_ID, _ZERO = _begin()


def environment() -> Mapping[str, str]:
    """Variables for processes that are to go by this clock; on another machine they go by one of their own."""
    return {_VARIABLE: f"{_BOOT_ID} {_ZERO!r}"}


def zero() -> float:
    """Unix seconds at which the machine's monotonic clock was at zero."""
    return _ZERO


def now() -> float:
    """Unix seconds."""
    return _ZERO + time.monotonic()


def here(t: float) -> float:
    """What a time on the machine's own clock, as that is set now, is on this one; both in unix seconds."""
    return t - time.time() + now()
