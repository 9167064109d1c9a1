"""What a machine grants its processes: memory, shared memory, open files, processes, ports.

Reads /proc and /sys/fs/cgroup, which do not hang; the roots of both can be given. Judging is pure.
"""

import os
import resource
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from resilient.health.report import Finding, Verdict, size

SHARED_MEMORY = Path("/dev/shm")
CONTAINER_SHM_BYTES = 64 << 20  # what containers have, unless they are told otherwise
LITTLE_SHM_BYTES = 16 << 20
LEAST_FILES, FILES_PER_RANK = 256, 4
LEAST_PROCESSES, PROCESSES_PER_RANK = 64, 64  # threads count
RUNTIME_PROCESSES, FEWEST_PER_RANK = 12, 3  # without any of a script's or of torch's own: driver, agent and daemon; a rank
LEAST_PORTS = 2000
LOCKED_BYTES = 1 << 30
LEAST_FILE_BYTES = 64 << 20  # heartbeat regions, logs and the ledger need as much
REACH_S = 3.0
_UNLIMITED = 1 << 60  # cgroup v1 writes no limit as a very large one


@dataclass(frozen=True)
class Room:
    """Memory and what counts like it; None where there is no limit or nothing is known.

    Attributes:
        available_bytes: what new processes can have, as far as kernel and cgroup let them.
        shm_bytes, shm_free_bytes: of /dev/shm.
    """

    available_bytes: int
    shm_bytes: int | None
    shm_free_bytes: int | None


