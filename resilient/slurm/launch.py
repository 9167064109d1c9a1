"""Agents as tasks of steps of the job.

The launches that are asked for at one moment are one step: the first of all nodes, then of those that are replaced or started anew.
A task cannot be ended alone. An agent whose node gets another one loses its connection, and is ended by its successor on the same
node if it is still there (`resilient.agent.predecessor`); an agent on a node that does not answer is left to Slurm.
Where Slurm does not answer, no node is at fault: its agents are asked for again and again.

Owns the steps (`resilient.slurm.step`).
"""

import asyncio
import logging
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from resilient.driver.launch import AGENT, AgentCommand
from resilient.logs.paths import DIRECTORY, STEP_OF_MANY, step_log
from resilient.protocol.connection import TOKEN_VARIABLE
from resilient.slurm import roster
from resilient.slurm.allocation import Allocation
from resilient.slurm.container import outside
from resilient.slurm.hosts import fold
from resilient.slurm.roster import Seat
from resilient.slurm.step import Step

log = logging.getLogger(__name__)

SYSFS = Path("/sys/class/net")
AGAIN_S = 5.0  # until a step is asked for again where Slurm has not answered; srun itself waits for 10 s and more
COLLECT_S = 0.005  # launches that follow each other within that time are one step

# Options that a step would take over from the job or from a step around it, where the command line does not say otherwise.
_INHERITED = (
    *("NTASKS", "NPROCS", "NTASKS_PER_NODE", "TASKS_PER_NODE", "CPUS_PER_TASK", "CPU_BIND", "DISTRIBUTION", "MEM_BIND"),
    *("GPUS", "GPU_BIND", "GPUS_PER_SOCKET", "HINT", "THREADS_PER_CORE", "CORE_SPEC", "EXCLUSIVE", "HET_GROUP"),
)
_INHERITED_PREFIXES = (
    "SLURM_CPU_BIND",
    "SLURM_MEM_PER",
    "SLURM_STEP_",
    "SLURM_GPUS_PER_TASK",
    "SLURM_TRES_PER_TASK",
    "SLURM_NTASKS_PER",
)


class SlurmLauncher:
    """Arguments as for `LocalLauncher`.

    Args:
        allocation: names of the nodes, by index, with the CPUs that the job has there.
        cpu_bind, gpus_per_task: of a step, as srun takes them.
        extra: more options for srun, from the config.
        inside: turns an agent's command line into one that runs it in a container.
    """

    addr = ""  # an agent finds out at which address the others reach it

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
        # In which agents run. It may be deleted while the job goes on.
        self._directory = os.getcwd()  # noqa: PTH109 - the shell's name for it, not where links lead
        self._due: dict[int, int] = {}  # incarnation by node
        self._preparing: int | None = None  # the node that is to prepare, of those that are due
        self._steps: list[Step] = []
        self._unanswered: dict[int, int] = {}  # incarnation by node, of those that are to be asked for again
        self._again: set[asyncio.Task[None]] = set()

    async def launch(self, node: int, incarnation: int, *, prepare: bool) -> None:
        """Start the agent of a node, in one step with the others that are asked for at the same moment."""
        await self._give_up(node)
        self._due[node] = incarnation
        if prepare:
            self._preparing = node
        if len(self._due) > 1:
            return  # whoever was first starts it too
        await asyncio.sleep(COLLECT_S)
        due, preparing = self._due, self._preparing
        self._due, self._preparing = {}, None
        await asyncio.gather(*(self._start(nodes, due, preparing) for nodes in self._alike(due)))

    def _alike(self, nodes: Mapping[int, int]) -> list[list[int]]:
        """The nodes in groups that can be one step: of one component, with equally many CPUs."""
        allocation = self._allocation
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for node in sorted(nodes):
            component = allocation.components[node] if allocation.components else 0
            groups[component, allocation.cpus[node]].append(node)
        return list(groups.values())

    async def _start(self, nodes: Sequence[int], due: Mapping[int, int], preparing: int | None) -> None:
        seats = {self._allocation.hosts[node]: Seat(node, due[node]) for node in nodes}
        command = self._command

        def unanswered(left: Mapping[str, Seat]) -> None:
            self._unanswered |= {seat.node: seat.incarnation for seat in left.values()}
            task = asyncio.create_task(self._start_again(list(left), due, preparing))
            self._again.add(task)
            task.add_done_callback(self._again.discard)

        environ = {
            **_own(outside(os.environ)),
            **command.environ,
            TOKEN_VARIABLE: command.token,
            roster.VARIABLE: roster.write(seats),
        }
        agent = command.arguments(None, self.addr, prepare_node=preparing if preparing in nodes else None)
        words = [*self._arguments(nodes), *self._inside([*AGENT, *agent])]
        try:
            step = await Step.start(words, environ, seats, self._ended, unanswered, f"{DIRECTORY}/{_name(nodes)}.log")
        except OSError as error:
            for seat in seats.values():
                self._ended(seat.node, seat.incarnation, f"srun cannot be started: {error.strerror}")
            return
        self._steps = [*(each for each in self._steps if not each.over), step]

    async def _start_again(self, hosts: Sequence[str], due: Mapping[int, int], preparing: int | None) -> None:
        """Ask after a while for the agents that Slurm has not answered about, unless they were launched anew meanwhile."""
        log.warning("Slurm does not answer; the agents on %s are asked for again in %g s", fold(hosts), AGAIN_S)
        await asyncio.sleep(AGAIN_S)
        waiting = (node for node, incarnation in sorted(self._unanswered.items()) if due.get(node) == incarnation)
        left = [node for node in waiting if self._allocation.hosts[node] in hosts]
        for node in left:
            del self._unanswered[node]
        if left:
            await self._start(left, due, preparing)

    def _arguments(self, nodes: Sequence[int]) -> list[str]:
        """The command line of srun, up to the program. Args: nodes: alike."""
        allocation, count, name = self._allocation, len(nodes), _name(nodes)
        # What comes before an agent has its own log: a shell without the program, an interpreter without its library.
        log = str(step_log(self._command.run_dir, name)).replace("%", "%%")
        return [
            *["srun", "--jobid", allocation.job_id, "--job-name", name],
            *["--nodelist", fold(allocation.hosts[node] for node in nodes)],
            *["--nodes", str(count), "--ntasks", str(count), "--ntasks-per-node", "1"],
            *["--cpus-per-task", str(allocation.cpus[nodes[0]]), "--overlap", "--mem", "0", "--cpu-bind", self._cpu_bind],
            # The step goes on whatever becomes of one of its tasks or nodes, and as long as one of them does.
            *["--no-kill", "--kill-on-bad-exit=0", "--wait=0"],
            *["--input", "none", "--output", log, "--open-mode", "append", "--label", "--quiet"],
            *["--export", "ALL", "--chdir", self._directory],
            *(["--het-group", str(allocation.components[nodes[0]])] if allocation.components else []),
            *self._gpus,
            *self._extra,
        ]

    def connected(self, node: int) -> None:
        """The agent of a node that was launched has connected."""
        for step in self._steps:
            step.connected(node)

    async def _give_up(self, node: int) -> None:
        """Tell nothing more of a node's present agent; a step of it alone is ended."""
        self._unanswered.pop(node, None)
        for step in self._steps:
            if step.give_up(node) and not step.seats:
                await step.end()

    async def close(self, grace_s: float) -> None:
        """Wait until the agents have ended by themselves, at most `grace_s`, then end the steps that are left."""
        for task in self._again:
            task.cancel()
        for step in self._steps:
            step.close()
        waits = [asyncio.ensure_future(step.wait()) for step in self._steps if not step.over]
        if waits:
            await asyncio.wait(waits, timeout=grace_s)
        await asyncio.gather(*(step.end() for step in self._steps))
        for wait in waits:
            wait.cancel()


