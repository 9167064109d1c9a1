"""What a node has in RAM beside its tiers: a directory for the heartbeat regions of its ranks, and one for its snapshot daemon.

Both are found by run directory, campaign (`resilient.storage.nonce_of`), node and owner (`checkpoint.safe_dir`): containers with
one `/dev/shm` may have run directories of one path. Beside the regions are the pipes that ranks print to, and a file that says
which process is the agent: what it has forked shares its command line, and an agent that was started ahead does not name its run
there.
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from checkpoint import safe_dir
from checkpoint.errors import naming
from checkpoint.typed import built
from resilient import storage
from resilient.heartbeat.layout import RAISED
from resilient.heartbeat.region import Record, salvage

FILE = "agent.json"
MEMORY = Path("/dev/shm")
LEAST_BYTES = 1 << 20  # for the heartbeat regions of a node
LEAST_FILES = 64


def region_directory(run_dir: Path, node: int, root: Path = Path("/"), *, nonce: str | None = None) -> Path:
    """Where a node's heartbeat regions of this run are on this machine; where there are none, a new name for them, not made yet.

    Args:
        root: of the file system that is meant.
        nonce: of the campaign; None: that which the run directory tells now.
    """
    return _in_memory(run_dir, nonce, f"node{node}", root)


def daemon_directory(run_dir: Path, node: int, *, nonce: str | None = None) -> Path:
    """Where a node's snapshot daemon has its socket; a new name where there is none. Args: nonce: as of `region_directory`."""
    return _in_memory(run_dir, nonce, f"node{node}-daemon")


def directories(run_dir: Path, nonce: str | None = None) -> list[Path]:
    """All such directories of this run that are on this machine, of every node. Args: nonce: as of `region_directory`."""
    return [path for path in _named(run_dir, nonce) if safe_dir.is_private(path)]


def namesakes(run_dir: Path) -> list[Path]:
    """What has such a name, and is another user's or a link; nobody uses it."""
    return [path for path in _named(run_dir, None) if not safe_dir.is_private(path)]


def _named(run_dir: Path, nonce: str | None) -> list[Path]:
    ours = re.compile(rf"{re.escape(_prefix(run_dir, nonce))}-node\d+(-daemon)?(-[0-9a-f]{{16}})?")
    places = sorted({MEMORY, Path(tempfile.gettempdir())})
    return [path for place in places if place.is_dir() for path in sorted(place.iterdir()) if ours.fullmatch(path.name)]


def region_directories(run_dir: Path, nonce: str | None = None) -> list[Path]:
    """Those with heartbeat regions. Args: nonce: as of `region_directory`."""
    return [path for path in directories(run_dir, nonce) if not re.search(r"-node\d+-daemon", path.name)]


def _in_memory(run_dir: Path, nonce: str | None, what: str, root: Path = Path("/")) -> Path:
    """Found by run directory, campaign, node and owner; the random part of the name keeps others from making it first."""
    parents = [root / place.relative_to("/") for place in (MEMORY, Path(tempfile.gettempdir()))]
    prefix = f"{_prefix(run_dir, nonce)}-{what}"
    for parent in parents:
        if found := safe_dir.find(parent, prefix):
            return found[0]
    return safe_dir.new(next(filter(_has_room, parents), parents[-1]), prefix)


def _has_room(parent: Path) -> bool:
    """Whether what a node keeps can be made there: other jobs may have left RAM full."""
    try:
        free = os.statvfs(parent)
    except OSError:
        return False
    room = free.f_bavail * free.f_frsize >= LEAST_BYTES and (not free.f_files or free.f_favail >= LEAST_FILES)
    return room and os.access(parent, os.W_OK)


def _prefix(run_dir: Path, nonce: str | None) -> str:
    nonce = told_nonce(run_dir) if nonce is None else nonce
    digest = hashlib.blake2b(str(run_dir).encode() + nonce.encode(), digest_size=6).hexdigest()
    return f"resilient-{os.getuid()}-{digest}"


def told_nonce(run_dir: Path) -> str:
    """Of the campaign that is in a run directory now; empty where none has begun, or it cannot be told."""
    try:
        return storage.nonce_of(storage.read(run_dir))
    except (OSError, ValueError):
        return ""


def region_name(generation: int, rank: int) -> str:
    return f"g{generation}-rank{rank}"


def pipe_name(generation: int, rank: int) -> str:
    """Of the pipe that a rank prints to."""
    return f"rank{rank}.g{generation}.output"


@dataclass(frozen=True)
class Salvaged:
    """What a killed agent has left of one rank. The file is removed once its records are durable elsewhere."""

    path: Path
    generation: int
    rank: int
    records: tuple[Record, ...]


def salvaged(regions: Path) -> list[Salvaged]:
    """What a killed agent has left here. The directory is there then, and has nothing else in it.

    Raises UnsafeDirectory where it is another user's, or a link.
    """
    safe_dir.make_private(regions)
    found = []
    for path in sorted(regions.iterdir()):
        name = re.fullmatch(r"g(\d+)-rank(\d+)", path.name)
        records: tuple[Record, ...] = ()
        if name is not None:
            with contextlib.suppress(ValueError):  # cut off before it was a region
                records = tuple(record for record in salvage(path) if record.event != RAISED)
        if name is not None and records:
            found.append(Salvaged(path, int(name[1]), int(name[2]), records))
        else:
            path.unlink()
    return found


@dataclass(frozen=True)
class AgentRecord:
    """Attributes: driver: where the agent has reached it, host:port, several with commas between; addr: of the node."""

    pid: int
    driver: str
    addr: str = ""


def leave_record(regions: Path, driver: str, addr: str = "") -> None:
    """Say that this process is the agent; the directory of its heartbeat regions is there. Raises OSError."""
    path = regions / FILE
    new = path.with_suffix(".new")
    with naming(new):
        new.write_text(json.dumps(asdict(AgentRecord(os.getpid(), driver, addr))))
    new.replace(path)


def keep(regions: Path, driver: str, addr: str) -> None:
    """Make the directory and its record anew where somebody has cleared them, as the epilog of another job may. Raises OSError."""
    if not (regions / FILE).exists():
        safe_dir.make_private(regions)
        leave_record(regions, driver, addr)


def clear_up(regions: Path) -> None:
    """Of an agent that is gone, leave nothing but records that are durable nowhere else."""
    with contextlib.suppress(OSError):
        (regions / FILE).unlink(missing_ok=True)
        regions.rmdir()


def agent_record(run_dir: Path, node: int, root: Path = Path("/")) -> AgentRecord | None:
    """What a node's agent has left, on this machine; None where there is none. The process may have died since.

    Args:
        root: of the file system that the agent sees.
    """
    return _record(region_directory(run_dir, node, root))


def _record(place: Path) -> AgentRecord | None:
    try:
        return read_record(place / FILE)
    except OSError:
        return None


def read_record(path: Path) -> AgentRecord | None:
    """The record in a file, if it is one. Raises OSError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=built(AgentRecord))
    except (ValueError, RecursionError):
        return None


def agent_records(run_dir: Path, nonce: str | None = None) -> list[AgentRecord]:
    """What all agents of this run on this machine have left. Args: nonce: as of `region_directory`."""
    return [record for place in region_directories(run_dir, nonce) if (record := _record(place)) is not None]
