"""Our rendezvous handler for torchelastic: the driver says who takes part, and every generation has a store of its own.

A restarted rank that reads what a dead attempt left in a shared store hangs or meets dead addresses; here nothing is shared:
each agent opens a new, empty store before each generation, and the one that is given node rank 0 serves its store to all. A store
listens at the node's address alone, and asks nobody who they are: what belongs to a generation lies under a prefix that cannot be
guessed.

A store that does not answer, or has no port, is tried again with growing, jittered pauses, up to a limit, or until the
driver gives up on it.
Process groups are not tried again on a store where an attempt has failed: that takes a new generation, with its new store.
"""

import ctypes
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from tenacity import Retrying, before_sleep_log, retry_if_exception_type, stop_before_delay, wait_random_exponential
from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from checkpoint.handshake import derive
from resilient.protocol.messages import Start

T = TypeVar("T")

STORE_TIMEOUT = timedelta(seconds=60)
BACKLOG = 4096
LOG_ERRORS = 2  # and nothing that is less, in c10's numbers
TRY_S = 5.0  # of one try to reach a store
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0

log = logging.getLogger(__name__)


class CalledOff(Exception):
    """The driver has given the generation up before this node had joined it."""


class Call(Protocol):
    """Calls a function that may block for some seconds, and returns what it returns."""

    def __call__(self, function: Callable[[], T]) -> T: ...


def call_here(function: Callable[[], T]) -> T:
    """Where nobody minds."""
    return function()


def join_store(
    host: str, port: int, *, timeout_s: float, pause: Callable[[float], None] = time.sleep, call: Call = call_here
) -> TCPStore:
    """A client of the store at this address.

    Every try knocks with a plain socket first: c10d's client overruns its timeout twofold, and prints a stack for each refusal.

    Args:
        timeout_s: for how long tries are made.
        pause: waits between two tries, for so many seconds or less; what it raises ends the tries.
        call: makes a try; what it raises of its own ends the tries, too.

    Raises:
        OSError: nobody listened there in that time.
        DistError: somebody did, but not a store.
    """

    def attempt() -> TCPStore:
        socket.create_connection((host, port), timeout=min(TRY_S, timeout_s)).close()
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=min(TRY_S, timeout_s)))

    store: TCPStore = _retrying(timeout_s, pause)(call, attempt)
    store.set_timeout(STORE_TIMEOUT)
    return store


def open_store(address: str) -> TCPStore:
    """A new store on a free port of this address of this machine; of itself c10d would listen at all addresses.

    Raises:
        OSError: there is none.
        DistError: the store does not answer there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family, backlog=BACKLOG)
    port = listening.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=STORE_TIMEOUT,
        master_listen_fd=listening.detach(),  # the store closes it
    )


def log_errors_alone() -> None:
    """Have the native code of torch log no warnings in this process.

    A store logs one for each connection that is reset early, so that whoever reaches its port could fill the log. A build of torch
    that keeps its level elsewhere logs as it did.
    """
    with suppress(OSError, ValueError):
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
        level.value = max(level.value, LOG_ERRORS)


def store_prefix(secret: str, generation: int) -> str:
    """Of the keys of a generation; all agents of the run find the same one."""
    return derive(secret, f"store {generation}")


def _retrying(timeout_s: float, pause: Callable[[float], None]) -> Retrying:
    return Retrying(
        retry=retry_if_exception_type((OSError, DistError)),
        wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
        stop=stop_before_delay(timeout_s),
        sleep=pause,
        before_sleep=before_sleep_log(log, logging.INFO),
        reraise=True,
    )


class DriverRendezvous(RendezvousHandler):
    """Joins the generation that the driver announces.

    Args:
        run_id: name of the campaign.
        address: of this node, at which the others reach its store.
        secret: of the run.
        ready: tells the driver that this node is ready and at which port its new store listens; returns when the next
            generation starts. Raises RendezvousGracefulExitError when there will be none.
        pause: waits so many seconds or less; raises CalledOff when the driver has given the generation up.
        timeout_s: for how long another node's store is tried.
        call: see `join_store`; raises CalledOff as well.

    Attributes:
        current: the driver's word on the present generation.
    """

    def __init__(
        self,
        run_id: str,
        address: str,
        secret: str,
        ready: Callable[[int], Start],
        pause: Callable[[float], None],
        timeout_s: float,
        call: Call = call_here,
    ) -> None:
        self._run_id, self._address, self._secret = run_id, address, secret
        self._ready = ready
        self._pause = pause
        self._call = call
        self._timeout_s = timeout_s
        self._store: TCPStore | None = None
        self.current: Start | None = None

    def get_backend(self) -> str:
        return "resilient"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        while True:
            try:
                start, self._store = self._join()
                break
            except CalledOff:
                log.info("the generation was called off before its store was reached")
        self.current = start
        return RendezvousInfo(
            PrefixStore(store_prefix(self._secret, start.generation), self._store),
            start.node_rank,
            start.nodes,
            RendezvousStoreInfo(start.master_addr, start.master_port),
        )

    def _join(self) -> tuple[Start, TCPStore]:
        self._store = None  # closes the port of the generation before: a rank left over from it talks to nobody

        def open_own_store() -> TCPStore:  # by this name the log tells of tries in vain
            return self._call(lambda: open_store(self._address))

        own = _retrying(self._timeout_s, self._pause)(open_own_store)
        start = self._ready(own.port)
        if start.node_rank == 0:
            return start, own
        return start, join_store(
            start.master_addr, start.master_port, timeout_s=self._timeout_s, pause=self._pause, call=self._call
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
