"""The processes of a campaign that run on this machine, for a person who wants to look at one, or to kill it.

Owns their names: `driver`, and `rank 3`. Reads what driver and ranks have written about themselves, and writes nothing.
"""

import contextlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import psutil

from checkpoint.ownership import user_name
from resilient import ledger, pid_namespace
from resilient.access import READ, must_be_files
from resilient.agent import NAME
from resilient.agent.memory import AgentRecord, agent_records, region_directories, told_nonce
from resilient.driver.lease import Owner, holder, machine_id
from resilient.exits import EnvironmentUnusable
from resilient.heartbeat.region import peek
from resilient.lifeline import name_of
from resilient.past import record as past

DRIVER = "driver"


def must_be_run_directory(run_dir: Path) -> None:
    """Raises EnvironmentUnusable if it is none, or where a file of it is a pipe or a device, which would be waited for."""
    try:
        must_be_files(run_dir, READ)
    except OSError as error:
        raise EnvironmentUnusable(f"cannot read {error.filename}: {error.strerror}") from error
    if not any(part.is_file() for part in ledger.parts(run_dir / ledger.EVENTS)):
        raise EnvironmentUnusable(_why_none(run_dir))


def _why_none(run_dir: Path) -> str:
    """What keeps a path from being a run directory. Raises OSError."""
    if run_dir.is_dir():
        return f"{run_dir} is not a run directory: it has no {ledger.EVENTS}"
    return f"{run_dir} is a file; a run directory is wanted" if run_dir.exists() else f"there is no directory {run_dir}"


def other_owner(run_dir: Path) -> str | None:
    """Whose a campaign is, where it is not the caller's: what it has on this machine cannot be seen then. Raises OSError."""
    owner = run_dir.stat().st_uid
    return None if owner == os.geteuid() else user_name(owner)


def driver_pid(owner: Owner) -> int | None:
    """The process id, in the PID namespace of the caller, of the driver that has a lease; None where it is not seen from here."""
    if owner.machine != machine_id() or owner.pid <= 0:
        return None
    return pid_namespace.translated(owner.pid, owner.pid_namespace)


def out_of_reach(owner: Owner) -> str:
    """In words: a driver that is not seen from here, and where it is."""
    if owner.pid <= 0 or owner.machine != machine_id():
        return f"{owner}, which is not to be reached from here"
    return f"{owner}, in another PID namespace, as of a container, which is not to be reached from here"


def local_pids(run_dir: Path, named: str | None) -> dict[str, int]:
    """Process id by name: the driver, then the ranks in order. Those of another user's campaign are not seen.

    Args:
        named: how the campaign was started with the directory, which is how ranks know it; None: not known.
    """
    found: dict[str, int] = {}
    owner = holder(run_dir)
    if owner is not None and (driver := driver_pid(owner)) is not None:
        found[DRIVER] = driver
    newest: dict[int, tuple[int, int]] = {}  # generation and process id by rank
    known_as, nonce = Path(named or run_dir.absolute()), told_nonce(run_dir)
    regions = [path for directory in region_directories(known_as, nonce) for path in directory.glob("g*-rank*")]
    numbered = pid_namespace.by_own_number() if regions else {}
    agents = _agents(known_as, nonce, numbered).keys()
    for path in regions:
        name = re.fullmatch(r"g(\d+)-rank(\d+)", path.name)
        if name is None:
            continue
        with contextlib.suppress(OSError, ValueError):  # another user's, or gone in this moment
            generation, rank = int(name[1]), int(name[2])
            pid = _rank_of(path, numbered, agents)
            if pid is not None:
                newest[rank] = max(newest.get(rank, (0, 0)), (generation, pid))
    return found | {f"rank {rank}": newest[rank][1] for rank in sorted(newest)}


def local_agents(run_dir: Path) -> dict[int, AgentRecord]:
    """What the agents that run on this machine have left, by process id. Args: run_dir: as they know it."""
    return _agents(run_dir, told_nonce(run_dir), pid_namespace.by_own_number())


def _agents(run_dir: Path, nonce: str, numbered: Mapping[int, Sequence[int]]) -> dict[int, AgentRecord]:
    """The number of one that was killed may be another process's by now."""
    records = agent_records(run_dir, nonce)
    return {pid: record for record in records for pid in numbered.get(record.pid, ()) if name_of(pid) == NAME}


def _rank_of(region: Path, numbered: Mapping[int, Sequence[int]], agents: Collection[int]) -> int | None:
    """The process of a rank: what is left of one that was killed has a number that may be another process's by now.

    Args:
        numbered: as of `pid_namespace.by_own_number`.
        agents: of the run: a program that a script has put in the place of a rank is known by them alone.

    Raises OSError where the region is not there, ValueError where it is none.
    """
    processes = numbered.get(peek(region).pid, ())
    return next((pid for pid in processes if _has_mapped(pid, region) or _is_below(pid, agents)), None)


def _has_mapped(pid: int, path: Path) -> bool:
    """Whether a process has a file in its memory. Raises OSError where that is not there."""
    file = path.stat()
    device, inode = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}".encode(), str(file.st_ino).encode()
    try:
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
    except OSError:  # it has ended, or is another user's
        return False
    return any(line.split(None, 5)[3:5] == [device, inode] for line in lines)


def _is_below(pid: int, agents: Collection[int]) -> bool:
    """Whether one of these has started a process, or what has started that."""
    with contextlib.suppress(psutil.Error):
        return any(parent.pid in agents for parent in psutil.Process(pid).parents())
    return False


def process_name(who: str) -> str:
    """The name of what is called by `driver` or by the number of a rank. Raises ValueError."""
    if who == DRIVER:
        return who
    if re.fullmatch(r"[0-9]{1,9}", who) is None:
        raise ValueError(f"wanted is RANK (a number) or {DRIVER}")
    return f"rank {int(who)}"


def local_pid(run_dir: Path, name: str) -> int:
    """The process id of the driver, or of a rank. Args: name: as of `process_name`.

    Raises:
        EnvironmentUnusable: it does not run on this machine, or it is another user's and cannot be seen.
    """
    must_be_run_directory(run_dir)
    found = local_pids(run_dir, past.read(run_dir).run_dir)
    if name not in found:
        if (other := other_owner(run_dir)) is not None:
            raise EnvironmentUnusable(f"{name} of {run_dir} cannot be seen: the campaign is that of {other}, who can ask for it")
        there = f"what does: {', '.join(found)}" if found else "nothing of this campaign does"
        raise EnvironmentUnusable(f"{name} of {run_dir} does not run on this machine; {there}")
    return found[name]
