"""What a fault finds where it strikes: the processes, links, tiers and files of one run, as this machine sees them.

Owns how they are found. All is read from the kernel, from heartbeat regions and from the run directory, each time anew: what was
true before the last fault is not any more.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from chaos.fault import CannotInject
from chaos.injectors.guard import Guard
from resilient import ledger, storage
from resilient.agent import NAME
from resilient.agent.memory import agent_record, daemon_directory, region_directory
from resilient.config import Config
from resilient.driver import lease
from resilient.heartbeat.region import Activity, peek
from resilient.processes import driver_pid


@dataclass(frozen=True)
class Target:
    """What is hit. `node`: index of the node in the run, as `fault` events name it; `host`: its name, in the lab or in the job."""

    rank: int | None = None
    node: int | None = None
    host: str = ""


Follower = Callable[[str | None, int], bool]


@dataclass(frozen=True)
class RankContext:
    """Where a rank is when a fault strikes it from inside.

    Attributes:
        step: the one that is being computed, 1-based.
        order: name of the order that is carried out, which no other one has.
        follow: have something called, until it says False, at each phase that begins with its name and the step that is being
            computed, and with None and a step that is finished.
    """

    rank: int
    world_size: int
    step: int
    phase: str
    run_dir: Path
    order: str
    follow: Callable[[Follower], None]


def _passed(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _running(pid: int) -> psutil.Process | None:
    """The process of this number, unless it has ended, though nobody may have asked for its status yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    return None


@dataclass
class InjectionContext:
    """One target of one run. Times in unix seconds.

    Attributes:
        lab: name of the lab whose host is hit; empty outside of one.
        over: says whether whoever asked for the fault wants its end.
    """

    run_dir: Path
    config: Config
    target: Target
    guard: Guard
    lab: str = ""
    over: Callable[[float], bool] = field(default=_passed)
    _checks: list[Callable[[], None]] = field(default_factory=list)

    def check_undone(self, check: Callable[[], None]) -> None:
        """Have it looked, once the guard has run, whether a change is undone: `check` raises CannotInject if it is not."""
        self._checks.append(check)

    def not_undone(self) -> str:
        """What the guard has not undone; empty if that is nothing that anybody looks at."""
        wrong = []
        for check in self._checks:
            try:
                check()
            except CannotInject as error:
                wrong.append(str(error))
        return "; ".join(wrong)

    def hold(self, seconds: float, unless: Callable[[], bool] = lambda: False) -> None:
        """Let the fault last so long, or until its end is wanted, or there is nothing left that it is done to."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not unless():
            if self.over(min(left, 0.1)):
                return

    # -- processes -----------------------------------------------------------------------------------------------------

    def activities(self) -> Mapping[int, Activity]:
        """What the heartbeat regions of this machine say of the ranks of the newest generation, by rank."""
        found: dict[int, tuple[int, Activity]] = {}
        for node in self._nodes():
            for path in region_directory(self.run_dir, node).glob("g*-rank*"):
                if path.suffix:
                    continue
                generation, rank = (int(word) for word in path.name[1:].split("-rank"))
                if rank in found and found[rank][0] > generation:
                    continue
                with contextlib.suppress(OSError, ValueError):
                    found[rank] = generation, peek(path)
        newest = max((generation for generation, _ in found.values()), default=0)
        return {rank: activity for rank, (generation, activity) in found.items() if generation == newest and activity.pid}

    def worker(self) -> psutil.Process:
        """The process of the rank that is aimed at.

        Raises:
            CannotInject: it does not run on this machine.
        """
        activity = self.activities().get(-1 if self.target.rank is None else self.target.rank)
        found = None if activity is None else _running(activity.pid)
        if found is None or not self._is_of_the_run(found):
            raise CannotInject(f"rank {self.target.rank} does not run here")
        return found

    def _is_of_the_run(self, process: psutil.Process) -> bool:
        """Whether an agent of the run has started it: what a killed agent leaves has numbers that may be others' by now."""
        agents = {agent.pid for agent in self.agents()}
        with contextlib.suppress(psutil.NoSuchProcess):
            return any(parent.pid in agents for parent in process.parents())
        return False

    def workers(self) -> list[psutil.Process]:
        """Those of the node that is aimed at."""
        agent = self.agent()
        mine = {process.pid for process in agent.children(recursive=True)}
        found = (_running(activity.pid) for activity in self.activities().values() if activity.pid in mine)
        return [process for process in found if process is not None]

    def agent(self) -> psutil.Process:
        """The agent of the node that is aimed at.

        Raises:
            CannotInject: it does not run on this machine.
        """
        found = self._agents().get(-1 if self.target.node is None else self.target.node)
        if found is None:
            raise CannotInject(f"the agent of node {self.target.node} does not run here")
        return found

    def agents(self) -> Sequence[psutil.Process]:
        """All agents of the run that are on this machine, by node."""
        return [process for _, process in sorted(self._agents().items())]

    def _agents(self) -> Mapping[int, psutil.Process]:
        found = {}
        for node in self._nodes():
            record = agent_record(self.run_dir, node)
            with contextlib.suppress(psutil.NoSuchProcess):
                if record is not None and (process := _running(record.pid)) is not None and process.name() == NAME:
                    found[node] = process
        return found

    def driver_address(self, root: Path) -> str:
        """Where the agent of the node that is aimed at has reached the driver, as `parse_addresses` takes it.

        Args:
            root: of the file system that the agent sees: hosts of a lab have RAM of their own.

        Raises:
            CannotInject: no agent runs there.
        """
        record = agent_record(self.run_dir, -1 if self.target.node is None else self.target.node, root)
        if record is None:
            raise CannotInject(f"no agent of node {self.target.node} runs there")
        return record.driver

    def snapshot_daemon(self) -> psutil.Process:
        """The snapshot daemon of the node that is aimed at.

        Raises:
            CannotInject: there is none.
        """
        for process in self.agent().children():
            with contextlib.suppress(psutil.Error):
                if "checkpoint.daemon" in process.cmdline():
                    return process
        raise CannotInject(f"node {self.target.node} has no snapshot daemon")

    def driver(self) -> psutil.Process:
        """The driver, which has the lease of the run directory.

        Raises:
            CannotInject: it does not run on this machine, or cannot be seen there.
        """
        with contextlib.suppress(OSError):
            owner, _ = lease.read(self.run_dir / lease.LEASE)
            pid = None if owner is None else driver_pid(owner)
            found = None if pid is None else _running(pid)
            if found is not None:
                return found
        raise CannotInject("the run has no driver here")

    def _nodes(self) -> range:
        return range(self.config.cluster.slots)

    # -- what it did ---------------------------------------------------------------------------------------------------

    def events(self, name: str | None = None) -> list[dict[str, object]]:
        """Lines of the ledger."""
        return [line for line in ledger.read_events(self.run_dir / ledger.EVENTS) if name in (None, line["event"])]

    def memory(self, node: int) -> Sequence[Path]:
        """What a node has in RAM beside its tiers: heartbeat regions, and the snapshot daemon's own."""
        return [region_directory(self.run_dir, node), daemon_directory(self.run_dir, node)]

    def held(self, node: int) -> Sequence[Path]:
        """What a node has of its own on tiers, in RAM and on its disks."""
        found = storage.read(self.run_dir)
        return [Path(tier["roots"][node]) for tier in found["tiers"] if not tier["durable"]]