def _name(nodes: Sequence[int]) -> str:
    """Of the step that starts the agents of these nodes."""
    return f"agent{nodes[0]}" if len(nodes) == 1 else STEP_OF_MANY


def _own(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would be options to srun."""
    names = {f"{prefix}_{name}" for prefix in ("SLURM", "SRUN") for name in _INHERITED}
    return {name: value for name, value in environ.items() if name not in names and not name.startswith(_INHERITED_PREFIXES)}


def addresses(host: str | None, port: int, *, suffix: str = "", interface: str | None = None) -> list[str]:
    """Where agents on other nodes may reach this one, best first.

    Args:
        host: Slurm's name for this node; None: it is none of the job's, as where salloc was called.
        suffix: of the name that leads to the fast network, as sites with a name per network have it.
        interface: the network to use; the plain name, which may lead to another one, is not asked then.
    """
    found = [f"{host}{suffix}"] if host is not None and (suffix or interface is None) else []
    found += [f"[{each}]" if ":" in each else each for each in own_addresses(interface)]
    return [f"{each}:{port}" for each in dict.fromkeys(found)]


def own_addresses(interface: str | None = None, *, sysfs: Path = SYSFS) -> list[str]:
    """This machine's addresses that lead to other machines, those of one interface or of all.

    The loopback and bridges among the guests of this machine are left out: elsewhere their addresses are another machine's, if not
    a stranger's. Where there is nothing else, such a bridge may well lead away, as on a machine that is a guest. An interface
    that is asked for by name is taken as it is.
    """
    found: list[str] = []
    among_guests: list[str] = []
    for name, each in sorted(psutil.net_if_addrs().items()):
        if interface not in (None, name):
            continue
        kept = among_guests if interface is None and _among_guests(name, sysfs) else found
        for address in each:
            local = address.address.startswith(("127.", "::1", "fe80"))
            if address.family in (socket.AF_INET, socket.AF_INET6) and not local:
                kept.append(address.address)
    return list(dict.fromkeys(found or among_guests))


def _among_guests(name: str, sysfs: Path) -> bool:
    """Whether an interface is a bridge without a port of hardware, as docker0 and virbr0 are."""
    if not (sysfs / name / "bridge").is_dir():
        return False
    ports = sysfs / name / "brif"
    return not (ports.is_dir() and any((sysfs / port.name / "device").exists() for port in ports.iterdir()))
