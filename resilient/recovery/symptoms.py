"""Symptoms: what the words of an exception or of a log say of its cause.

Pure: one table, from the wording of gloo, NCCL, UCX, CUDA, torch, Slurm and the kernel to a class and an explanation. It knows
neither workers nor faults. The table is read from the top, and the more telling row stands higher: a memory error of a GPU
before the loss of a connection that it caused. Where several lines of a log match one row, the last one is the evidence.

*transient*: nothing is broken for good, trying again on the same nodes may well help. *node*: a machine, or what belongs to it, is
not fit for the work. *deterministic*: the same will happen again, wherever it runs.
"""

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from resilient.recovery import xids

Class = Literal["transient", "node", "deterministic"]


@dataclass(frozen=True)
class Symptom:
    """One row of the table.

    Attributes:
        pattern: of a line.
        verdict: the class of the cause.
        meaning: in a few words, for people.
        blames_a_peer: a rank meets with this when another rank, or the link to it, has gone.
        timed_out: so long did it wait for that peer that it gave up.
        device: the rank's device does not work any more.
    """

    pattern: re.Pattern[str]
    verdict: Class
    meaning: str
    blames_a_peer: bool = False
    timed_out: bool = False
    device: bool = False


@dataclass(frozen=True)
class Finding:
    """A symptom, and the line that shows it."""

    symptom: Symptom
    line: str


def _node(pattern: str, meaning: str) -> Symptom:
    return Symptom(re.compile(pattern), "node", meaning)


def _device(pattern: str, meaning: str) -> Symptom:
    return Symptom(re.compile(pattern), "node", meaning, device=True)


def _deterministic(pattern: str, meaning: str) -> Symptom:
    return Symptom(re.compile(pattern), "deterministic", meaning)


def _peer(pattern: str, meaning: str, *, timed_out: bool = False) -> Symptom:
    return Symptom(re.compile(pattern), "transient", meaning, blames_a_peer=True, timed_out=timed_out)


GPU_MEMORY = _deterministic(
    r"(?i:cuda (out of memory|error: out of memory|failure.*out of memory))|CUDNN_STATUS_ALLOC_FAILED",
    "the GPU's memory is too small for this",
)

TABLE: tuple[Symptom, ...] = (
    # Hardware
    _device(
        r"uncorrectable (ECC|NVLink) error|ECC_UNCORRECTABLE|ECCUncorrectable", "a GPU has an uncorrectable memory or link error"
    ),
    _device(r"Xid \([^)]*\): 79\b|fallen off the bus", "a GPU has fallen off the bus (Xid 79)"),
    _device(
        rf"Xid \([^)]*\): ({'|'.join(map(str, xids.numbers('reset', 'replace')))})\b",
        "the driver reports a fault of a GPU (Xid)",
    ),
    _device(r"hardware stack error", "a GPU reports an error of its hardware"),
    _node(
        r"No CUDA GPUs are available|CUDA driver initialization failed|CUDA-capable device\(s\) is/are busy"
        r"|system not yet initialized",
        "a GPU of the node cannot be used",
    ),
    _node(r"No space left on device|Disk quota exceeded|Errno 28\b|Errno 122\b", "a file system is full or over its quota"),
    _node(r"Read-only file system|Stale file handle|Errno 5\b|Input/output error", "a file system fails"),
    _node(
        r"(ibv_(reg|create|alloc)\w*|[Rr]egister\w* memory).*(Cannot allocate memory|ENOMEM|errno 12\b|error 12\b)",
        "RDMA may not pin the memory that it needs: see `ulimit -l` of jobs on the node",
    ),
    _node(
        r"can't start new thread|(RuntimeError:|what\(\):|\b([Tt]hread|fork|clone|pthread_create)\b.*) .*"
        r"Resource temporarily unavailable",
        "no more processes and threads may run: see `ulimit -u` and the cgroup's pids.max",
    ),
    _node(r"insufficient shared memory|out of shared memory", "the shared memory of the node (/dev/shm) is full"),
    # The same again, wherever it runs
    GPU_MEMORY,
    _deterministic(r"device-side assert triggered", "a kernel's assertion failed, mostly an index out of range"),
    _deterministic(r"an illegal memory access was encountered|misaligned address", "a kernel reached outside its memory"),
    _deterministic(
        r"oom[-_]kill|Out of memory: Killed process|DefaultCPUAllocator: (can't|not enough)|Cannot allocate memory|Errno 12\b"
        r"|^MemoryError\b",
        "the node's memory is too small for this",
    ),
    _deterministic(r"ncclInvalid(Usage|Argument)|Duplicate GPU detected", "NCCL was called in a way that cannot work"),
    _deterministic(
        r"Unable to find (address for|interface)|Bootstrap : no socket interface found|ifname.*No such device",
        "the network interface of the config is not there",
    ),
    _deterministic(
        r"no kernel image is available|CUDA driver version is insufficient", "the software does not fit the GPU or its driver"
    ),
    # A peer, or the link to it
    _peer(
        r"IBV_WC_RETRY_EXC_ERR|Got completion from peer.*(status=12|error 12)\b|Transport retry count exceeded",
        "InfiniBand gave up on a peer: its port, or a link between, was down for longer than network.link_down_s covers",
    ),
    _peer(
        r"Got completion from peer|IBV_WC_\w+|NET/OFI Request .* completed with error", "the network reports an error with a peer"
    ),
    _peer(
        r"Watchdog caught collective operation timeout|ran for \d+ milliseconds before timing out",
        "a collective timed out",
        timed_out=True,
    ),
    _peer(r"Timed out waiting \d+ms for|connectFullMesh.*timed? ?out", "gloo waited in vain for a peer", timed_out=True),
    _peer(r"wait timeout after \d+ms", "a key of the store was waited for in vain", timed_out=True),
    _peer(r"[Cc]onnection reset by peer|reset by remote", "the connection to a peer was reset"),
    _peer(
        r"Connection closed by (remote )?peer|Broken pipe|Software caused connection abort",
        "a peer closed the connection: it ended",
    ),
    _peer(r"ncclRemoteError|remote process exited or there was a network error", "a peer of NCCL ended, or the link to it did"),
    _peer(r"Connection refused", "nobody listens where a peer should"),
    _peer(
        r"Socket Timeout|client socket has timed out|failed to connect to any network address",
        "a peer or the store was not reached",
    ),
    _peer(r"No route to host|Network is (unreachable|down)|Connection timed out", "the network to a peer was down"),
    _peer(r"NCCL communicator (was|has been) aborted", "NCCL's communicator was ended by another error"),
    _peer(r"\[\S*gloo/|gloo/transport", "gloo lost a peer"),
    _peer(r"ncclSystemError|unhandled system error", "a system call or a network call of NCCL failed"),
    # Trying again may help, and nobody else is to blame
    Symptom(re.compile(r"watchdog got stuck|heartbeat monitor .*(timed out|killed)"), "transient", "NCCL's watchdog was stuck"),
    Symptom(re.compile(r"EADDRINUSE|[Aa]ddress already in use"), "transient", "a port is taken"),
    Symptom(
        re.compile(r"Temporary failure in name resolution|Name or service not known|gai error"),
        "transient",
        "a host name could not be resolved",
    ),
    Symptom(re.compile(r"unhandled cuda error|ncclUnhandledCudaError"), "transient", "a CUDA call of NCCL failed"),
    Symptom(
        re.compile(r"CUDA error: (unknown error|unspecified launch failure|device not ready|the launch timed out)"),
        "transient",
        "a GPU failed; the kernel log may say why (Xid)",
    ),
)


