"""Our rendezvous handler for torchelastic: the driver says who takes part, and every generation has a store of its own.

A restarted rank that reads what a dead attempt left in a shared store hangs or meets dead addresses; here nothing is shared:
each agent opens a new, empty store before each generation, and the one that is given node rank 0 lends its store to all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

STORE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Generation:
    """The driver's word on one generation, as one node gets it."""

    generation: int
    node_rank: int
    nodes: int
    master_addr: str
    master_port: int
    storage: Mapping[str, Any] = field(default_factory=dict)


class DriverRendezvous(RendezvousHandler):
    """Joins the generation that the driver announces.

    Args:
        run_id: name of the campaign.
        ready: tells the driver that this node is ready and at which port its new store listens; returns when the next
            generation starts. Raises RendezvousGracefulExitError when there will be none.
    """

    def __init__(self, run_id: str, ready: Callable[[int], Generation]) -> None:
        self._run_id = run_id
        self._ready = ready
        self._store: TCPStore | None = None
        self.current: Generation | None = None

    def get_backend(self) -> str:
        return "resilient"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = None  # closes the port of the generation before: a rank left over from it talks to nobody
        own = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
        told = self._ready(own.port)
        if told.node_rank == 0:
            self._store = own
        else:
            self._store = TCPStore(told.master_addr, told.master_port, is_master=False, timeout=STORE_TIMEOUT)
        self.current = told
        return RendezvousInfo(
            PrefixStore(f"generation-{told.generation}", self._store),
            told.node_rank,
            told.nodes,
            RendezvousStoreInfo(told.master_addr, told.master_port),
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """The driver alone ends a run."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True
