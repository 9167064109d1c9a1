"""What a node has in RAM beside its tiers: a directory for the heartbeat regions of its ranks, and one for its snapshot daemon.

Both are found by run directory and node. Beside the regions are the pipes that the ranks print to, and a file that says which
process is the agent: what it has forked shares its command line, and an agent that was started ahead does not name its run there.
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from resilient.heartbeat_region import RAISED, Record, salvage

FILE = "agent.json"


def region_directory(run_dir: Path, node: int) -> Path:
    """Where a node's heartbeat regions of this run are: in RAM, and the same for every agent that the node has."""
    return _in_memory(run_dir, f"node{node}")


def daemon_directory(run_dir: Path, node: int) -> Path:
    """Where a node's snapshot daemon has its socket."""
    return _in_memory(run_dir, f"node{node}-daemon")


def _in_memory(run_dir: Path, what: str) -> Path:
    digest = hashlib.blake2b(str(run_dir).encode(), digest_size=6).hexdigest()
    memory = Path("/dev/shm")
    root = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return root / f"resilient-{os.getuid()}-{digest}-{what}"


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

    Raises PermissionError if it belongs to another user.
    """
    regions.mkdir(mode=0o700, exist_ok=True)
    if regions.stat().st_uid != os.getuid():
        raise PermissionError(f"{regions} belongs to another user")
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
    """Attributes: driver: where the agent has reached it, host:port, several with commas between."""

    pid: int
    driver: str


def leave_record(run_dir: Path, node: int, driver: str) -> None:
    """Say that this process is the agent; the directory of its heartbeat regions is there. Raises OSError."""
    path = region_directory(run_dir, node) / FILE
    new = path.with_suffix(".new")
    new.write_text(json.dumps(asdict(AgentRecord(os.getpid(), driver))))
    new.replace(path)


def forget_record(run_dir: Path, node: int) -> None:
    (region_directory(run_dir, node) / FILE).unlink(missing_ok=True)


def agent_record(run_dir: Path, node: int, root: Path = Path("/")) -> AgentRecord | None:
    """What a node's agent has left, on this machine; None where there is none. The process may have died since.

    Args:
        root: of the file system that the agent sees.
    """
    try:
        return AgentRecord(**json.loads((root / (region_directory(run_dir, node) / FILE).relative_to("/")).read_text()))
    except (OSError, ValueError, TypeError):
        return None
