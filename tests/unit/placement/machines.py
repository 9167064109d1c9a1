"""Trees of sysfs and procfs as machines have them, made in a directory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """Directories that stand for /sys and /proc, and all CPUs."""

    sys: Path
    proc: Path
    cpus: frozenset[int]


def written(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def made(
    directory: Path,
    cpus: Mapping[int, str],
    gpus: Sequence[tuple[str, int]],
    *,
    threads: int,
    memory_only: Sequence[int] = (),
    local: Mapping[str, str] | None = None,
) -> Machine:
    """A machine.

    Args:
        cpus: list of CPUs by NUMA domain.
        gpus: address on the PCI bus, and `numa_node` as the firmware tells it.
        threads: of a core; CPU n and n + half of all are one core's where there are two.
        memory_only: domains without cores, as a GPU's memory is.
        local: `local_cpulist` of GPUs, by address.
    """
    sys, proc = directory / "sys", directory / "proc"
    numbers: set[int] = set()
    for domain, text in {**cpus, **dict.fromkeys(memory_only, "")}.items():
        place = sys / f"devices/system/node/node{domain}"
        written(place / "cpulist", f"{text}\n")
        written(place / "meminfo", f"Node {domain} MemTotal:       65536000 kB\nNode {domain} MemFree:        60000000 kB\n")
        for part in text.split(",") if text else ():
            first, _, last = part.partition("-")
            numbers |= set(range(int(first), int(last or first) + 1))
    half = len(numbers) // threads
    for cpu in numbers:
        siblings = ",".join(str(cpu % half + half * thread) for thread in range(threads))
        written(sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{siblings}\n")
    written(sys / "devices/system/cpu/cpufreq/boost", "1\n")  # a name that begins alike
    for minor, (address, domain) in enumerate(gpus):
        device = sys / "bus/pci/devices" / address
        for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", str(domain))):
            written(device / name, f"{text}\n")
        if local and address in local:
            written(device / "local_cpulist", f"{local[address]}\n")
        told = f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 0\nGPU UUID: \t GPU-{minor:08x}-aaaa\nBus Location: \t {address}\n"
        written(proc / "driver/nvidia/gpus" / address / "information", f"{told}Device Minor: \t {minor}\n")
    for address, vendor, kind in (("0000:01:00.0", "0x15b3", "0x020700"), ("0000:02:00.0", "0x10de", "0x068000")):
        written(sys / "bus/pci/devices" / address / "vendor", f"{vendor}\n")  # a network card, and an NVSwitch
        written(sys / "bus/pci/devices" / address / "class", f"{kind}\n")
    domains = ",".join(map(str, [*cpus, *memory_only]))
    written(proc / "self/status", f"Name:\tpython\nMems_allowed:\tff\nMems_allowed_list:\t{domains}\n")
    return Machine(sys, proc, frozenset(numbers))


def dgx_h100(directory: Path) -> Machine:
    """Two Xeons of 56 cores with hyperthreads, four GPUs at each."""
    buses = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
    gpus = [(f"0000:{bus}:00.0", number // 4) for number, bus in enumerate(buses)]
    return made(directory, {0: "0-55,112-167", 1: "56-111,168-223"}, gpus, threads=2)


def dgx_a100(directory: Path) -> Machine:
    """Two EPYCs of 64 cores in four domains each, two GPUs at every other domain."""
    buses = ("07", "0f", "47", "4e", "87", "90", "b7", "bd")
    at = (3, 3, 1, 1, 7, 7, 5, 5)
    cpus = {n: f"{16 * n}-{16 * n + 15},{128 + 16 * n}-{128 + 16 * n + 15}" for n in range(8)}
    return made(directory, cpus, [(f"0000:{bus}:00.0", domain) for bus, domain in zip(buses, at, strict=True)], threads=2)


def juwels_booster(directory: Path) -> Machine:
    """Two EPYCs of 24 cores in four domains each; four GPUs, at domains 3, 1, 7 and 5."""
    cpus = {n: f"{6 * n}-{6 * n + 5},{48 + 6 * n}-{48 + 6 * n + 5}" for n in range(8)}
    gpus = [(f"0000:{bus}:00.0", domain) for bus, domain in (("03", 3), ("44", 1), ("84", 7), ("c4", 5))]
    return made(directory, cpus, gpus, threads=2)


def gh200(directory: Path, chips: int = 4) -> Machine:
    """Superchips of 72 cores and a GPU, whose memory is a domain of its own, and more of them for its instances."""
    cpus = {n: f"{72 * n}-{72 * n + 71}" for n in range(chips)}
    memory_only = range(chips, chips + 8 * chips)
    return made(directory, cpus, [(f"{9 + 16 * n:04x}:01:00.0", n) for n in range(chips)], threads=1, memory_only=memory_only)
