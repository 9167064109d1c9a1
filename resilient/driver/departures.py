"""Nodes that are about to go: those that a person wants to be left, those that Slurm drains, and those that a maintenance takes;
and those that Slurm has taken out of the job.

What the agents tell of their GPUs takes no part in this: it goes to the core by itself.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from resilient.control import Coordinator
from resilient.driver.inquiries import departed
from resilient.driver.stops import Stops
from resilient.evacuate import FILE, MALFORMED, Request, requested
from resilient.node_names import meant
from resilient.slurm import maintenance, queue
from resilient.slurm.allocation import Allocation
from resilient.slurm.hosts import fold
from resilient.slurm.maintenance import Ahead, few
from resilient.slurm.queue import SlurmSilent

log = logging.getLogger(__name__)

READ_S = 0.5  # between two looks at what a person asks for
ASK_S = 30.0  # between two questions to Slurm
DRAINED = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING"})
"""States of Slurm in which a node is to be used no more once its job is over; FAIL: it is expected to fail soon."""


class Departures:
    """The run directory is read in a thread, which may stand still with its file system.

    Args:
        token: of the run directory's lease.
        stops: of this job of Slurm, where it is one: they know when it ends, and end it before a maintenance of the whole machine.
        reservation: in which the job runs.
        note: tells a person.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        run_dir: Path,
        token: str,
        allocation: Allocation | None,
        stops: Stops | None = None,
        *,
        reservation: str = "",
        turn: Callable[..., None],
        note: Callable[[str], None],
    ) -> None:
        self._coordinator, self._run_dir, self._token, self._allocation = coordinator, run_dir, token, allocation
        self._turn, self._note = turn, note
        self._stops, self._reservation = stops, reservation
        self._request = Request(token)
        self._resumed: Mapping[str, float] = {}  # of which the core was told
        self._drained: frozenset[int] = frozenset()
        self._departed: frozenset[int] = frozenset()  # of which the core was told
        self._together = False
        self._ahead: Sequence[Ahead] = ()
        self._unknown: set[str] = set()

    async def watch(self) -> None:
        """Tell the core whenever they change, until it is cancelled."""
        over = threading.Event()
        threading.Thread(target=self._read, args=(over,), name="departures", daemon=True).start()
        try:
            await self._tell()
        finally:
            over.set()

    async def _tell(self) -> None:
        told: Mapping[int, str] = {}
        asked_t = 0.0
        while True:
            if self._allocation is not None and time.monotonic() - asked_t >= ASK_S:
                asked_t = time.monotonic()
                _, gone = await asyncio.gather(self._ask(self._allocation), departed(self._allocation))
                await self._ask_of_maintenance(self._allocation)
                if fresh := gone - self._departed:
                    self._departed |= fresh
                    self._turn(self._coordinator.departed, sorted(fresh))
            request = self._request
            nodes = self._leaving(request, time.time())
            resumed = self._named([name for name, t in request.resumed.items() if self._resumed.get(name) != t])
            self._resumed = request.resumed
            if nodes != told or resumed:
                told = nodes
                self._turn(self._coordinator.evacuate, nodes, resumed)
            await asyncio.sleep(READ_S)

    def _read(self, over: threading.Event) -> None:
        trouble = ""
        while not over.is_set():
            try:
                self._request = requested(self._run_dir, self._token)
                trouble = ""
            except FileNotFoundError:
                pass  # nothing was asked yet; or the directory is gone for a while, and what was asked holds
            except (OSError, *MALFORMED) as error:
                if str(error) != trouble:
                    trouble = str(error)
                    log.warning("%s cannot be read, and what was asked before it could not holds: %s", FILE, error)
            over.wait(READ_S)

    def _leaving(self, request: Request, now: float) -> dict[int, str]:
        """The nodes that are to be left now, and why."""
        maintained = {node: f"the maintenance {each.name} takes it" for each in self._ahead if each.due(now) for node in each.nodes}
        drained = dict.fromkeys(self._drained, "Slurm drains it")
        return {**maintained, **drained, **dict.fromkeys(self._named(request.nodes), "it was asked for")}

    def _named(self, names: Collection[str]) -> frozenset[int]:
        """The nodes with these numbers or hosts."""
        if not names:
            return frozenset()
        hosts = {node: known.host for node, known in enumerate(self._coordinator.membership.nodes)}
        found: set[int] = set()
        for name in names:
            nodes = meant(name, hosts)
            if not nodes and name not in self._unknown:
                self._unknown.add(name)
                self._note(f"node {name} is to be left, and there is none of that name")
            found |= nodes
        return frozenset(found)

    async def _ask(self, allocation: Allocation) -> None:
        try:
            states = await queue.node_states(allocation.hosts)
        except SlurmSilent as error:
            log.info("which nodes are drained: %s", error)
            return
        drained, left = drained_of(allocation.hosts, states)
        if drained and not left and not self._together:
            few = f"{len(drained)} of the {len(allocation.hosts)} nodes of the job"
            self._note(f"Slurm drains {few}: as in a maintenance of the whole machine, none of them is left, and the job goes on")
        self._together = bool(drained) and not left
        self._drained = left

    async def _ask_of_maintenance(self, allocation: Allocation) -> None:
        if self._stops is not None and not self._stops.answered:
            return  # nobody knows yet when the job ends, and most maintenances come after that
        try:
            found = list(maintenance.parse(await queue.reservations()))
        except SlurmSilent as error:
            log.info("which reservations there are: %s", error)
            return
        end_t = self._stops.end_t if self._stops is not None else None
        now, known = time.time(), {(each.name, each.start_t, each.whole) for each in self._ahead}
        self._ahead = maintenance.ahead(found, allocation.hosts, now, end_t, self._reservation, self._drained)
        for each in self._ahead:
            if (each.name, each.start_t, each.whole) not in known:
                self._note(words(each, allocation.hosts))
        if self._stops is not None:
            whole = next((each for each in self._ahead if each.whole), None)
            self._stops.wanted_back(whole.start_t if whole is not None else None, whole.name if whole is not None else "")


def words(each: Ahead, hosts: Sequence[str]) -> str:
    """What a maintenance means for the job, for a person."""
    begins = datetime.fromtimestamp(each.start_t).isoformat(" ", "minutes")
    then = (
        "the job stops before that"
        if each.whole
        else f"left {maintenance.LEAVE_S / 60:.0f} min before that, if the others can go on"
    )
    return f"the maintenance {each.name} takes {fold(sorted(hosts[node] for node in each.nodes))} from {begins} on: {then}"


def drained_of(hosts: Sequence[str], states: Mapping[str, frozenset[str]]) -> tuple[frozenset[int], frozenset[int]]:
    """The nodes whose hosts Slurm drains, and those of them that are to be left. Pure.

    A job goes on on nodes that are drained until it ends. One or a few are ill; where it is more, they are all to be maintained,
    and to leave them would only end the job before its time.
    """
    drained = frozenset(node for node, host in enumerate(hosts) if not DRAINED.isdisjoint(states.get(host, frozenset())))
    return drained, drained if few(len(drained), len(hosts)) else frozenset()
