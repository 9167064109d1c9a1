"""Agents as steps of the job: one srun for each node.

Owns the srun processes. A step ends when its agent does; an agent that does not end, or a node that does not answer, is left to
Slurm after its srun was told to end the step.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import psutil

from resilient.driver.launch import AGENT, AgentCommand
from resilient.protocol.connection import TOKEN_VARIABLE
from resilient.slurm.allocation import Allocation
from resilient.slurm.container import outside

GRACE_S = 5.0  # for srun to end its step

# Options that a step would take over from the job or from a step around it, where the command line does not say otherwise.
_INHERITED = (
    *("NTASKS", "NPROCS", "NTASKS_PER_NODE", "TASKS_PER_NODE", "CPUS_PER_TASK", "CPU_BIND", "DISTRIBUTION", "MEM_BIND"),
    *("GPUS", "GPU_BIND", "GPUS_PER_SOCKET", "HINT", "THREADS_PER_CORE", "CORE_SPEC", "EXCLUSIVE", "HET_GROUP"),
)
_INHERITED_PREFIXES = ("SLURM_CPU_BIND", "SLURM_MEM_PER", "SLURM_STEP_", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER")


class SlurmLauncher:
    """Arguments as for `LocalLauncher`.

    Args:
        nodes: names of the nodes, by index, with the CPUs that the job has there.
        cpu_bind, gpus_per_task: of the step, as srun takes them.
        extra: more options for srun, from the config.
        inside: turns an agent's command line into one that runs it in a container.
    """

    addr = ""  # an agent finds out at which address the others reach it
    one_machine = False

    def __init__(
        self,
        command: AgentCommand,
        ended: Callable[[int, int, str], None],
        *,
        allocation: Allocation,
        cpu_bind: str = "none",
        gpus_per_task: int | None = None,
        extra: Sequence[str] = (),
        inside: Callable[[list[str]], list[str]] = list,
    ) -> None:
        self._command = command
        self._ended = ended
        self._allocation = allocation
        self._cpu_bind = cpu_bind
        self._gpus = [] if gpus_per_task is None else ["--gpus-per-task", str(gpus_per_task)]
        self._extra = list(extra)
        self._inside = inside
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._watchers: set[asyncio.Task[None]] = set()

    def _arguments(self, node: int) -> list[str]:
        allocation = self._allocation
        return [
            *["srun", "--jobid", allocation.job_id, "--job-name", f"agent{node}"],
            *["--nodelist", allocation.hosts[node], "--nodes", "1", "--ntasks", "1", "--cpus-per-task", str(allocation.cpus[node])],
            *[
                "--overlap",
                "--mem",
                "0",
                "--cpu-bind",
                self._cpu_bind,
                "--no-kill",
                "--kill-on-bad-exit=0",
                "--input",
                "none",
                "--quiet",
            ],
            *["--export", "ALL", "--chdir", os.getcwd()],  # noqa: PTH109 - the shell's name for it, not where links lead
            *(["--het-group", str(allocation.components[node])] if allocation.components else []),
            *self._gpus,
            *self._extra,
        ]

    async def launch(self, node: int, incarnation: int, *, prepare: bool) -> None:
        """Start the agent of a node; an earlier one that is still there is ended first."""
        await self._kill(node)
        command = self._command
        log = os.open(command.run_dir / "logs" / f"agent{node}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            process = await asyncio.create_subprocess_exec(
                *self._arguments(node),
                *self._inside([*AGENT, *command.arguments(node, self.addr, prepare=prepare)]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**_own(outside(os.environ)), **command.environ, TOKEN_VARIABLE: f"{command.token}.{incarnation}"},
                start_new_session=True,
            )
        except OSError as error:
            self._ended(node, incarnation, f"srun cannot be started: {error.strerror}")
            return
        finally:
            os.close(log)
        self._processes[node] = process
        task = asyncio.create_task(self._watch(node, incarnation, process))
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _watch(self, node: int, incarnation: int, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._ended(node, incarnation, f"its step on {self._allocation.hosts[node]} ended by {how}")

    async def _kill(self, node: int) -> None:
        process = self._processes.pop(node, None)
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()  # srun ends the step
        try:
            await asyncio.wait_for(process.wait(), GRACE_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def close(self, grace_s: float) -> None:
        """Wait until the agents have ended by themselves, at most `grace_s`, then end the steps that are left."""
        waits = [asyncio.ensure_future(process.wait()) for process in self._processes.values()]
        if waits:
            await asyncio.wait(waits, timeout=grace_s)
        await asyncio.gather(*(self._kill(node) for node in list(self._processes)))
        for task in list(self._watchers):
            task.cancel()


def _own(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would be options to srun."""
    names = {f"{prefix}_{name}" for prefix in ("SLURM", "SRUN") for name in _INHERITED}
    return {name: value for name, value in environ.items() if name not in names and not name.startswith(_INHERITED_PREFIXES)}


def addresses(host: str, port: int, *, suffix: str = "", interface: str | None = None) -> list[str]:
    """Where agents on other nodes may reach this one, best first.

    Args:
        host: Slurm's name for this node.
        suffix: of the name that leads to the fast network, as sites with a name per network have it.
        interface: the network to use; the plain name, which may lead to another one, is not asked then.
    """
    found = [f"{host}{suffix}"] if suffix or interface is None else []
    for name, each in sorted(psutil.net_if_addrs().items()):
        if interface not in (None, name):
            continue
        for address in each:
            local = address.address.startswith(("127.", "::1", "fe80"))
            if address.family in (socket.AF_INET, socket.AF_INET6) and not local:
                found.append(f"[{address.address}]" if ":" in address.address else address.address)
    return [f"{each}:{port}" for each in dict.fromkeys(found)]
