"""The lease of a run directory: one driver at a time, on this machine and on all that see the directory.

Owns `.lock` and `.lease`. On one machine flock(2) decides, which falls with the process that holds it. Between machines no such
lock can be relied on, so the owner renews the lease every few seconds, and one that is not renewed has lost its owner. Ages are
told by the file system: the time of the lease against that of a file which was touched just now. Two that take an expired lease at
once both write it, and the last one has it; an owner who finds another name in it stops. What its workers still do is fenced by
generations.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from checkpoint.locks import flock, has_no_links
from checkpoint.run_lease import LEASE, LEASE_S, LOCK, PATIENCE_S, POLL_S, RENEW_S, Owner, ahead_s, holder, machine_id, read
from resilient import clock, pid_namespace
from resilient.exits import EnvironmentUnusable
from resilient.slurm.allocation import own_job

__all__ = [
    "LEASE",
    "LEASE_S",
    "LOCK",
    "PATIENCE_S",
    "RENEW_S",
    "SURE_S",
    "Owner",
    "RunLease",
    "Seen",
    "ahead_s",
    "holder",
    "judge",
    "machine_id",
    "must_be_there",
    "read",
]

LOCK_WAIT_S = 10.0  # the processes of a driver that was killed a moment ago are gone long before
SETTLE_S = 1.0  # another that takes the same expired lease has done so by then
SURE_S = LEASE_S / 2  # an owner that has not seen for so long that it has the lease looks before it writes


@dataclass(frozen=True)
class Seen:
    """What a newcomer sees.

    Attributes:
        flocked: it holds the lock of this machine.
        owner: whom the lease names; None if there is none.
        here: the owner is of this machine.
        age_s: of the lease.
        renewed: while the newcomer was looking.
        watched_s: for how long it has.
    """

    flocked: bool
    owner: Owner | None
    here: bool
    age_s: float
    renewed: bool
    watched_s: float


def judge(seen: Seen) -> Literal["take", "wait", "refuse"]:
    """What a newcomer may do."""
    if seen.owner is None or seen.here:
        return "take" if seen.flocked else "wait" if seen.watched_s < LOCK_WAIT_S else "refuse"
    if seen.renewed:
        return "refuse"
    # The second condition is for clocks that do not agree.
    return "take" if seen.age_s >= LEASE_S or seen.watched_s >= LEASE_S else "wait"


class RunLease:
    """Has the lease of a run directory until it is closed. Waits for an owner that may be gone.

    Args:
        run_dir: an existing directory.
        machine: this one's name, if it is not to be found out.

    Raises:
        EnvironmentUnusable: another has it.
    """

    def __init__(self, run_dir: Path, machine: str | None = None) -> None:
        self._bind(run_dir, _owner(os.getpid(), machine or machine_id(), secrets.token_hex(8)))
        self._lock = os.open(run_dir / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            self._write()
            self._acquire(run_dir)
        except BaseException:
            os.close(self._lock)
            raise
        finally:
            self._own.unlink(missing_ok=True)

    @classmethod
    def adopted(cls, run_dir: Path, token: str, lock_fd: int, pid: int) -> "RunLease":
        """The lease that another process, the driver `pid`, has acquired: in the process that renews it and gives it up.

        Args:
            lock_fd: the inherited descriptor of the lock, which both processes hold: while a write of this one hangs, nobody else
                on this machine gets the lease.
        """
        lease = cls.__new__(cls)
        lease._bind(run_dir, _owner(pid, machine_id(), token))
        lease._lock = lock_fd
        return lease

    def _bind(self, run_dir: Path, owner: Owner) -> None:
        self.owner = owner
        self._run_dir = run_dir
        self._path = run_dir / LEASE
        self._own = run_dir / f"{LEASE}.{owner.token}"
        self._place = _place(run_dir)
        self._seen_t = _boot_time()

    @property
    def lock_fd(self) -> int:
        """Descriptor of the lock."""
        return self._lock

    @property
    def unseen_s(self) -> float:
        """Since it was last seen that the lease is this owner's, time in which the machine was suspended included."""
        return _boot_time() - self._seen_t

    def _acquire(self, run_dir: Path) -> None:
        began = time.monotonic()
        flocked, first = False, None
        while True:
            flocked = flocked or _flock(self._lock, run_dir / LOCK)
            owner, changed_ns = read(self._path)
            first = changed_ns if first is None else first
            os.utime(self._own)
            age_s = (self._own.stat().st_mtime_ns - changed_ns) / 1e9 if changed_ns is not None else 0.0
            here = owner is not None and owner.machine == self.owner.machine
            seen = Seen(flocked, owner, here, age_s, changed_ns != first, time.monotonic() - began)
            match judge(seen):
                case "take":
                    if self._take(fresh=changed_ns is None, settle=changed_ns is not None and not here):
                        os.ftruncate(self._lock, 0)
                        os.pwrite(self._lock, f"{self.owner}\n".encode(), 0)  # for people, and tools that know the lock alone
                        return
                case "refuse":
                    who = owner or "another process"
                    raise EnvironmentUnusable(
                        f"{run_dir} is in use by {who}; stop that run first, or give this one another run_dir"
                    )
            time.sleep(POLL_S)

    def _take(self, *, fresh: bool, settle: bool) -> bool:
        """Write the lease; whether it is still this one's a moment later.

        Args:
            fresh: there is none to be replaced.
        """
        if fresh:
            try:
                os.link(self._own, self._path)
            except FileExistsError as error:
                if self._path.is_symlink() and not self._path.exists():
                    raise FileExistsError(errno.EEXIST, error.strerror, str(self._path)) from None
                return False
            except OSError as error:
                if not has_no_links(error):
                    raise
                settle = True  # two that take it at one moment are told apart as those that take an expired one
            else:
                return True
        os.rename(self._own, self._path)  # noqa: PTH104 - beside os.link
        if settle:
            time.sleep(SETTLE_S)
        if self._is_own():
            return True
        self._write()
        return False

    def _write(self) -> None:
        self._own.write_text(json.dumps(asdict(self.owner)))

    def _is_own(self) -> bool:
        owner, _ = read(self._path)
        return owner is not None and owner.token == self.owner.token

    def renew(self) -> Owner | None:
        """Say that this owner lives; returns who has taken the lease, if anybody has.

        Raises:
            OSError: the file system does not let it be renewed now, or is not there.
        """
        asked_t = _boot_time()
        owner, changed_ns = read(self._path)
        if owner is not None and owner.token != self.owner.token:
            return owner
        if owner is None:  # somebody has deleted it, or left a file that names nobody, or the whole directory is gone
            must_be_there(self._run_dir, self._lock)
            self._write()
            try:
                if self._take(fresh=changed_ns is None, settle=False):
                    self._seen_t = asked_t
            finally:
                self._own.unlink(missing_ok=True)
            return None
        self._stay_locked()
        os.utime(self._path)
        self._seen_t = asked_t
        return None

    def _stay_locked(self) -> None:
        """Make and lock `.lock` anew where somebody has deleted or replaced it, as a purge of old files does: the lock of a file
        without a name keeps nobody out. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            must_be_there(self._run_dir, self._lock)
            return
        if _place(self._run_dir) != self._place:
            return  # another directory is there
        path = self._run_dir / LOCK
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            if _flock(fd, path):
                os.dup2(fd, self._lock, inheritable=False)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Give the lease up."""
        if self._is_own():
            self._path.unlink(missing_ok=True)
            os.ftruncate(self._lock, 0)
        os.close(self._lock)

    def leave(self) -> None:
        """Do nothing more about it: another process gives it up, or nobody can. Touches no file system."""
        os.close(self._lock)


