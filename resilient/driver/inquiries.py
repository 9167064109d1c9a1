"""What can be found out about nodes that are silent: what Slurm calls them, and whether their snapshot daemons let anybody in.

Every question has a limit, and whoever does not answer within it has said nothing.
"""

import asyncio
import logging
from collections.abc import Mapping

from resilient.control.evidence import Door, Evidence
from resilient.outbox import InquireAbout
from resilient.slurm import queue
from resilient.slurm.allocation import Allocation
from resilient.slurm.queue import SlurmSilent

log = logging.getLogger(__name__)

SLURM_S = 3.0
DOOR_S = 0.25  # a host that lives answers in milliseconds; no answer proves nothing


async def inquire(about: InquireAbout, allocation: Allocation | None) -> list[Evidence]:
    """What is known of each of the nodes."""
    hosts = {node: allocation.hosts[node] for node in about.nodes} if allocation is not None else {}
    states, gone, doors = await asyncio.gather(
        _states(hosts), departed(allocation, timeout_s=SLURM_S), asyncio.gather(*map(_door, about.daemons))
    )
    nothing: frozenset[str] = frozenset()
    return [
        Evidence(node, states.get(hosts.get(node, ""), nothing), door, departed=node in gone)
        for node, door in zip(about.nodes, doors, strict=True)
    ]


async def departed(allocation: Allocation | None, *, timeout_s: float = queue.ASK_S) -> frozenset[int]:
    """The nodes that Slurm has taken out of the job; none where it does not say, or the job is over."""
    if allocation is None:
        return frozenset()
    try:
        left = await queue.nodes(allocation.job_id, timeout_s=timeout_s)
    except SlurmSilent as error:
        log.info("which nodes the job has: %s", error)
        return frozenset()
    return frozenset(node for node, host in enumerate(allocation.hosts) if host not in left) if left else frozenset()


async def _states(hosts: Mapping[int, str]) -> Mapping[str, frozenset[str]]:
    if not hosts:
        return {}
    try:
        return await queue.node_states(hosts.values(), timeout_s=SLURM_S)
    except SlurmSilent as error:
        log.info("how %s are: %s", ", ".join(hosts.values()), error)
        return {}


async def _door(daemon: str | None) -> Door:
    """What becomes of a connection; nothing is said over it."""
    if daemon is None:
        return "unknown"
    host, _, port = daemon.rpartition(":")
    try:
        async with asyncio.timeout(DOOR_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return "refused"
    except OSError:  # a TimeoutError as well
        return "unreachable"
    writer.close()
    return "open"
