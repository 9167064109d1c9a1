"""Launchers: how agents come to run on nodes.

Owns the agents' processes as the driver sees them. A launcher starts one agent per node and tells when it has ended; everything
else goes over the control connection. Here: processes on this machine.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from resilient.wire import TOKEN_VARIABLE


@dataclass(frozen=True)
class AgentCommand:
    """What every agent of a run is started with; `driver`: where to reach it, host:port, several with commas between."""

    driver: str
    procs: int
    run_dir: Path
    run_id: str
    entrypoint: str
    fence_s: float
    health_s: float
    world: int
    device: str
    token: str
    environ: Mapping[str, str]
    log_level: str

    def arguments(self, node: int, addr: str) -> list[str]:
        """The command line of a node's agent. Args: addr: at which other nodes reach it; empty: it finds out."""
        return [
            *[sys.executable, "-m", "resilient.agent", "--driver", self.driver, "--node", str(node)],
            *["--procs", str(self.procs), "--run-dir", str(self.run_dir), "--run-id", self.run_id],
            *["--entrypoint", self.entrypoint, "--fence-s", str(self.fence_s), "--log-level", self.log_level],
            *["--health-s", str(self.health_s), "--world", str(self.world), "--device", self.device],
            *(["--addr", addr] if addr else []),
        ]


class Launcher(Protocol):
    """How agents come to run on nodes; each tells by a callback that an agent has ended."""

    async def launch(self, node: int, incarnation: int) -> None:
        """Start the agent of a node; an earlier one that is still there is ended first."""

    async def close(self, grace_s: float) -> None:
        """Wait until the agents have ended by themselves, at most `grace_s`, then end those that are left."""


class LocalLauncher:
    """Agents as processes of this machine, each in a session of its own, none of which outlives the driver.

    Args:
        command: see AgentCommand.
        ended: called with node, incarnation and a description when an agent's process has ended.
    """

    addr = "127.0.0.1"

    def __init__(self, command: AgentCommand, ended: Callable[[int, int, str], None]) -> None:
        self._command = command
        self._ended = ended
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._watchers: set[asyncio.Task[None]] = set()

    async def launch(self, node: int, incarnation: int) -> None:
        """Start the agent of a node; an earlier one that is still there is killed first."""
        await self._kill(node)
        command = self._command
        log = os.open(command.run_dir / "logs" / f"agent{node}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            process = await asyncio.create_subprocess_exec(
                *[*command.arguments(node, self.addr), "--parent", str(os.getpid())],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **command.environ, TOKEN_VARIABLE: f"{command.token}.{incarnation}"},
                start_new_session=True,
            )
        finally:
            os.close(log)
        self._processes[node] = process
        task = asyncio.create_task(self._watch(node, incarnation, process))
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _watch(self, node: int, incarnation: int, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._ended(node, incarnation, f"process {process.pid} ended by {how}")

    async def _kill(self, node: int) -> None:
        process = self._processes.pop(node, None)
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def close(self, grace_s: float) -> None:
        """Wait until the agents have ended by themselves, at most `grace_s`, then kill those that are left."""
        waits = [asyncio.ensure_future(process.wait()) for process in self._processes.values()]
        if waits:
            await asyncio.wait(waits, timeout=grace_s)
        for node in list(self._processes):
            await self._kill(node)
        for task in list(self._watchers):
            task.cancel()
