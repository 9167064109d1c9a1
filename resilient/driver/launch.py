"""Launchers: how agents come to run on nodes.

Owns the agents' processes as the driver sees them. A launcher starts one agent per node and tells when it has ended; everything
else goes over the control connection. Here: processes on this machine.
"""

import asyncio
import json
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from resilient import visible_gpus
from resilient.imports import shadowing
from resilient.logs.paths import agent_log
from resilient.protocol.connection import TOKEN_VARIABLE

log = logging.getLogger(__name__)

LOOK_S = 0.05  # at a process whose end the kernel cannot tell
GONE_S = 10.0  # a process that was killed and is not gone by then sits in the kernel
AGENT = shadowing.running("resilient.agent")


@dataclass(frozen=True)
class AgentCommand:
    """What every agent of a run is started with.

    Attributes:
        driver: where to reach it, host:port, several with commas between.
        binding: see the config's `cluster.binding`.
        sharing: agents of this run on one machine.
    """

    driver: str
    procs: int
    run_dir: Path
    run_id: str
    entrypoint: str
    fence_s: float
    health_s: float
    world: int
    device: str
    token: str = field(repr=False)
    environ: Mapping[str, str]
    log_level: str
    binding: str = "none"
    sharing: int = 1

    def arguments(self, node: int | None, addr: str, *, prepare_node: int | None) -> list[str]:
        """What stands behind AGENT on the command line of a node's agent.

        Args:
            node: index of its node; None: it finds out, as one of many of a step.
            addr: at which other nodes reach it; empty: it finds out.
            prepare_node: the node whose agent runs the entry point's preparation; None: another one does, or it was run.
        """
        return [
            *["--driver", self.driver],
            *(["--node", str(node)] if node is not None else []),
            *["--procs", str(self.procs), "--run-dir", str(self.run_dir), "--run-id", self.run_id],
            *["--entrypoint", self.entrypoint, "--fence-s", str(self.fence_s), "--log-level", self.log_level],
            *["--health-s", str(self.health_s), "--world", str(self.world), "--device", self.device],
            *["--binding", self.binding, "--sharing", str(self.sharing)],
            *(["--addr", addr] if addr else []),
            *(["--prepare-node", str(prepare_node)] if prepare_node is not None else []),
        ]


class Launcher(Protocol):
    """How agents come to run on nodes; each tells by a callback that an agent has ended."""

    async def launch(self, node: int, incarnation: int, *, prepare: bool) -> None:
        """Start the agent of a node; an earlier one that is still there is ended before the new one does anything.

        One that cannot be started is told as one that has ended.

        Args:
            incarnation: how many agents this node has had with this one.
            prepare: whether this agent runs the entry point's preparation.
        """

    def connected(self, node: int) -> None:
        """The agent of a node that was launched has connected."""

    async def close(self, grace_s: float) -> None:
        """Wait until the agents have ended by themselves, at most `grace_s`, then end those that are left."""


