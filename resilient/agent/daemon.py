"""The node's snapshot daemon as the agent's child, and the session file of the workers.

Owns the process and its pipes. A daemon that dies is started anew and given the session again; what it held lies in memory and on
disks, which its inventory says.
"""

import logging
import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpoint import safe_dir
from checkpoint.framing import Decoder, NotAMessage, encode
from checkpoint.handshake import WORKER_DAEMON
from checkpoint.protocol import (
    BeginSession,
    Cleared,
    DaemonNews,
    DaemonRequest,
    DaemonSettings,
    Inventory,
    TakeInventory,
    TierSettings,
)
from checkpoint.tiers import session
from checkpoint.tiers.lease import LINK
from resilient import storage
from resilient.agent.limits import DAEMON_END_S
from resilient.agent.loop import Loop
from resilient.imports import shadowing
from resilient.protocol.candidates import Candidate, unpack
from resilient.protocol.messages import Start
from resilient.worker import RUN_DIR_VARIABLE

log = logging.getLogger(__name__)

COMMAND = shadowing.running("checkpoint.daemon")
MOST_STARTS, WITHIN_S = 10, 60.0
QUEUE_BYTES = 16 << 20  # a daemon that has left so much unread is stuck, and replaced
_READ_BYTES = 1 << 20


class DaemonProcess:
    """The snapshot daemon of this node. Nothing here waits but `close`, which runs turns of the loop.

    Invariants: the loop watches the pipes of the present process and of no other. A request to a daemon that dies is lost; whoever
    asked hears of the next daemon's inventory and asks again.

    Args:
        described: the campaign's storage, as `resilient.storage.read` returns it.
        directory: short path of a directory in RAM, for the daemon's socket and the session file.
        host: address on which other nodes may read from this one.
        run_dir: of the campaign; a daemon has it in its environment, by which it is known whose it is.
        on_news: called with news that are for the driver: all but what this agent has asked for itself.
        pass_on: takes the end of a pipe, and reads what a daemon logs there to its end; None: daemons log where this process does.
        command: starts the daemon.

    Attributes:
        inventory: the answer to `ask_inventory`; None until it comes.
        cleared: `Clear` was answered.
    """

    def __init__(
        self,
        loop: Loop,
        described: Mapping[str, Any],
        directory: Path,
        *,
        run_dir: Path,
        node: int,
        host: str,
        keys: Mapping[str, str],
        on_news: Callable[[Sequence[DaemonNews]], None],
        pass_on: Callable[[int], None] | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._loop, self._described, self._directory, self._on_news = loop, described, directory, on_news
        safe_dir.make_private(directory)  # a daemon that starts slowly holds up nobody who writes here
        self._run_dir, self._node, self._host, self._keys = run_dir, node, host, keys
        self._pass_on, self._command = pass_on, command
        self._process: subprocess.Popen[bytes] | None = None
        self._decoder: Decoder[DaemonNews] = Decoder(DaemonNews)
        self._queue = bytearray()
        self._session: BeginSession | None = None
        self._starts: deque[float] = deque()
        self._generation = 0
        self._inventory_asked = False
        self.inventory: Inventory | None = None
        self.cleared = False
        self._start()

    @property
    def session_path(self) -> Path:
        """What workers read."""
        return self._directory / "session.json"

    @property
    def running(self) -> bool:
        """Whether there is a daemon; none where it has died again and again."""
        return self._process is not None

    def begin(self, start: Start, *, renew: bool) -> None:
        """A generation begins.

        Args:
            renew: a process of the generation before may still write into the present buffers.

        Raises:
            OSError: the session file cannot be written.
            ValueError: the driver's candidates are none.
        """
        self._generation = start.generation
        write_session(
            self.session_path,
            start,
            self._described,
            node=self._node,
            directory=self._directory,
            key=self._keys[WORKER_DAEMON],
        )
        self._session = BeginSession(
            generation=start.generation,
            node_rank=start.node_rank,
            nodes=start.nodes,
            first_rank=start.first_rank,
            ranks=len(start.devices),
            renew=renew,  # also for the next daemon: this one may die before it comes to it
        )
        self.send(self._session)

    def ask_inventory(self) -> None:
        """The next inventory is the answer, even that of another daemon; later ones are news."""
        self.inventory, self._inventory_asked = None, True
        self.send(TakeInventory(generation=self._generation))

    def ask_no_more(self) -> None:
        """The inventory was waited for long enough: a daemon that owes it is stuck, and replaced. That of the next one is news."""
        if self._inventory_asked:
            self.kill("has not said what it holds")
        self._inventory_asked = False

    def send(self, request: DaemonRequest) -> None:
        """Queue a request; returns at once."""
        if self._process is None:
            return
        self._queue += encode(request)
        if len(self._queue) > QUEUE_BYTES:
            self.kill(f"has left {len(self._queue)} bytes unread")
        self._flush()

    def kill(self, why: str) -> None:
        """The daemon is stuck: its output ends, and the next one starts."""
        if self._process is not None:
            log.error("the snapshot daemon (process %d) %s; replacing it", self._process.pid, why)
            self._process.kill()
            self._queue.clear()

    def receive(self) -> list[DaemonNews]:
        """The news that have come. A daemon that has died, or says what is no message, is replaced."""
        process = self._process
        if process is None or process.stdout is None:
            return []
        try:
            data = os.read(process.stdout.fileno(), _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            self._replace("has ended")
            return []
        try:
            return self._decoder.feed(data)
        except NotAMessage as error:
            self._replace(f"has said what is {error}")
            return []

    def close(self) -> None:
        """End the daemon: by the end of its input, and if that does not help by a signal. Where no generation has begun its
        directory goes, for nothing refers to it."""
        process, self._process = self._process, None
        if process is None:
            return
        self._unwatch(process)
        with suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        if not self._loop.wait_until(lambda: process.poll() is not None, DAEMON_END_S, poll_s=0.02):
            process.kill()
            self._loop.wait_until(lambda: process.poll() is not None, DAEMON_END_S, poll_s=0.02)
        if process.stdout is not None:
            process.stdout.close()
        if not any(os.path.lexists(path) for path in (self.session_path, self._directory / LINK)):
            safe_dir.remove(self._directory)

    # -- the process ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        now = time.monotonic()
        self._starts.append(now)
        while self._starts[0] < now - WITHIN_S:
            self._starts.popleft()
        if len(self._starts) > MOST_STARTS:
            log.error("the snapshot daemon has died %d times within a minute; going on without snapshots", MOST_STARTS)
            return
        process = subprocess.Popen(
            self._command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if self._pass_on is None else subprocess.PIPE,
            env={**shadowing.environment(), RUN_DIR_VARIABLE: str(self._run_dir)},
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(pipe.fileno(), False)
        if self._pass_on is not None and process.stderr is not None:
            self._pass_on(os.dup(process.stderr.fileno()))
            process.stderr.close()
        self._decoder = Decoder(DaemonNews)
        self._queue.clear()
        self._process = process
        self._loop.watch(process.stdout.fileno(), self._read)
        self._loop.watch(process.stdin.fileno(), None, on_writable=self._flush, wants_to_write=lambda: bool(self._queue))
        self.send(self._settings())

    def _replace(self, why: str) -> None:
        process, self._process = self._process, None
        assert process is not None
        self._unwatch(process)
        status = process.poll()
        process.kill()
        log.warning("the snapshot daemon (process %d) %s (status %s); starting another one", process.pid, why, status)
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)  # else it is reaped when the next process is started
        self._start()
        self.send(TakeInventory(generation=self._generation))
        if self._session is not None:
            self.send(self._session)

    def _unwatch(self, process: "subprocess.Popen[bytes]") -> None:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None and not pipe.closed:
                self._loop.unwatch(pipe.fileno())

    def _read(self) -> None:
        passed_on: list[DaemonNews] = []
        for news in self.receive():
            if isinstance(news, Inventory) and self._inventory_asked:
                self.inventory, self._inventory_asked = news, False
            elif isinstance(news, Cleared):
                self.cleared = True
            else:
                passed_on.append(news)
        if passed_on:
            self._on_news(passed_on)

    def _flush(self) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            while self._queue:
                del self._queue[: os.write(self._process.stdin.fileno(), self._queue)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._queue.clear()  # its end is about to be read

    def _settings(self) -> DaemonSettings:
        memory, *others = self._described["tiers"]
        places = [Path(memory["roots"][self._node])]
        places += [Path(tier["roots"][self._node]) / "slabs" for tier in others if not tier["durable"]]
        places.append(Path(others[-1]["roots"][0]) / ".slabs" / f"node{self._node}")
        return DaemonSettings(
            generation=self._generation,
            node=self._node,
            host=self._host,
            keys=self._keys,
            directory=str(self._directory),
            memory=memory["name"],
            places=tuple(str(place) for place in places),
            buffers=self._described["buffers"],
            tiers=tuple(
                TierSettings(
                    name=tier["name"],
                    durable=tier["durable"],
                    path=tier["roots"][0 if tier["durable"] else self._node],
                    keep_last=tier["keep_last"],
                    keep_every=tier["keep_every"],
                    max_bytes_per_s=tier["max_bytes_per_s"],
                    mark=(storage.IDENTITY, self._described["identity"]) if tier["durable"] else None,
                )
                for tier in others
            ),
        )


_CADENCE = ("name", "every_steps", "every_s", "every_cost")


def write_session(path: Path, start: Start, described: Mapping[str, Any], *, node: int, directory: Path, key: str) -> None:
    """Write what the workers of a generation are to know of their node's storage; see `checkpoint.tiers.session`.

    Args:
        key: with which workers read from other nodes' daemons.

    Raises OSError, and ValueError where the driver's candidates are none.
    """
    session.write(
        path,
        {
            "node": start.node_rank,
            "nodes": start.nodes,
            "generation": start.generation,
            "first_rank": start.first_rank,
            "ranks": len(start.devices),
            "directory": str(directory),
            "tiers": [{name: tier.get(name) for name in _CADENCE} for tier in described["tiers"]],
            "durable": {
                "name": described["tiers"][-1]["name"],
                "path": described["tiers"][-1]["roots"][0],
                "step": start.durable_step,
            },
            "mtbf_s": start.mtbf_s,
            "candidates": [
                as_entry(candidate, node, key, (start.node_rank, start.nodes)) for candidate in unpack(start.candidates)
            ],
        },
    )


def as_entry(candidate: Candidate, node: int, key: str, place: tuple[int, int]) -> dict[str, Any]:
    """A candidate as the workers of a node read it: where its shards are, those that the node holds itself first.

    Args:
        place: node rank, and how many nodes take part.
    """
    first = likeliest(len(candidate.shards), *place)
    nearest_first = sorted(range(len(candidate.shards)), key=lambda number: abs(number - first))
    holders = [holder for number in nearest_first for holder in candidate.shards[number]]
    here = [{"directory": holder.directory} for holder in holders if holder.node == node]
    elsewhere = [
        {"address": holder.address, "path": holder.directory, "key": key}
        for holder in holders
        if holder.node != node and holder.address
    ]
    step, generation = candidate.key.step, candidate.key.generation
    return {"step": step, "generation": generation, "tier": candidate.tier, "holdings": [*here, *elsewhere]}


def likeliest(shards: int, node_rank: int, nodes: int) -> int:
    """The shard that a node most likely needs: its own, or where there are fewer than nodes, that of its group of hybrid sharding;
    where another number of nodes took the snapshot, the one that lies where the node does. Pure."""
    return node_rank % shards if nodes % shards == 0 else node_rank * shards // nodes
