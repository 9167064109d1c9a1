"""The GPUs of a node as their driver tells: how many, and in what health.

NVML is asked through `pynvml` where that is installed, else `nvidia-smi`; both may hang with the driver, so that `check` is run in
a process of its own. Parsing and judging are pure.
"""

import importlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from resilient import visible_gpus
from resilient.health.report import Finding, Verdict
from resilient.lifeline import die_with_parent
from resilient.recovery.xids import Xid, numbered

CHECK = "GPUs"
MEMORY = "GPU memory"
WAIT_SHARE = 0.8  # of a check's time is waited for memory, so that what is found is told
FREED_POLL_S = 0.25
ALL_S, ONE_S = 15.0, 5.0  # in which nvidia-smi answers, of all GPUs, which may be cold, and of one

# What nvidia-smi is asked; drivers that do not know a name of the second list refuse the whole question.
BASIC = ("index", "uuid", "name")
HEALTH = (
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
    "clocks_throttle_reasons.hw_slowdown",
    "clocks_throttle_reasons.hw_thermal_slowdown",
    "temperature.gpu",
    "memory.used",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
NVLINKS = 18  # that a GPU has at most (NVML_NVLINK_MAX_LINKS)
NO_PERMISSION, LOST = 4, 15  # NVML_ERROR_NO_PERMISSION, NVML_ERROR_GPU_IS_LOST; nvidia-smi ends with the same
IN_USE_BYTES = 4 << 30  # more than the checks that run beside this one take


@dataclass(frozen=True)
class Gpu:
    """One GPU; None where nothing is known.

    Attributes:
        uncorrected: memory errors that ECC could not correct, since the driver was loaded.
        pending: pages or rows are to be replaced at the next reset.
        unmappable: a row could not be replaced.
        slowed: the hardware slows it down, for heat or power.
        pcie_width, pcie_width_max: lanes, as they are and as they can be.
        nvlinks: that are up.
        lost: what the driver says where it cannot reach the GPU; empty where it can.
    """

    index: int
    uuid: str
    name: str
    uncorrected: int | None = None
    pending: bool | None = None
    unmappable: bool | None = None
    slowed: bool | None = None
    celsius: int | None = None
    used_bytes: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlinks: int | None = None
    lost: str = ""


def check(needed: int, devices: Sequence[int] | None = None) -> Iterator[Finding]:
    """Count the GPUs that ranks may use, and judge their health; may take as long as the driver pleases; see `judge`."""
    found = read()
    if found is None:
        yield Finding(CHECK, "skip", "neither pynvml nor nvidia-smi is here to ask")
    else:
        yield from judge(visible(found, os.environ.get("CUDA_VISIBLE_DEVICES")), needed, devices)


def freed(pids: Sequence[int], limit_s: float) -> Iterator[Finding]:
    """Wait until the driver says that none of these processes holds memory of a GPU any more, for most of `limit_s`."""
    until = time.monotonic() + WAIT_SHARE * limit_s
    while held := held_by(pids):
        if time.monotonic() >= until:
            yield Finding(MEMORY, "fail", f"{', '.join(held)}; the next ranks would have too little of it: reboot the node")
            return
        time.sleep(FREED_POLL_S)
    yield Finding(MEMORY, "ok", "processes that were killed hold none")


def held_by(pids: Sequence[int]) -> list[str]:
    """Which of these processes hold memory of a GPU, in words; where nobody can tell, each that has not ended."""
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    holders = _holders() if left else {}
    if holders is None:
        return [f"process {pid} does not end, and may hold memory of a GPU" for pid in left]
    return [f"process {pid} does not end, and holds {holders[pid] / 2**30:.1f} GiB of a GPU" for pid in left if pid in holders]


def _holders() -> dict[int, int] | None:
    """Bytes of GPUs by process; None where nothing is there to tell."""
    with suppress(ImportError):
        return holders_by_nvml(importlib.import_module("pynvml"))
    if not shutil.which("nvidia-smi"):
        return None
    status, said = _smi(["--query-compute-apps=pid,used_memory"], ALL_S)
    return parse_holders(said) if status == 0 else None


def _smi(question: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Status and answer of nvidia-smi, which is killed with this process, and where it hangs; nobody waits for the kernel then."""
    command = ["nvidia-smi", *question, "--format=csv,noheader,nounits"]
    tied = partial(die_with_parent, os.getpid())
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=tied,  # noqa: PLW1509 - a check has no threads
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        assert process.stdout is not None
        process.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        return -signal.SIGKILL, f"no answer within {limit_s:g} s"
    return process.returncode, said


def parse_holders(text: str) -> dict[int, int]:
    """What `nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader,nounits` printed."""
    found: dict[int, int] = {}
    for line in text.splitlines():
        pid, _, used = line.partition(",")
        if pid.strip().isdigit():
            found[int(pid)] = found.get(int(pid), 0) + ((_number(used.strip()) or 0) << 20)
    return found


def holders_by_nvml(nvml: Any) -> dict[int, int] | None:
    """The same from the module `pynvml`; None if it does not tell."""
    found: dict[int, int] = {}
    try:
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):  # a cgroup keeps that one from this process, or it is lost
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    found[each.pid] = found.get(each.pid, 0) + (each.usedGpuMemory or 0)
    except nvml.NVMLError:
        return None
    return found


def read() -> list[Gpu] | None:
    """The GPUs of this machine; None where nothing is there to tell. Raises RuntimeError if what is there fails."""
    with suppress(ImportError):
        return by_nvml(importlib.import_module("pynvml"))
    return _by_command() if shutil.which("nvidia-smi") else None


def installed() -> int:
    """GPUs that have a device file, also where their driver cannot reach them."""
    return len(visible_gpus.visible({}))


def _by_command() -> list[Gpu]:
    """All GPUs at once; where that fails, as by one that is lost, each by itself."""
    found, status, why = _queried([], ALL_S)
    if status == 0:
        return found
    answers = [_queried(["-i", str(index)], ONE_S) for index in range(installed())]
    if not any(each for each, _, _ in answers):
        raise RuntimeError(f"nvidia-smi ended with status {status}: {why}")
    gpus: list[Gpu] = []
    for index, (one, one_status, said) in enumerate(answers):
        if one_status != NO_PERMISSION:
            gpus += one or [Gpu(index, "", "", lost=said)]
    return gpus


def _queried(which: Sequence[str], limit_s: float) -> tuple[list[Gpu], int, str]:
    """What nvidia-smi tells of GPUs, its status, and what it says where that is not 0."""
    status, said = -1, ""
    for fields in ((*BASIC, *HEALTH), BASIC):
        status, said = _smi([*which, f"--query-gpu={','.join(fields)}"], limit_s)
        if status in (0, NO_PERMISSION, LOST, -signal.SIGKILL):
            break
    return parse(said, fields) if status == 0 else [], status, said.strip()[:300]


def parse(text: str, fields: Sequence[str]) -> list[Gpu]:
    """What `nvidia-smi --query-gpu=<fields> --format=csv,noheader,nounits` printed."""
    found = []
    for line in text.splitlines():
        values = dict(zip(fields, (value.strip() for value in line.split(",")), strict=False))
        if not values.get("index", "").isdigit():
            continue
        slowed = [_yes(values.get(name)) for name in fields if name.startswith("clocks_throttle_reasons.")]
        used = _number(values.get("memory.used"))
        found.append(
            Gpu(
                index=int(values["index"]),
                uuid=values.get("uuid", ""),
                name=values.get("name", ""),
                uncorrected=_number(values.get("ecc.errors.uncorrected.volatile.total")),
                pending=_yes(values.get("retired_pages.pending")),
                slowed=None if all(each is None for each in slowed) else any(slowed),
                celsius=_number(values.get("temperature.gpu")),
                used_bytes=None if used is None else used << 20,
                pcie_width=_number(values.get("pcie.link.width.current")),
                pcie_width_max=_number(values.get("pcie.link.width.max")),
            )
        )
    return found


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _yes(text: str | None) -> bool | None:
    """`[N/A]`, `[Not Supported]` and whatever else is neither say nothing."""
    return {"yes": True, "active": True, "no": False, "not active": False}.get((text or "").lower())


def by_nvml(nvml: Any) -> list[Gpu]:
    """The GPUs as the module `pynvml` tells of them. Raises RuntimeError if the driver does not answer."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise RuntimeError(f"NVML does not start: {error}") from error

    found: list[Gpu] = []
    for at in range(nvml.nvmlDeviceGetCount()):
        try:
            found.append(_told(nvml, len(found), nvml.nvmlDeviceGetHandleByIndex(at)))
        except nvml.NVMLError as error:
            # Those that a cgroup keeps from this process do not count for CUDA either; any other keeps its place.
            if _value(error) != NO_PERMISSION:
                found.append(Gpu(len(found), "", "", lost=str(error)))
    return found


def _value(error: Exception) -> int | None:
    """NVML's number of an error."""
    return getattr(error, "value", None)


def _told(nvml: Any, index: int, gpu: Any) -> Gpu:
    """What NVML tells of a GPU. Raises NVMLError where that is lost."""

    def ask(function: str, *arguments: Any) -> Any:
        """None where this GPU, or this driver, does not know."""
        try:
            return getattr(nvml, function)(*arguments)
        except AttributeError:
            return None
        except nvml.NVMLError as error:
            if _value(error) == LOST:
                raise
            return None

    def text(value: Any) -> str:
        return value.decode() if isinstance(value, bytes) else str(value or "")

    reasons, memory = ask("nvmlDeviceGetCurrentClocksThrottleReasons", gpu), ask("nvmlDeviceGetMemoryInfo", gpu)
    remapped, retired = ask("nvmlDeviceGetRemappedRows", gpu), ask("nvmlDeviceGetRetiredPagesPendingStatus", gpu)
    states = [ask("nvmlDeviceGetNvLinkState", gpu, link) for link in range(NVLINKS)]
    known = [state for state in states if state is not None]
    slow = nvml.nvmlClocksThrottleReasonHwSlowdown
    return Gpu(
        index=index,
        uuid=text(ask("nvmlDeviceGetUUID", gpu)),
        name=text(ask("nvmlDeviceGetName", gpu)),
        uncorrected=ask("nvmlDeviceGetTotalEccErrors", gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
        pending=None if remapped is None and retired is None else bool(retired) or bool(remapped and remapped[2]),
        unmappable=None if remapped is None else bool(remapped[3]),
        slowed=None if reasons is None else bool(reasons & slow),
        celsius=ask("nvmlDeviceGetTemperature", gpu, nvml.NVML_TEMPERATURE_GPU),
        used_bytes=None if memory is None else int(memory.used),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth", gpu),
        pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth", gpu),
        nvlinks=None if not known else states.count(1),
    )


def visible(gpus: Sequence[Gpu], chosen: str | None) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES lets a process see, by number or by the start of their UUID.

    Of an instance of a GPU (MIG) the driver tells no health. A UUID that nobody has is that of a GPU that is lost, if one is.
    """
    if chosen is None:
        return list(gpus)
    nameless = [gpu for gpu in gpus if gpu.lost]
    found: list[Gpu] = []
    for entry in (part.strip() for part in chosen.split(",")):
        if entry.startswith("MIG-"):
            found.append(Gpu(len(found), entry, "an instance of a GPU (MIG)"))
            continue
        hits = [gpu for gpu in gpus if (entry.isdigit() and int(entry) == gpu.index) or (entry and gpu.uuid.startswith(entry))]
        if not hits and entry.startswith("GPU-") and nameless:
            hits = [nameless.pop(0)]
        if len(hits) != 1:
            break  # CUDA ends the list at the first that is not there
        found += hits
    return found


def judge(gpus: Sequence[Gpu], needed: int, devices: Sequence[int] | None = None) -> Iterator[Finding]:
    """What the GPUs are good for: one finding on their number, one on each that is not well.

    Args:
        needed: GPUs that the ranks of this node need.
        devices: of these, those that they compute on; None: on all.
    """
    measured = {"visible": len(gpus), "needed": needed}
    if len(gpus) < needed:
        text = f"{len(gpus)} can be seen, and {needed} are needed (cluster.procs_per_node); see CUDA_VISIBLE_DEVICES and nvidia-smi"
        yield Finding(CHECK, "fail", text, measured)
        return
    numbers = range(needed) if devices is None else devices
    used = [gpus[number] for number in numbers]
    for number, gpu in zip(numbers, used, strict=True):
        finding = _health(gpu) or _links(gpu, used)
        if finding is not None:
            yield replace(finding, device=number if finding.verdict == "fail" else None)
    here = [gpu for gpu in gpus if not gpu.lost]
    about = "" if all(gpu.uncorrected is not None for gpu in here) else ", not all tell of memory errors"
    yield Finding(CHECK, "ok", f"{len(here)} can be seen{about}: {here[0].name}" if here else "none is needed", measured)


def judge_faults(faults: Sequence[Xid], gpus: Sequence[str] = ()) -> list[Finding]:
    """What faults that the driver has reported mean for the node: one that a reset must heal comes again with the next program.

    Args:
        gpus: of the local ranks, as addresses on the PCI bus; empty where one is not known.
    """
    return [
        Finding(f"GPU {each.gpu}", "fail" if each.unfit else "warn", str(each), device=numbered(each, gpus) if each.unfit else None)
        for each in faults
    ]


def _links(gpu: Gpu, others: Sequence[Gpu]) -> Finding | None:
    """How many NVLinks there should be, GPUs of the same kind beside it tell."""
    most = max((each.nvlinks or 0 for each in others if each.name == gpu.name), default=0)
    if gpu.nvlinks is None or gpu.nvlinks >= most:
        return None
    text = f"{gpu.nvlinks} of its NVLinks are up, and another GPU here has {most}; reset the GPUs, or take the node out of service"
    return Finding(f"GPU {gpu.index}", "fail", text, {"nvlinks": gpu.nvlinks})


def _width(gpu: Gpu) -> str:
    """Why its link to the machine is not what it should be; empty if it is."""
    if gpu.pcie_width is None or gpu.pcie_width_max is None or gpu.pcie_width >= gpu.pcie_width_max:
        return ""
    return f"its PCIe link has {gpu.pcie_width} lanes of {gpu.pcie_width_max}; reseat it, copies take longer"


def _health(gpu: Gpu) -> Finding | None:
    def finding(verdict: Verdict, text: str, **measured: int) -> Finding:
        return Finding(f"GPU {gpu.index}", verdict, text, measured)

    if gpu.lost:
        return finding("fail", f"the driver cannot reach it ({gpu.lost}); reboot the node, or take it out of service")
    if gpu.uncorrected:
        errors = f"{gpu.uncorrected} uncorrected memory error{'s' * (gpu.uncorrected > 1)} (ECC) since the driver was loaded"
        return finding("fail", f"{errors}; reset the GPU, or take the node out of service", uncorrected=gpu.uncorrected)
    if gpu.unmappable:
        return finding("fail", "a bad row of its memory could not be replaced; take the node out of service")
    if gpu.slowed:
        at = f" at {gpu.celsius} °C" if gpu.celsius is not None else ""
        return finding("warn", f"the hardware slows it down{at}, for heat or power; all ranks will wait for it")
    if _width(gpu):
        return finding("warn", _width(gpu), pcie_width=gpu.pcie_width or 0)
    if gpu.pending:
        return finding("warn", "bad pages or rows of its memory are replaced only at the next reset; reset it soon")
    if gpu.used_bytes is not None and gpu.used_bytes > IN_USE_BYTES:
        held = gpu.used_bytes / 2**30
        return finding(
            "warn", f"other processes hold {held:.1f} GiB of its memory; look for them with nvidia-smi", used_bytes=gpu.used_bytes
        )
    return None
