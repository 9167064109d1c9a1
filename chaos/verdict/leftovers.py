"""What a run leaves on one machine when it is over: processes, and files in RAM and on the nodes' own disks.

`python -m chaos.verdict.leftovers RUN_DIR [PLACE ...]` prints that, and how the machine is set up, as a line of JSON: so
other hosts are inspected.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

import psutil

from chaos.verdict import machine
from resilient.agent.memory import directories
from resilient.storage import FILE

PATIENCE_S = 10.0  # for what is just ending


def processes(run_dir: Path) -> list[str]:
    """Those whose command, environment, directory or output names the run directory; this process and those above it aside.

    Waits a little for those that are about to end. What has another terminal than this process is somebody's who looks on: what a
    campaign starts has the same one, or none.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (found := _named(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _named(run_dir: Path) -> list[str]:
    name = re.compile(re.escape(str(run_dir).encode()) + rb"(?![\w.-])")
    this = psutil.Process()
    own, terminals = {this.pid, *(process.pid for process in this.parents())}, (None, this.terminal())
    found = []
    for process in psutil.process_iter(["pid", "name", "status", "terminal"]):
        if process.info["terminal"] not in terminals:
            continue
        traces = b"\0".join(_traces(process.pid)) if process.pid not in own else b""
        if process.info["status"] != psutil.STATUS_ZOMBIE and name.search(traces):
            found.append(f"process {process.pid} ({process.info['name']})")
    return found


def _traces(pid: int) -> list[bytes]:
    """What may name a run, as far as this user may read it."""
    found = []
    for name in ("cmdline", "environ"):
        try:
            found.append(Path(f"/proc/{pid}/{name}").read_bytes())
        except OSError:
            continue
    for name in ("cwd", "fd/1", "fd/2"):
        try:
            found.append(os.fsencode(Path(f"/proc/{pid}/{name}").readlink()))
        except OSError:
            continue
    return found


def files(run_dir: Path) -> list[str]:
    """Heartbeat regions and daemons' files in RAM, what nodes hold on their tiers, and checkpoints that were not finished."""
    found = directories(run_dir)
    described = run_dir / FILE
    tiers = json.loads(described.read_text())["tiers"] if described.is_file() else []
    for tier in tiers:
        for root in map(Path, tier["roots"]):
            found += root.glob("step-*.tmp") if tier["durable"] else [root] if root.is_dir() and any(root.iterdir()) else []
    return [str(path) for path in found]


def main() -> None:
    """For a host that is not this one."""
    run_dir, *places = map(Path, sys.argv[1:])
    found = {"processes": processes(run_dir), "files": files(run_dir), "machine": machine.inspect(places)}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