def memory_of(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup"), shm: Path = SHARED_MEMORY) -> Room:
    """What this machine has now."""
    available = psutil.virtual_memory().available
    left = _cgroup_left("memory", proc, cgroups)
    if left is not None:
        available = min(available, left)
    try:
        shared = os.statvfs(shm)
    except OSError:
        return Room(available, None, None)
    return Room(available, shared.f_blocks * shared.f_frsize, shared.f_bavail * shared.f_frsize)


def judge_memory(room: Room, needed_bytes: int | None, held_bytes: int = 0) -> list[Finding]:
    """Whether it is enough.

    Args:
        needed_bytes: what snapshots in RAM will take, where that is known; ranks come on top.
        held_bytes: what the campaign's snapshots take already.
    """
    measured = {"available_bytes": room.available_bytes}
    if needed_bytes is not None and room.available_bytes + held_bytes < needed_bytes:
        here, need = size(room.available_bytes), size(needed_bytes)
        need += f", {size(held_bytes)} of it already" if held_bytes else ""
        text = f"{here} are available, and snapshots in RAM alone take {need}; use fewer ranks per node, or no tier in RAM"
        found = [Finding("memory", "fail", text, measured)]
    else:
        need = "" if needed_bytes is None else f", {size(needed_bytes)} of it for snapshots"
        found = [Finding("memory", "ok", f"{size(room.available_bytes)} are available{need}", measured)]
    if room.shm_bytes is None or room.shm_free_bytes is None:
        return [*found, Finding("shared memory", "warn", "there is no /dev/shm; snapshots and NCCL go without it")]
    measured = {"size_bytes": room.shm_bytes, "free_bytes": room.shm_free_bytes}
    if room.shm_free_bytes < LITTLE_SHM_BYTES:
        text = f"only {size(room.shm_free_bytes)} of {SHARED_MEMORY} are free; look for files that dead jobs have left there"
        return [*found, Finding("shared memory", "fail", text, measured)]
    if room.shm_bytes <= CONTAINER_SHM_BYTES:
        text = f"{SHARED_MEMORY} has {size(room.shm_bytes)}, as containers do by default; start it with --shm-size or --ipc=host"
        return [*found, Finding("shared memory", "warn", text, measured)]
    return [*found, Finding("shared memory", "ok", f"{size(room.shm_free_bytes)} of {SHARED_MEMORY} are free", measured)]


@dataclass(frozen=True)
class Limits:
    """What a process of this user may have; None where there is no limit.

    Attributes:
        processes: threads count; what is left of the limit that leaves the fewest.
        locked_bytes: memory that RDMA may pin; root may pin any.
        ports: ephemeral ones, for outgoing connections and for our listening ones.
        file_bytes: that a file may have.
        processes_by: what sets the limit of processes.
    """

    files: int | None
    processes: int | None
    locked_bytes: int | None
    ports: int | None
    file_bytes: int | None = None
    processes_by: Literal["pids.max", "ulimit -u"] = "pids.max"


def limits_of(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Limits:
    """What holds for this process, and so for those it starts."""
    left = _cgroup_left("pids", proc, cgroups)
    root = os.geteuid() == 0
    by: Literal["pids.max", "ulimit -u"] = "pids.max"
    if not root and (allowed := _limit(resource.RLIMIT_NPROC)) is not None:
        own = max(0, allowed - _tasks(os.getuid(), proc))
        if left is None or own < left:
            left, by = own, "ulimit -u"
    try:
        first, last = map(int, (proc / "sys/net/ipv4/ip_local_port_range").read_text().split())
        ports: int | None = last - first + 1
    except (OSError, ValueError):
        ports = None
    locked_bytes = None if root else _limit(resource.RLIMIT_MEMLOCK)
    return Limits(_limit(resource.RLIMIT_NOFILE), left, locked_bytes, ports, _limit(resource.RLIMIT_FSIZE), by)


def too_few_processes(limits: Limits, ranks: int, *, running: bool = False) -> str | None:
    """Why so many ranks cannot even be started, whatever they do; None where they can.

    Args:
        running: the runtime runs already, and counts as used.
    """
    fewest = FEWEST_PER_RANK * ranks + (0 if running else RUNTIME_PROCESSES)
    return _processes_left(limits, ranks, fewest) if limits.processes is not None and limits.processes < fewest else None


def too_few_files(limits: Limits, world: int) -> str | None:
    """Why so many ranks, of all nodes, cannot have all the files and connections open that they need; None where they can."""
    files = LEAST_FILES + FILES_PER_RANK * world
    if limits.files is None or limits.files >= files:
        return None
    ranks = f"{world} rank{'s need' if world > 1 else ' needs'}"
    return f"a process may have {limits.files:,} files open, and {ranks} {files:,}; raise it (ulimit -n, LimitNOFILE)"


def _processes_left(limits: Limits, ranks: int, wanted: int) -> str:
    text = (
        f"{limits.processes:,} more processes and threads may run, and {ranks} ranks want {wanted:,}; raise {limits.processes_by}"
    )
    return f"{text}, or end others of this user" if limits.processes_by == "ulimit -u" else text


def judge_limits(limits: Limits, *, ranks: int, world: int, rdma: bool, running: bool = False) -> list[Finding]:
    """Whether they are enough.

    Args:
        ranks: of this node.
        world: ranks of all nodes: each may be connected to each.
        rdma: whether there are ports that pin memory.
        running: the runtime runs already on this node.
    """
    files = LEAST_FILES + FILES_PER_RANK * world
    measured = {"allowed": limits.files if limits.files is not None else "unlimited", "needed": files}
    if (too_few := too_few_files(limits, world)) is not None:
        found = [Finding("open files", "fail", too_few, measured)]
    else:
        found = [Finding("open files", "ok", "enough may be open", measured)]
    processes = LEAST_PROCESSES + PROCESSES_PER_RANK * ranks
    measured = {"left": limits.processes if limits.processes is not None else "unlimited", "needed": processes}
    if (impossible := too_few_processes(limits, ranks, running=running)) is not None:
        found.append(Finding("processes", "fail", impossible, measured))
    elif limits.processes is not None and limits.processes < processes:
        found.append(Finding("processes", "warn", _processes_left(limits, ranks, processes), measured))
    else:
        found.append(Finding("processes", "ok", "enough may run", measured))
    if rdma and limits.locked_bytes is not None and limits.locked_bytes < LOCKED_BYTES:
        text = f"{size(limits.locked_bytes)} may be locked, and InfiniBand pins its buffers; set ulimit -l unlimited for jobs"
        found.append(Finding("locked memory", "warn", text, {"allowed_bytes": limits.locked_bytes}))
    if limits.ports is not None and limits.ports < LEAST_PORTS:
        text = f"there are {limits.ports:,} ephemeral ports; widen net.ipv4.ip_local_port_range"
        found.append(Finding("ephemeral ports", "warn", text, {"ports": limits.ports}))
    if limits.file_bytes is not None:
        text = f"a file may have {size(limits.file_bytes)}, and files of checkpoints and snapshots are as large as a rank's part; "
        verdict: Verdict = "fail" if limits.file_bytes < LEAST_FILE_BYTES else "warn"
        found.append(Finding("file size", verdict, f"{text}raise it (ulimit -f, LimitFSIZE)", {"allowed_bytes": limits.file_bytes}))
    return found


def reach(address: str) -> Finding:
    """Whether a port of this node's address can be listened on and connected to."""
    try:
        with socket.create_server((address, 0), family=_family(address)) as server:
            server.settimeout(REACH_S)
            host = server.getsockname()[:2]
            with socket.create_connection(host, timeout=REACH_S) as near:
                far, _ = server.accept()
                with far:
                    far.settimeout(REACH_S)
                    near.sendall(b"?")
                    received = far.recv(1) == b"?"
    except OSError as error:
        text = f"no connection can be made to {address}: {error.strerror or error}; see the node's name, addresses and firewall"
        return Finding("address", "fail", text)
    if not received:
        return Finding("address", "fail", f"a connection to {address} carries nothing; see the node's firewall")
    return Finding("address", "ok", f"{address} can be listened on and connected to", {"address": address})


def _family(address: str) -> socket.AddressFamily:
    return socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _tasks(user: int, proc: Path) -> int:
    """Processes of a user, by their threads; those that hide their user do not count."""
    count = 0
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if process.stat().st_uid == user:
                count += len(os.listdir(process / "task"))  # noqa: PTH208 - names alone
    return count


@dataclass(frozen=True)
class _Counter:
    """What a cgroup has of one resource, by the names of its files.

    Attributes:
        most, used: the limit, and what counts against it.
        idle: the number in memory.stat of bytes that count as used, and that the kernel drops before it refuses memory.
    """

    most: str
    used: str
    idle: str = ""

    def left(self, place: Path) -> int | None:
        """What one cgroup still grants, whatever those above it do; None where it has no limit."""
        most = _number(place / self.most)
        if most is None or most >= _UNLIMITED:
            return None
        return max(0, most - max(0, (_number(place / self.used) or 0) - self._idle(place)))

    def _idle(self, place: Path) -> int:
        if not self.idle:
            return 0
        try:
            lines = (place / "memory.stat").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith(f"{self.idle} ")), 0)


_PIDS = _Counter("pids.max", "pids.current")
_V1 = {"memory": _Counter("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), "pids": _PIDS}
_V2 = {"memory": _Counter("memory.max", "memory.current", "inactive_file"), "pids": _PIDS}


def _cgroup_left(name: Literal["memory", "pids"], proc: Path, cgroups: Path) -> int | None:
    """The least that this cgroup and those above it still grant, each by its own limit and its own use; None without a limit."""
    try:
        lines = [line.split(":", 2) for line in (proc / "self/cgroup").read_text(errors="surrogateescape").splitlines()]
    except OSError:
        return None
    v1 = next((path for _, names, path in lines if name in names.split(",")), None)
    v2 = next((path for number, names, path in lines if (number, names) == ("0", "")), None)
    path, mount, counter = (v2, cgroups, _V2[name]) if v1 is None else (v1, cgroups / name, _V1[name])
    if path is None:
        return None
    here = mount / path.strip("/")
    places = [place for place in (here, *here.parents) if place.is_relative_to(mount)]
    return min((left for place in places if (left := counter.left(place)) is not None), default=None)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # a limit may be the word max
        return None