class AgentAhead:
    """An agent's process that imports torch while this command still finds out what it is to do.

    Nothing of a config is known to it until `become`; without that it ends with this process, or at `close`.
    """

    def __init__(self) -> None:
        # What may compute reads the number of threads when it is loaded; ranks set it anew.
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [*AGENT, "--ahead", "--parent", str(os.getpid())]
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=environ, start_new_session=True
        )

    def become(self, arguments: Sequence[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes] | None:
        """The process, as that agent; None if it cannot, or has become one before.

        Args:
            arguments: what would stand behind `python -m resilient.agent`.
            environ: on top of this process's own.
            log: gets its output.
        """
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return None
        try:
            with process.stdin as orders:
                orders.write(json.dumps({"arguments": arguments, "environ": dict(environ), "log": str(log)}).encode())
        except BrokenPipeError:
            process.wait()
            return None
        return process

    def close(self) -> None:
        """End it, if it has become nothing."""
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # it reads a file of a server that does not answer
                self._process.wait(GONE_S)
            self._process = None


class LocalLauncher:
    """Agents as processes of this machine, each in a session of its own, none of which outlives the driver.

    Invariant: of the launches of a node, only the last one that was asked for starts a process.

    Args:
        command: see AgentCommand.
        ended: called with node, incarnation and a description when an agent's process has ended.
        ahead: the first agent's process, if it has been started already.
        gpus: CUDA_VISIBLE_DEVICES by node; a node behind the last of them inherits this process's.
        nonce: of the campaign, in the names of what its agents have in RAM.
    """

    addr = "127.0.0.1"

    def __init__(
        self,
        command: AgentCommand,
        ended: Callable[[int, int, str], None],
        ahead: AgentAhead | None = None,
        gpus: Sequence[str] = (),
        nonce: str = "",
    ) -> None:
        self._command = command
        self._gpus = gpus
        self._nonce = nonce
        self._ended = ended
        self._ahead = ahead
        self._wanted: dict[int, int] = {}  # incarnation by node
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._watchers: set[asyncio.Task[None]] = set()

    async def launch(self, node: int, incarnation: int, *, prepare: bool) -> None:
        """Start the agent of a node; an earlier one that is still there is killed first."""
        self._wanted[node] = incarnation
        await self._kill(node)
        command = self._command.arguments(node, self.addr, prepare_node=node if prepare else None)
        arguments = [*command, "--parent", str(os.getpid())]
        environ = {**self._command.environ, TOKEN_VARIABLE: f"{self._command.token}.{incarnation}"}
        if node < len(self._gpus):
            environ[visible_gpus.VARIABLE] = self._gpus[node]
        log = agent_log(self._command.run_dir, node)
        process = self._ahead.become(arguments, environ, log) if self._ahead is not None else None
        if process is None:
            try:
                process = await self._start(node, incarnation, arguments, environ, log)
            except OSError as error:  # no process is to be had, or its log cannot be opened
                self._ended(node, incarnation, f"it could not be started: {error}")
                return
            if process is None:
                return
        self._processes[node] = process
        task = asyncio.create_task(self._watch(node, incarnation, process))
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _start(
        self, node: int, incarnation: int, arguments: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes] | None:
        """The process of an agent; None if another one was asked for while its log was being opened. Raises OSError."""
        output = await _opened(log)
        try:
            if self._wanted[node] != incarnation:
                return None
            # Not in the thread: a process whose parent's thread ends is told that its parent has.
            return subprocess.Popen(
                [*AGENT, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environ},
                start_new_session=True,
            )
        finally:
            os.close(output)

    def connected(self, node: int) -> None:
        """The end of its process is told whether it has or not."""

    async def _watch(self, node: int, incarnation: int, process: subprocess.Popen[bytes]) -> None:
        code = await _end_of(process)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._ended(node, incarnation, f"process {process.pid} ended by {how}")

    async def _kill(self, node: int) -> None:
        process = self._processes.pop(node, None)
        if process is not None:
            process.kill()
            try:
                await asyncio.wait_for(_end_of(process), GONE_S)
            except TimeoutError:
                log.error("process %d, the agent of node %d, does not die; leaving it behind", process.pid, node)

    async def close(self, grace_s: float) -> None:
        """Wait until the agents have ended by themselves, at most `grace_s`, then kill those that are left."""
        waits = [asyncio.ensure_future(_end_of(process)) for process in self._processes.values()]
        if waits:
            await asyncio.wait(waits, timeout=grace_s)
        for node, process in list(self._processes.items()):
            late = process.poll() is None
            await self._kill(node)
            if late:
                from resilient.agent import memory  # a driver seldom needs it

                memory.clear_up(memory.region_directory(self._command.run_dir, node, nonce=self._nonce))
        for task in (*self._watchers, *waits):
            task.cancel()


async def _end_of(process: subprocess.Popen[bytes]) -> int:
    """The exit status of a process, once it has ended."""
    if process.poll() is None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        try:
            fd = os.pidfd_open(process.pid)
        except OSError:  # no descriptor is to be had
            while process.poll() is None:
                await asyncio.sleep(LOOK_S)
            return process.wait()
        loop.add_reader(fd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
    return process.wait()


async def _opened(log: Path) -> int:
    """A descriptor that appends to a log. On a file system that stands still a thread waits, and keeps nobody. Raises OSError."""
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[int] = loop.create_future()

    def settle(fd: int, error: OSError | None) -> None:
        if error is not None and not opened.done():
            opened.set_exception(error)
        elif not opened.done():
            opened.set_result(fd)
        elif error is None:
            os.close(fd)  # nobody waits for it any more

    def work() -> None:
        fd, failed = -1, None
        try:
            fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            failed = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, fd, failed)

    threading.Thread(target=work, name="agent-log", daemon=True).start()
    return await opened