def must_be_there(run_dir: Path, lock_fd: int | None = None) -> None:
    """Raises FileNotFoundError where a run directory that is in use is gone: nothing may be made in its place.

    Args:
        lock_fd: the lock that the caller holds. Where another one lies there, a link or a mount leads to another directory now.
    """
    try:
        found = (run_dir / LOCK).stat()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(errno.ENOENT, "is not there any more: is its file system mounted?", str(run_dir)) from None
    # A file system that was mounted anew may be another device.
    if lock_fd is not None and found.st_ino != _inode(lock_fd, found.st_ino):
        raise FileNotFoundError(errno.ENOENT, "is another directory now: has a link or a mount changed?", str(run_dir))


def _inode(fd: int, unknown: int) -> int:
    """Of an open file; `unknown` where its file system says nothing of it any more, as one does whose server is gone."""
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return unknown


def _place(directory: Path) -> tuple[int, int] | None:
    """Which directory it is; None where it cannot be seen."""
    try:
        found = directory.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _owner(pid: int, machine: str, token: str) -> Owner:
    return Owner(socket.gethostname(), pid, own_job(os.environ), machine, token, pid_namespace.own(), clock.zero())


def _boot_time() -> float:
    """Seconds since the machine started, those in which it was suspended included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _flock(fd: int, path: Path) -> bool:
    with contextlib.suppress(BlockingIOError):
        flock(fd, path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