def read(text: str) -> Finding | None:
    """The first row of the table that a line of this text shows, with the last such line; None if there is none."""
    lines = text.splitlines()
    for symptom in TABLE:
        for line in reversed(lines):
            if symptom.pattern.search(line):
                return Finding(symptom, line.strip())
    return None


UNNAMED = "a file"  # where an error of reading does not say of which one

_OS_ERROR = re.compile(r"(?:\[Errno (?P<python>\d+)\]|\(os error (?P<rust>\d+)\))")
_NAMED_FILE = re.compile(r"\[Errno \d+\][^'\"\n]*: (?P<quote>['\"])(?P<path>.+?)(?P=quote)")
_OF_STORAGE = frozenset({errno.EIO, errno.ESTALE, errno.EROFS, errno.EREMOTEIO, errno.EUCLEAN})
# Of connections, too: of storage only where the error names a file.
_OF_NAMED_FILES = frozenset(
    {
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ETIMEDOUT,
        errno.ENODEV,
        errno.ENXIO,
        errno.ENOLINK,
    }
)


def unreadable_files(text: str, own: Sequence[str], *, starting: bool) -> str | None:
    """The file that an exception says is missing or unreadable, as where its file system is away for a while; None if it says none.

    A file that is not there may as well be a name that is wrong. It counts where it is data of the run, or where a start that went
    well before needs it now.

    Args:
        text: of the exception and its causes.
        own: how the paths of the run's own data begin.
        starting: the rank had not begun to train.
    """
    for line in text.splitlines():
        if (shown := _OS_ERROR.search(line)) is None:
            continue
        number = int(shown["python"] or shown["rust"])
        named = _NAMED_FILE.search(line)
        path = named["path"] if named is not None else None
        absent = number == errno.ENOENT and path is not None and (starting or path.startswith(tuple(own)))
        if absent or number in _OF_STORAGE or (number in _OF_NAMED_FILES and path is not None):
            return path or UNNAMED
    return None


def waited_in_vain(text: str) -> bool:
    """Whether somebody gave up waiting for a peer, whatever else the text says."""
    return any(symptom.timed_out and symptom.pattern.search(text) for symptom in TABLE)


def diagnose(message: str | None, log: str) -> Finding | None:
    """What an end of a worker comes from.

    Args:
        message: of the exception that ended it; None if it was ended without one.
        log: the last lines of its log. They are asked where there is no exception, or where it tells of a symptom only, such as a
            lost peer: what else stands in a log is often old, and an exception that is the cause speaks for itself.
    """
    if message is None:
        return read(log)
    recognised = read(message)
    if recognised is None or recognised.symptom.verdict != "transient":
        return recognised
    logged = read(log)
    if logged is not None and TABLE.index(logged.symptom) < TABLE.index(recognised.symptom):
        return logged
    return recognised
