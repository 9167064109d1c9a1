"""Whether the links in use are up, and how fast they are.

Which those are, and how sysfs tells of them, is known to `resilient.agent.links`; this is one look at them. `judge` is pure.
"""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from resilient.agent.links import LinkWatch, interfaces_of, ports_of
from resilient.health.report import Finding

LOOPBACK = "lo"


@dataclass(frozen=True)
class Wire:
    """One link.

    Attributes:
        trouble: why it carries nothing; empty while it is up.
        gbit_s: speed; None where it is not told.
        port: whether it is an InfiniBand (or RoCE) port.
    """

    name: str
    trouble: str
    gbit_s: float | None
    port: bool


def inspect(
    address: str, environ: Mapping[str, str], *, sys: Path = Path("/sys"), interfaces: Sequence[str] | None = None
) -> list[Wire]:
    """The links in use of the node that others reach at `address`.

    Args:
        interfaces: names of network interfaces, if not those that `address` and `environ` come to.
    """
    names = list(interfaces) if interfaces is not None else interfaces_of(address, environ, sys=sys)
    ports = ports_of(environ, sys=sys)
    watch = LinkWatch(names, ports, sys=sys)
    try:
        links = dict(watch.links)
    finally:
        watch.close()
    wires = [Wire(name, links[name].trouble, _speed(sys / "class/net" / name), port=False) for name in names]
    listed = list(links.items())[len(names) :]
    return wires + [Wire(name, link.trouble, _rate(port), port=True) for (name, link), port in zip(listed, ports, strict=True)]


def _speed(directory: Path) -> float | None:
    """Mbit/s, or -1; the kernel refuses where there is none."""
    with suppress(OSError, ValueError):
        speed = int((directory / "speed").read_text())
        return speed / 1000 if speed > 0 else None
    return None


def _rate(directory: Path) -> float | None:
    """As in `400 Gb/sec (4X NDR)`."""
    with suppress(OSError):
        found = re.match(r"([\d.]+) Gb/sec", (directory / "rate").read_text())
        return float(found[1]) if found is not None else None
    return None


def judge(wires: Sequence[Wire], environ: Mapping[str, str]) -> list[Finding]:
    """What the state of the links means.

    Args:
        environ: in which NCCL_IB_HCA may say which ports must work.
    """
    # With the loopback among them, a run on this machine alone needs none of the others.
    local = any(wire.name == LOOPBACK for wire in wires)
    ports_up = [wire for wire in wires if wire.port and not wire.trouble]
    best = max((wire.gbit_s or 0.0 for wire in ports_up), default=0.0)
    found = []
    for wire in wires:
        check = f"link {wire.name}"
        measured: dict[str, float] = {} if wire.gbit_s is None else {"gbit_s": wire.gbit_s}
        if wire.trouble:
            spare = local if not wire.port else bool(ports_up and not environ.get("NCCL_IB_HCA"))
            rest = "; a run can do without it" if spare else "; see its cable, its switch and `ip link`"
            found.append(Finding(check, "warn" if spare else "fail", f"carries nothing ({wire.trouble}){rest}", measured))
        elif wire.port and wire.gbit_s is not None and wire.gbit_s < best:
            text = f"is up at {wire.gbit_s:g} Gbit/s, and another port has {best:g}; NCCL goes at the pace of the slowest"
            found.append(Finding(check, "warn", text, measured))
        else:
            found.append(Finding(check, "ok", "is up", measured))
    return found or [Finding("links", "skip", "there is no network interface with an address")]


def check(address: str, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Inspect and judge."""
    return judge(inspect(address, environ), environ)
