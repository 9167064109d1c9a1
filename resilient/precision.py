"""What `train.precision: auto` comes to: bf16 where the hardware multiplies it faster than fp32, else fp32.

The decision is a pure function of what the kernel tells; nothing is asked of a driver, and torch is not loaded. A run directory
keeps what was decided when its campaign began, so that a resume on other hardware computes in the same precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from resilient.campaign import gpu_count
from resilient.config import Config, document

Precision = Literal["bf16", "fp32"]

CPUINFO = Path("/proc/cpuinfo")
PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA = 0x10DE
DISPLAY_CLASSES = (0x0300, 0x0302)  # VGA and 3D controllers; the same vendor has audio, bridges and switches on the bus
# Device ids rise with the generations: up to Volta and Turing below the first; the small Turings are an island above it.
AMPERE_FROM = 0x2080
LATE_TURING = range(0x2180, 0x2200)
ZEN_5 = 26  # AMD's family of processors from which on AVX512-BF16 runs at twice the rate of fp32, in full width


@dataclass(frozen=True)
class Choice:
    """A precision, and in a few words why."""

    precision: Precision
    why: str


def choose(*, gpus: int, device_ids: Sequence[int], cpuinfo: str) -> Choice:
    """The faster precision for matrix products. Pure.

    AVX512-BF16 alone is not enough: matrix products were measured at 76 GFLOP/s a core in bf16 and 128 in fp32 on one processor
    that has it, and at 400 and 90 on Zen 5. The BF16 instructions of Arm have not been measured.

    Args:
        gpus: NVIDIA GPUs that ranks compute on; 0: they compute on the CPU.
        device_ids: PCI device ids of the machine's NVIDIA GPUs; empty where the bus does not show them.
        cpuinfo: text of `/proc/cpuinfo`.
    """
    if gpus:
        fast = sum(from_ampere_on(each) for each in device_ids)
        if not device_ids or fast >= min(gpus, len(device_ids)):
            return Choice("bf16", "the GPUs multiply it faster")
        return Choice("fp32", "the GPUs are older than compute capability 8.0, and have no bf16")
    flags = cpu_flags(cpuinfo)
    if {"amx_tile", "amx_bf16"} <= flags:
        return Choice("bf16", "the CPU has AMX")
    if "avx512_bf16" in flags and amd_family(cpuinfo) >= ZEN_5:
        return Choice("bf16", "the CPU has AVX512-BF16 in full width (Zen 5)")
    return Choice("fp32", "the CPU has no AMX, so that bf16 would be no faster")


def from_ampere_on(device_id: int) -> bool:
    """Whether a GPU has compute capability 8.0 or later, and with it matrix units for bf16."""
    return device_id >= AMPERE_FROM and device_id not in LATE_TURING


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """The features that every processor of `/proc/cpuinfo` has; none where it tells of none."""
    found = [frozenset(value.split()) for value in _values(cpuinfo, "flags")]
    return frozenset.intersection(*found) if found else frozenset()


def amd_family(cpuinfo: str) -> int:
    """The family of AMD's processors; 0 where there are others, or where `/proc/cpuinfo` does not tell."""
    families = _values(cpuinfo, "cpu family")
    if set(_values(cpuinfo, "vendor_id")) != {"AuthenticAMD"} or not all(map(str.isdecimal, families)):
        return 0
    return min(map(int, families), default=0)


def _values(cpuinfo: str, name: str) -> list[str]:
    """What stands under this name, of each processor."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return [value.strip() for key, _, value in lines if key.strip() == name]


def settled(config: Config) -> tuple[Config, Choice | None]:
    """The config with its precision decided, and the choice where that was left to this machine.

    What stands in the config of the run directory is kept; nodes of a job are taken to be like this one.
    """
    if config.train.precision != "auto":
        return config, None
    choice = _kept(config.run_dir) or _chosen_here(config)
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": choice.precision})}), choice


def _kept(run_dir: Path) -> Choice | None:
    match document.value_at(run_dir / "config.yaml", "train", "precision"):
        case "bf16" | "fp32" as precision:
            return Choice(precision, "kept from the run directory")
        case _:
            return None


def _chosen_here(config: Config) -> Choice:
    gpus = gpu_count() if config.cluster.device != "cpu" else 0
    return choose(gpus=gpus, device_ids=_device_ids() if gpus else (), cpuinfo="" if gpus else _text(CPUINFO))


def _device_ids() -> list[int]:
    """PCI device ids of this machine's NVIDIA GPUs, as the kernel has noted them; the GPUs are not touched."""
    found = []
    for device in PCI_DEVICES.glob("*"):
        vendor, kind, number = (int(_text(device / name).strip() or "0", 16) for name in ("vendor", "class", "device"))
        if vendor == NVIDIA and kind >> 8 in DISPLAY_CLASSES:
            found.append(number)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
