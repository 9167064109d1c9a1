"""The lease of a run directory as others see it: who works there, on this machine or on another one.

Reads `.lock` and `.lease`, which belong to the driver (`resilient.driver.lease`). On the driver's machine the lock tells. On others
the age of the lease does, for the driver renews it, by the file system's clock: that of this host may be another one. The time of
the file system is that of a file which was touched just now. Some have it from their clients, whose clocks need not agree either.
So whoever acts on it that nobody works there first watches an old lease for as long as a renewal takes, unless a driver of this
host left it before the host was started.
"""

import fcntl
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from checkpoint.typed import built

LOCK = ".lock"
LEASE = ".lease"
RENEW_S = 3.0
LEASE_S = 30.0  # an owner that has not renewed it for so long is gone
PATIENCE_S = RENEW_S + 1.0  # for which an old lease is watched before its owner is taken to be gone
POLL_S = 0.1
_OWNER_BYTES = 1 << 16  # of a lease: what is longer names nobody


@dataclass(frozen=True)
class Owner:
    """Who has a lease.

    Attributes:
        pid: in the PID namespace `pid_namespace`.
        machine: another for every boot of every machine.
        token: another for every lease.
        pid_namespace: its inode; 0: not known, as in leases of earlier versions.
        clock_zero: when the machine's monotonic clock was at zero, unix seconds by the owner's own clock, which does not jump when
            that of the machine is set; None: not known.
    """

    host: str
    pid: int
    job: str
    machine: str
    token: str
    pid_namespace: int = 0
    clock_zero: float | None = None

    def __str__(self) -> str:
        if self.pid <= 0:  # which has the lock, and no lease
            return "another process"
        return f"pid {self.pid} on {self.host}{f' (job {self.job})' if self.job else ''}"


def ahead_s(owner: Owner | None) -> float:
    """How far the clock of an owner, by which it writes down times, is ahead of this machine's.

    0 where nobody has set that, and for owners on other machines, whose clocks cannot be read here.
    """
    if owner is None or owner.clock_zero is None or owner.machine != machine_id():
        return 0.0
    return owner.clock_zero + time.monotonic() - time.time()


def lives(age_s: float, *, renewed: bool, watched_s: float, patience_s: float) -> bool | None:
    """Whether an owner on another machine is there; None: not to be told yet.

    Args:
        age_s: of the lease.
        renewed: since it is watched.
        watched_s: for how long it is.
        patience_s: for how long an old one is to be watched.
    """
    if renewed or age_s < LEASE_S:
        return True
    return False if watched_s >= patience_s else None


def holder(run_dir: Path, patience_s: float = 0.0) -> Owner | None:
    """Who works in a run directory now, as far as it can be seen from this machine.

    Args:
        patience_s: for how long the lease of another machine is watched, where it is old, before its owner is taken to be gone: for
            callers that act on that.
    """
    owner, began_ns = read(run_dir / LEASE)
    if owner is None or owner.machine == machine_id():
        return (owner or Owner("", 0, "", "", "")) if flocked(run_dir) else None
    now_s, began_t = _now_s(run_dir), time.monotonic()
    while True:
        # Read after the clock was: a file system that is slow to answer makes no lease older.
        owner, changed_ns = read(run_dir / LEASE)
        if owner is None or changed_ns is None:
            return None
        age_s, watched_s = now_s - changed_ns / 1e9, time.monotonic() - began_t
        wanted_s = 0.0 if _of_an_earlier_boot(owner, age_s) else patience_s
        there = lives(age_s, renewed=changed_ns != began_ns, watched_s=watched_s, patience_s=wanted_s)
        if there is not None:
            return owner if there else None
        time.sleep(POLL_S)


def _of_an_earlier_boot(owner: Owner, age_s: float) -> bool:
    """Whether an owner, of another machine or another boot of this one, was of this one: it ended with that boot."""
    return owner.host == socket.gethostname() and age_s > time.clock_gettime(time.CLOCK_BOOTTIME)


def _now_s(run_dir: Path) -> float:
    """The time by the file system's clock, unix seconds; by that of this host where nothing may be touched."""
    lock = run_dir / LOCK
    try:
        os.utime(lock, follow_symlinks=False)
        return lock.lstat().st_mtime_ns / 1e9
    except OSError:
        return time.time()


def read(path: Path) -> tuple[Owner | None, int | None]:
    """The owner that a lease names, and when it was renewed, nanoseconds; None for what is not there, or names nobody."""
    try:
        with path.open("rb") as file:
            text, changed_ns = file.read(_OWNER_BYTES), os.fstat(file.fileno()).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    try:
        return msgspec.json.decode(text, type=built(Owner)), changed_ns
    except (ValueError, RecursionError):
        return None, changed_ns


def machine_id() -> str:
    """Tells machines, and boots of a machine, from each other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def flocked(run_dir: Path) -> bool:
    """Whether somebody on this machine is seen to hold the lock."""
    try:
        fd = os.open(run_dir / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks says nothing of others
        return False
    finally:
        os.close(fd)
    return False
