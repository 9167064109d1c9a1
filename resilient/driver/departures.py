"""Nodes that are about to go: those that a person wants to be left, and those that Slurm drains."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from resilient.control import Coordinator
from resilient.evacuate import requested
from resilient.slurm import queue
from resilient.slurm.allocation import Allocation
from resilient.slurm.queue import SlurmSilent

log = logging.getLogger(__name__)

READ_S = 0.5  # between two looks at what a person asks for
ASK_S = 30.0  # between two questions to Slurm
MOST = 1 / 3  # of a job's nodes that are left because Slurm drains them
DRAINED = frozenset({"DRAIN", "DRAINED", "DRAINING"})


class Departures:
    """The run directory is read in a thread, which may stand still with its file system.

    Args:
        token: of the run directory's lease.
        note: tells a person.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        run_dir: Path,
        token: str,
        allocation: Allocation | None,
        *,
        turn: Callable[..., None],
        note: Callable[[str], None],
    ) -> None:
        self._coordinator, self._run_dir, self._token, self._allocation = coordinator, run_dir, token, allocation
        self._turn, self._note = turn, note
        self._requested: Sequence[str] = ()
        self._drained: frozenset[int] = frozenset()
        self._together = False
        self._unknown: set[str] = set()

    async def watch(self) -> None:
        """Tell the core whenever they change; never returns."""
        threading.Thread(target=self._read, name="departures", daemon=True).start()
        told: frozenset[int] = frozenset()
        asked_t = 0.0
        while True:
            if self._allocation is not None and time.monotonic() - asked_t >= ASK_S:
                asked_t = time.monotonic()
                await self._ask(self._allocation)
            nodes = self._named(self._requested) | self._drained
            if nodes != told:
                told = nodes
                self._turn(self._coordinator.evacuate, nodes)
            await asyncio.sleep(READ_S)

    def _read(self) -> None:
        while True:
            self._requested = requested(self._run_dir, self._token)
            time.sleep(READ_S)

    def _named(self, names: Collection[str]) -> frozenset[int]:
        """The nodes with these numbers or hosts."""
        if not names:
            return frozenset()
        hosts = {node: known.host.partition(".")[0] for node, known in enumerate(self._coordinator.membership.nodes)}
        found: set[int] = set()
        for name in names:
            meant = {node for node, host in hosts.items() if name in (str(node), host) or name.partition(".")[0] == host}
            if not meant and name not in self._unknown:
                self._unknown.add(name)
                self._note(f"node {name} is to be left, and there is none of that name")
            found |= meant
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


def drained_of(hosts: Sequence[str], states: Mapping[str, frozenset[str]]) -> tuple[frozenset[int], frozenset[int]]:
    """The nodes whose hosts Slurm drains, and those of them that are to be left. Pure.

    A job goes on on nodes that are drained until it ends. One or a few are ill; where it is more, they are all to be maintained,
    and to leave them would only end the job before its time.
    """
    drained = frozenset(node for node, host in enumerate(hosts) if not DRAINED.isdisjoint(states.get(host, frozenset())))
    return drained, drained if len(drained) <= max(1, len(hosts) * MOST) else frozenset()
