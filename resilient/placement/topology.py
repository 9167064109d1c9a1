"""What a machine has: its NUMA domains, its cores, and at which domain each GPU is. Read from sysfs, and from what NVIDIA's driver
has in procfs; no driver is loaded or asked for it."""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NVIDIA = "0x10de"  # vendor on the PCI bus
DISPLAY = "0x03"  # class of graphics and 3D controllers; NVIDIA's network cards and switches have others
MOST_CPUS = 1 << 16  # in a list; the kernel has at most 8,192


@dataclass(frozen=True)
class Domain:
    """A NUMA domain: cores, memory, or both. A GPU's own memory may be one without cores."""

    number: int
    cpus: frozenset[int]
    memory_bytes: int


@dataclass(frozen=True)
class Gpu:
    """A GPU of the machine.

    Attributes:
        address: on the PCI bus.
        domain: that it is at; None where the firmware does not tell.
        minor: number of its device file; None where the driver does not tell.
    """

    address: str
    domain: int | None
    minor: int | None = None
    uuid: str = ""


@dataclass(frozen=True)
class Topology:
    """Attributes: cores: CPUs of one core, which are its hyperthreads, in the order of their numbers; gpus: by address."""

    domains: tuple[Domain, ...]
    cores: tuple[frozenset[int], ...]
    gpus: tuple[Gpu, ...]


def cpus_in(text: str) -> frozenset[int]:
    """CPUs of a list as the kernel writes it, `0-5,48-53`. Raises ValueError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            if len(numbers) > MOST_CPUS:
                raise ValueError(f"{part} are more CPUs than a machine has")
            found.update(numbers)
    return frozenset(found)


def in_words(cpus: Iterable[int]) -> str:
    """The same the other way round."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and spans[-1][1] == cpu - 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def read(sys: Path = Path("/sys"), proc: Path = Path("/proc")) -> Topology:
    """Of this machine. What cannot be read is left out: there may be no domain at all."""
    domains = tuple(found for path in _numbered(sys / "devices/system/node", "node") if (found := _domain(path)) is not None)
    cores: set[frozenset[int]] = set()
    for path in _numbered(sys / "devices/system/cpu", "cpu"):
        siblings = _cpus(path / "topology/thread_siblings_list")
        cores.add(siblings or frozenset([_number_of(path)]))
    return Topology(domains, tuple(sorted(cores, key=min)), tuple(_gpus(sys, proc, domains)))


def allowed_memory(proc: Path = Path("/proc")) -> frozenset[int]:
    """The domains whose memory this process may use; empty where nothing tells."""
    found = re.search(r"^Mems_allowed_list:\s*(\S+)$", _text(proc / "self/status"), re.MULTILINE)
    with suppress(ValueError):
        return cpus_in(found[1]) if found else frozenset()
    return frozenset()


def _domain(path: Path) -> Domain | None:
    cpus = _cpus(path / "cpulist")
    total = re.search(r"MemTotal:\s+(\d+) kB", _text(path / "meminfo"))
    return None if cpus is None else Domain(_number_of(path), cpus, int(total[1]) << 10 if total else 0)


def _gpus(sys: Path, proc: Path, domains: tuple[Domain, ...]) -> Iterable[Gpu]:
    devices = sys / "bus/pci/devices"
    for path in sorted(devices.iterdir()) if devices.is_dir() else ():
        if _text(path / "vendor").strip() != NVIDIA or not _text(path / "class").startswith(DISPLAY):
            continue
        told = _text(proc / "driver/nvidia/gpus" / path.name / "information")
        uuid, minor = (re.search(pattern, told) for pattern in (r"GPU UUID:\s+(\S+)", r"Device Minor:\s+(\d+)"))
        yield Gpu(path.name, _domain_of(path, domains), int(minor[1]) if minor else None, uuid[1] if uuid else "")


def _domain_of(device: Path, domains: tuple[Domain, ...]) -> int | None:
    """A firmware that leaves out the domain (-1) may still tell the cores."""
    number = _text(device / "numa_node").strip()
    if number.isdigit():
        return int(number)
    near = _cpus(device / "local_cpulist")
    holding = [each.number for each in domains if near and each.cpus >= near]
    return holding[0] if len(holding) == 1 and len(domains) > 1 else None


def _numbered(directory: Path, name: str) -> list[Path]:
    return sorted((path for path in directory.glob(f"{name}[0-9]*") if path.name.removeprefix(name).isdigit()), key=_number_of)


def _number_of(path: Path) -> int:
    return int(path.name.lstrip("abcdefghijklmnopqrstuvwxyz"))


def _cpus(path: Path) -> frozenset[int] | None:
    try:
        return cpus_in(path.read_text())
    except (OSError, ValueError):
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
