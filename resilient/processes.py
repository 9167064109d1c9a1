"""The processes of a campaign that run on this machine, for a person who wants to look at one, or to kill it.

Owns their names: `driver`, and `rank 3`. Reads what driver and ranks have written about themselves, and writes nothing.
"""

import contextlib
import re
from pathlib import Path

import psutil

from resilient import ledger
from resilient.agent.memory import region_directory
from resilient.driver.lease import holder, machine_id
from resilient.exits import EnvironmentUnusable
from resilient.heartbeat_region import peek

DRIVER = "driver"


def must_be_run_directory(run_dir: Path) -> None:
    """Raises EnvironmentUnusable if it is none."""
    if not (run_dir / ledger.EVENTS).is_file():
        raise EnvironmentUnusable(f"{run_dir} is not a run directory: it has no {ledger.EVENTS}")


def local_pids(run_dir: Path) -> dict[str, int]:
    """Process id by name: the driver, then the ranks in order. Those of another user's campaign are not seen."""
    found: dict[str, int] = {}
    owner = holder(run_dir)
    if owner is not None and owner.machine == machine_id() and owner.pid:
        found[DRIVER] = owner.pid
    named = run_dir.absolute()  # ranks know the directory by the name that the campaign was started with
    for line in ledger.read(run_dir / ledger.EVENTS):
        if line.get("event") == "run_started" and isinstance(line.get("run_dir"), str):
            named = Path(line["run_dir"])
    newest: dict[int, tuple[int, int]] = {}  # generation and process id by rank
    place = region_directory(named, 0)
    for path in place.parent.glob(f"{place.name.removesuffix('0')}*/g*-rank*"):
        name = re.fullmatch(r"g(\d+)-rank(\d+)", path.name)
        if name is None:
            continue
        with contextlib.suppress(OSError, ValueError):  # another user's, or gone in this moment
            generation, rank, pid = int(name[1]), int(name[2]), peek(path).pid
            if pid and psutil.pid_exists(pid):
                newest[rank] = max(newest.get(rank, (0, 0)), (generation, pid))
    return found | {f"rank {rank}": newest[rank][1] for rank in sorted(newest)}


def local_pid(run_dir: Path, who: str) -> int:
    """The process id of the driver, or of a rank by its number.

    Raises:
        EnvironmentUnusable: it does not run on this machine.
    """
    must_be_run_directory(run_dir)
    found, name = local_pids(run_dir), who if who == DRIVER else f"rank {who}"
    if name not in found:
        there = f"what does: {', '.join(found)}" if found else "nothing of this campaign does"
        raise EnvironmentUnusable(f"{name} of {run_dir} does not run on this machine; {there}")
    return found[name]
