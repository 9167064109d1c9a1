"""Bindings of this machine, and of this process: what is decided in `binding`, told to the kernel.

A process that cannot be bound runs anywhere, and a line of its log says why: it is slower, and not wrong.
"""

import ctypes
import logging
import os
import platform
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from resilient import visible_gpus
from resilient.placement.binding import Binding, Mode, Place, Share, bind, chosen
from resilient.placement.topology import Gpu, Topology, allowed_memory, cpus_in, in_words, read

log = logging.getLogger(__name__)

VARIABLE = "RESILIENT_BINDING"  # of a rank: its cores as a list, and behind a slash its domain of memory, where it has one
ALLOTTED = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")  # numbers of device files, the step's before the job's

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # the call has no function in the C library
_PREFERRED = 1  # MPOL_PREFERRED: from elsewhere where that domain has no more, instead of an end by lack of memory


def of_this_node(
    mode: Mode,
    device: str,
    share: Share,
    environ: Mapping[str, str] = os.environ,
    *,
    sys: Path = Path("/sys"),
    proc: Path = Path("/proc"),
    allowed: Collection[int] | None = None,
) -> Binding:
    """The binding of the ranks of an agent on this machine.

    Args:
        device: "cpu" or "cuda".
        allowed: CPUs that may be used; None: what this process may use now.
    """
    if mode == "none":
        return Binding((None,) * share.count)
    topology = read(sys, proc)
    gpus = gpus_of(topology, share.count, environ) if device == "cuda" else None
    mine = os.sched_getaffinity(0) if allowed is None else allowed
    return bind(mode, topology, mine, allowed_memory(proc) & _with_memory(topology), share, gpus)


def gpus_of(topology: Topology, count: int, environ: Mapping[str, str] = os.environ) -> list[Gpu | None]:
    """The GPUs of so many ranks of this process, by local rank; None for one that is not known."""
    found = chosen(visible_gpus.visible(environ), topology, _allotted(environ))[:count]
    return found + [None] * (count - len(found))


def _with_memory(topology: Topology) -> frozenset[int]:
    return frozenset(each.number for each in topology.domains if each.memory_bytes)


def _allotted(environ: Mapping[str, str]) -> list[int]:
    for name in ALLOTTED:
        with suppress(ValueError):
            if environ.get(name):
                return sorted(cpus_in(environ[name]))
    return []


def variables_of(place: Place | None) -> dict[str, str]:
    """What a rank is told; `take_place` reads it."""
    if place is None:
        return {}
    return {VARIABLE: in_words(place.cpus) + ("" if place.memory is None else f"/{place.memory}")}


def take_place(environ: Mapping[str, str] = os.environ) -> None:
    """Bind this process, and all threads that it has, to what a rank was told."""
    cpus, _, memory = environ.get(VARIABLE, "").partition("/")
    if not cpus:
        return
    try:
        bind_threads(cpus_in(cpus))
        if memory:
            prefer_memory(int(memory))
    except (OSError, ValueError) as error:
        log.warning("this process runs anywhere: it cannot be bound to %s: %s", environ[VARIABLE], error)


def leave_to_ranks(binding: Binding) -> None:
    """Bind this process, which is no rank, to what ranks leave."""
    log.log(logging.INFO if binding.bound or not binding.why else logging.DEBUG, "binding: %s", binding)
    if not binding.left:
        return
    try:
        bind_threads(binding.left)
    except OSError as error:
        log.warning("this process runs anywhere: it cannot be bound to %s: %s", in_words(binding.left), error)


def bind_threads(cpus: Collection[int]) -> None:
    """All threads of this process, and those that they start, run on these CPUs alone. Raises OSError."""
    os.sched_setaffinity(0, cpus)
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cpus)


def prefer_memory(domain: int) -> None:
    """This thread, and those that it starts, take memory of this domain while there is any. Raises OSError."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(f"set_mempolicy is not known on {platform.machine()}")
    words = domain // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    mask[domain // 64] = 1 << (domain % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(_PREFERRED), mask, ctypes.c_ulong(words * 64 + 1)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
