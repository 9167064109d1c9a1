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

from resilient.agent.main import TOKEN_VARIABLE


@dataclass(frozen=True)
class AgentCommand:
    """What every agent of a run is started with."""

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
                *[sys.executable, "-m", "resilient.agent", "--driver", command.driver, "--node", str(node)],
                *["--procs", str(command.procs), "--run-dir", str(command.run_dir), "--run-id", command.run_id],
                *["--entrypoint", command.entrypoint, "--fence-s", str(command.fence_s), "--addr", self.addr],
                *["--parent", str(os.getpid()), "--log-level", command.log_level],
                *["--health-s", str(command.health_s), "--world", str(command.world), "--device", command.device],
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
