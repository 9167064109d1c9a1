"""The agent's end of storage: the node's keeper as a process, and the session that workers are told.

Owns the process. A keeper that dies is started anew and told of the session again; what it held lies in memory and on disks.
"""

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpoint.tiers import session
from resilient import storage

log = logging.getLogger(__name__)

PATIENCE_S = 60.0  # a machine that starts many agents at once is slow
MOST_STARTS, WITHIN_S = 10, 60.0

News = dict[str, Any]


class KeeperProcess:
    """The keeper of this node.

    Args:
        run_dir: where the driver has left the storage's description.
        directory: short path of a directory in RAM, for the keeper's socket; the keeper makes it.
        host: address on which other nodes may read from this one.
    """

    def __init__(self, run_dir: Path, directory: Path, *, node: int, procs: int, host: str, token: str) -> None:
        self._storage = storage.read(run_dir)
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # a keeper that starts slowly holds up nobody who writes here
        self._node, self._procs, self._host, self._token = node, procs, host, token
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self._session: Mapping[str, Any] | None = None
        self._starts: deque[float] = deque()
        self._start()

    @property
    def session_path(self) -> Path:
        """What workers are told."""
        return self._directory / "session.json"

    @property
    def running(self) -> bool:
        """Whether there is a keeper; none where it has died again and again."""
        return self._process is not None

    def fileno(self) -> int:
        """Readable when there is news."""
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.fileno()

    def _start(self) -> None:
        self._pending = b""
        self._starts.append(time.monotonic())
        while self._starts[0] < time.monotonic() - WITHIN_S:
            self._starts.popleft()
        if len(self._starts) > MOST_STARTS:
            log.error("the keeper has died %d times within a minute; going on without snapshots", MOST_STARTS)
            self._process = None
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "checkpoint.tiers.keeper"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self.send(self._settings())
        if self._session is not None:
            self.send({"do": "inventory"})
            self.send(self._session)

    def _settings(self) -> dict[str, Any]:
        memory, *others = self._storage["tiers"]
        places = [Path(memory["roots"][self._node])]
        places += [Path(tier["roots"][self._node]) / "slabs" for tier in others if not tier["durable"]]
        places.append(Path(others[-1]["roots"][0]) / ".slabs" / f"node{self._node}")
        return {
            "node": self._node,
            "host": self._host,
            "token": self._token,
            "directory": str(self._directory),
            "memory": {"name": memory["name"], "places": [str(place) for place in places], "slabs": self._storage["slabs"]},
            "tiers": [
                {
                    "name": tier["name"],
                    "durable": tier["durable"],
                    "path": tier["roots"][0 if tier["durable"] else self._node],
                    "keep_last": tier["keep_last"],
                    "keep_every": tier["keep_every"],
                    "max_bytes_per_s": tier["max_bytes_per_s"],
                    "mark": storage.IDENTITY if tier["durable"] else None,
                }
                for tier in others
            ],
        }

    def send(self, order: Mapping[str, Any]) -> None:
        """Give an order; one that a dying keeper does not get is given again by whoever decides."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
                self._process.stdin.flush()

    def receive(self) -> list[News]:
        """The news that has come; call it when this is readable. A keeper that has died is started anew."""
        assert self._process is not None
        data = os.read(self.fileno(), 1 << 20)
        if not data:
            status = self._process.wait()
            log.warning("the keeper has died (status %d); starting it anew", status)
            self._close_pipes()
            self._start()
            return []
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def inventory(self) -> tuple[News, list[News]]:
        """What this node holds, and other news that came meanwhile."""
        other: list[News] = []
        deadline = time.monotonic() + PATIENCE_S
        self.send({"do": "inventory"})
        asked = self._process
        while self.running and time.monotonic() < deadline:
            if not select.select([self], [], [], max(0.0, deadline - time.monotonic()))[0]:
                break
            for news in self.receive():
                if news["what"] == "inventory":
                    return news, other
                other.append(news)
            if self._process is not asked:
                self.send({"do": "inventory"})
                asked = self._process
        return {"what": "inventory", "parts": [], "address": ""}, other

    def begin(self, *, generation: int, node_rank: int, nodes: int, told: Mapping[str, Any], renew: bool) -> None:
        """A generation begins. Args: told: the driver's word: `candidates`, `mtbf_s`. Raises OSError."""
        first = node_rank * self._procs
        common = {"generation": generation, "first_rank": first, "ranks": self._procs, "nodes": nodes}
        holdings = [
            {**each, "holdings": [{**holding, **self._known(holding)} for holding in each["holdings"]]}
            for each in told["candidates"]
        ]
        tiers = [{name: tier[name] for name in ("name", "every_steps", "every_s")} for tier in self._storage["tiers"]]
        said = {**common, "node": node_rank, "directory": str(self._directory), "tiers": tiers}
        session.write(self.session_path, {**said, "mtbf_s": told["mtbf_s"], "candidates": holdings})
        self._session = {"do": "session", **common, "node_rank": node_rank}
        self.send({**self._session, "renew": renew})

    def _known(self, holding: Mapping[str, Any]) -> dict[str, Any]:
        return {"token": self._token} if "address" in holding else {}

    def clear(self, tiers: list[str]) -> None:
        """Let the keeper forget these tiers; returns when it has, or takes too long."""
        self.send({"do": "clear", "tiers": tiers})
        deadline = time.monotonic() + PATIENCE_S
        asked = self._process
        while self.running and self._process is asked and select.select([self], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if any(news["what"] == "cleared" for news in self.receive()):
                return

    def close(self) -> None:
        """End the keeper."""
        process = self._process
        if process is None:
            return
        self._process = None
        with suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2.0)
        if process.stdout is not None:
            process.stdout.close()

    def _close_pipes(self) -> None:
        assert self._process is not None
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
