"""The node's agent: torchelastic's `LocalElasticAgent`, obeying our driver.

Its loop waits for whatever comes first: a message, the end of a worker, a signal, the next look at the pages. It reports all of it
and acts on orders only; torchelastic's own decision to restart is not used.
"""

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection as PipeEnd
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from resilient import clock, spill, storage
from resilient.agent import memory, preparation
from resilient.agent.forkserver import ForkServer, ForkServerGone
from resilient.agent.links import LinkWatch, interface_of, interfaces_of, ports_of
from resilient.agent.logs import NodeOutput
from resilient.agent.memory import keeper_directory, page_directory, salvaged
from resilient.agent.rendezvous import CalledOff, DriverRendezvous, Generation
from resilient.agent.standby import Standbys
from resilient.agent.storage import KeeperProcess
from resilient.agent.workers import Workers
from resilient.faults import INCIDENTS, WorkerEnd
from resilient.health.node import NodeCheck, NodeSpec, tiers_of
from resilient.logs.paths import generation_directory, node_log
from resilient.network import dump_files
from resilient.page import AgentPage
from resilient.wire import Connection, Disconnected, Message
from resilient.worker import (
    COLLECTIVE_TIMEOUT_VARIABLE,
    GENERATION_VARIABLE,
    GUARD_VARIABLE,
    RUN_DIR_VARIABLE,
    SESSION_VARIABLE,
)

log = logging.getLogger(__name__)

LOOK_S = 0.35  # how often the pages are read; to wake a processor costs more than what is done then
BEAT_S = 0.2  # how often what they say is told, at the least when something has changed
QUIET_S = 1.0  # and when nothing has
UNWATCHED_S = 1.0  # an agent that did not look at the pages for so long does not know who was silent meanwhile
STANDBY_S = 10.0  # a rank that has not finished a step by then has a long start, or does not tell
LINKS_S = 0.35  # how often the links are looked at

CHECK = "health-check"  # beside the pages; whatever is no page goes when the next agent starts

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True)
class AgentSettings:
    """What an agent is started with."""

    node: int
    procs: int
    run_dir: Path
    run_id: str
    entrypoint: str
    fence_s: float
    health_s: float
    world: int
    device: str
    driver: str
    token: str
    addr: str


class NodeAgent(LocalElasticAgent):
    """Runs the workers of one node, generation after generation, as the driver says.

    Args:
        connection: to the driver.
        control: to the template; see `resilient.agent.forkserver`.
        output: reads what ranks print.
        outcome: what the preparation writes to, where the template forks it.
    """

    def __init__(
        self,
        settings: AgentSettings,
        connection: Connection,
        control: socket.socket,
        output: NodeOutput,
        outcome: PipeEnd | None = None,
    ) -> None:
        self._settings = settings
        self._config = settings.run_dir / "config.yaml"
        self._connection = connection
        self._output = output
        self._inbox: deque[Message] = deque()
        self._heard_t = time.monotonic()
        self._workers: Workers | None = None
        # Told to the driver, not yet in the ledger; with each the page, and the place in it, that it came from.
        self._unkept: deque[tuple[spill.Item, AgentPage, int]] = deque()
        self._pages = page_directory(settings.run_dir, settings.node)
        self._told: dict[int, tuple[float, str]] = {}
        self._looked_t = time.monotonic()
        self._told_t = 0.0
        self._links = LinkWatch(interfaces_of(settings.addr, os.environ), ports_of(os.environ))
        self._links_t = time.monotonic()
        self._interface = interface_of(settings.addr)
        log.info("watching the links %s", ", ".join(self._links.names))
        self._rendezvous_handler = DriverRendezvous(settings.run_id, self._ready, self._pause, settings.fence_s)
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._watched: frozenset[int] = frozenset()  # sentinels in the selector
        self._ended = False
        self.fenced = False  # it does not hear its driver any more
        self._signals = _Signals()
        self._selector.register(self._signals, selectors.EVENT_READ)
        self._keeper = KeeperProcess(
            settings.run_dir,
            keeper_directory(settings.run_dir, settings.node),
            node=settings.node,
            procs=settings.procs,
            host=settings.addr,
            token=settings.token.partition(".")[0],
        )
        self._check: NodeCheck | None = None
        self._fork_server = ForkServer(control)
        self._preparation = self._prepared_by(outcome, self._status_by_template) if outcome is not None else None
        self._standbys = Standbys(self._config, settings.entrypoint, self._fork_server)
        self._started_t = 0.0
        self._left_behind = False
        self._clear: list[str] = []
        spec = WorkerSpec(
            role="worker",
            local_world_size=settings.procs,
            rdzv_handler=self._rendezvous_handler,
            entrypoint=settings.entrypoint,
            max_restarts=0,
            monitor_interval=LOOK_S,
        )
        super().__init__(spec, _OwnLogs())

    # -- what torchelastic calls ---------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = "worker") -> RunResult:
        for generation, rank, records in salvaged(self._pages):
            items = [(rank, record.t, record.event, dict(record.fields)) for record in records]
            spill.leave(self._settings.run_dir, generation, socket.gethostname(), items)
        memory.leave_record(self._settings.run_dir, self._settings.node, self._settings.driver)
        self._heard_t = time.monotonic()
        self._send("hello", host=socket.gethostname(), addr=self._settings.addr, token=self._settings.token, t=time.time())
        while not self._fork_server.ready:  # it imports, which takes a minute where many nodes share a file system
            self._next(QUIET_S)
        self._send("imported")
        if self._settings.health_s:
            self._check = NodeCheck(self._node_spec(), self._fork_server)
        while True:
            # Ends by the RendezvousGracefulExitError of `_ready`, once the driver has no more generations.
            self._initialize_workers(self._worker_group)
            self._watch()
            self._stop_workers(self._worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        told = self._rendezvous_handler.current
        assert told is not None
        self._keeper.begin(
            generation=told.generation,
            node_rank=told.node_rank,
            nodes=told.nodes,
            told=told.storage,
            renew=self._left_behind,
        )
        self._left_behind = False
        self._workers = Workers(
            self._settings.node,
            [self._environ(told, worker_group, local) for local in range(self._settings.procs)],
            pages=self._pages,
            output=self._output,
            log_file=node_log(self._settings.run_dir, told.generation, self._settings.node),
            config=self._config,
            entrypoint=self._settings.entrypoint,
            standbys=self._standbys,
        )
        self._started_t = time.monotonic()
        self._told = {}
        self._send("started", generation=told.generation, pids={str(r): p for r, p in self._workers.pids.items()})
        return dict(enumerate(self._workers.pids.values()))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._workers is None:
            return
        self._watch_sentinels(())
        self._left_behind = not self._workers.kill()
        self._tell_records()
        self._workers.close()
        self._workers = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return RunResult(state=WorkerState.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """The end of this agent: its workers go, and what they have reported is kept."""
        self._watch_sentinels(())
        if self._workers is not None:
            self._workers.kill()
            self._collect()
            self._workers.close()
            self._workers = None
        self._standbys.close()
        told = self._rendezvous_handler.current
        if told is not None:
            unkept = [item for item, _, _ in self._unkept]
            spill.leave(self._settings.run_dir, told.generation, socket.gethostname(), unkept)
        self._end_check()
        if self._preparation is not None:
            self._preparation.close()
        self._fork_server.close()
        self._output.close_pipes()  # they are in the directory of the pages
        with contextlib.suppress(OSError):
            memory.forget_record(self._settings.run_dir, self._settings.node)
            self._pages.rmdir()
        if self._clear:
            self._keeper.clear(self._clear)
        self._keeper.close()
        self._links.close()

    # -- one generation ------------------------------------------------------------------------------------------------

    def _environ(self, told: Generation, group: WorkerGroup, local_rank: int) -> dict[str, str]:
        worker = group.workers[local_rank]
        return {
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(self._settings.procs),
            "GROUP_RANK": str(told.node_rank),
            "GROUP_WORLD_SIZE": str(told.nodes),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "ROLE_NAME": group.spec.role,
            "MASTER_ADDR": told.master_addr,
            "MASTER_PORT": str(told.master_port),
            "TORCHELASTIC_RUN_ID": self._settings.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(told.generation),
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            GENERATION_VARIABLE: str(told.generation),
            RUN_DIR_VARIABLE: str(self._settings.run_dir),
            SESSION_VARIABLE: str(self._keeper.session_path),
            **({"GLOO_SOCKET_IFNAME": self._interface} if self._interface and "GLOO_SOCKET_IFNAME" not in os.environ else {}),
            GUARD_VARIABLE: json.dumps(told.guard),
            COLLECTIVE_TIMEOUT_VARIABLE: str(told.collective_timeout_s),
            **dump_files(os.environ, generation_directory(self._settings.run_dir, told.generation)),
        }

    def _ready(self, store_port: int) -> Generation:
        """Say that no worker is left here, and wait to be told of the next generation."""
        if self._check is not None:
            self._tell_health(self._check)
        inventory, other = self._keeper.inventory()
        self._send("ready", store_port=store_port, storage=inventory)
        for news in other:
            self._send("storage", news=news)
        while True:
            message = self._next(QUIET_S)
            if message is not None and message["type"] == "start":
                return Generation(
                    generation=message["generation"],
                    node_rank=message["node_rank"],
                    nodes=message["nodes"],
                    master_addr=message["master_addr"],
                    master_port=message["master_port"],
                    storage=message["storage"],
                    guard=message["guard"],
                    collective_timeout_s=message["collective_timeout_s"],
                )

    def _node_spec(self) -> NodeSpec:
        settings = self._settings
        return NodeSpec(
            procs=settings.procs,
            world=settings.world,
            device=settings.device,
            addr=settings.addr,
            tiers=tiers_of(storage.read(settings.run_dir), settings.node),
            meeting=self._pages / CHECK,
            limit_s=settings.health_s,
        )

    def _end_check(self) -> None:
        if self._check is not None:
            self._check.close()
            self._check = None

    # -- the preparation -----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """The node that was at it is gone: do it here, once there is a fork server."""
        while not self._fork_server.ready:
            self._fork_server.receive()
        ours, its = self._fork_server.Pipe()
        args = (its, self._config, self._settings.entrypoint, preparation.log_of(self._settings.run_dir))
        process = self._fork_server.Process(target=preparation.run, args=args, name="prepare")
        process.start()
        its.close()
        self._preparation = self._prepared_by(ours, lambda: process.exitcode)

    def _prepared_by(self, outcome: PipeEnd, status: Callable[[], int | None]) -> preparation.Preparation:
        log_file = preparation.log_of(self._settings.run_dir)
        return preparation.Preparation(outcome, status, self._settings.entrypoint, log_file)

    def _status_by_template(self) -> int | None:
        return self._fork_server.prepared

    def _tell_preparation(self, told: preparation.Preparation) -> None:
        if (word := told.receive()) is not None:
            self._send("preparation", **word)
        if told.over:
            told.close()
            self._preparation = None

    def _hear_of_servers(self) -> None:
        try:
            self._fork_server.receive()
        except ForkServerGone as error:
            raise _gone(f"nothing can be forked any more: {error}") from error

    # -- the world around one generation -------------------------------------------------------------------------------

    def _tell_health(self, check: NodeCheck) -> None:
        """Go on until the check of this node has come to its end; what it has found is told before `ready`."""
        while not check.examination.collect():
            self._next(check.examination.left_s)
        report = check.report()
        self._end_check()
        unwell = [finding for finding in report.findings if not finding.good]
        log.info("health check: %d findings in %.2f s", len(report.findings), report.took_s)
        for finding in unwell:
            log.warning("health check: %s: %s: %s", finding.verdict, finding.check, finding.text)
        self._send("health", ok=report.ok, took_s=report.took_s, findings=[asdict(finding) for finding in unwell])

    def _pause(self, seconds: float) -> None:
        """Wait between two tries to join the generation's store, or until something comes from the driver.

        Raises:
            CalledOff: the driver has given the generation up.
        """
        self._wait(seconds)
        if any(message["type"] in ("stop", "shutdown") for message in self._inbox):
            while (message := self._next(0.0)) is None or message["type"] != "stop":
                pass  # nothing else matters to a generation that does not start; a shutdown raises
            raise CalledOff

    def _watch(self) -> None:
        """Watch the workers and answer the driver until it says stop."""
        assert self._workers is not None
        looked_t = 0.0
        while True:
            message = self._next(max(0.0, looked_t + LOOK_S - time.monotonic()))
            match message:
                case {"type": "stop", "incident": incident}:
                    if incident is not None:
                        self._workers.last_words(self._settings.run_dir / INCIDENTS / incident)
                    return
                case {"type": "propose", "target": target, "reason": reason}:
                    self._send("proposed", checked=self._workers.propose(target, reason))
                case {"type": "arm", "target": target}:
                    self._workers.arm(target)
                case {"type": "look"}:
                    self._send("looked", ranks={str(rank): asdict(look) for rank, look in self._workers.look().items()})
            now = time.monotonic()
            if message is None and not self._ended and now < looked_t + LOOK_S:
                continue  # woken by what is none of the workers' business
            looked_t = now
            self._tell_records()
            self._tell_pulses()
            self._stand_by()
            for end in self._workers.reap() if self._ended else ():
                self._tell_records()
                self._tell_end(end)

    def _stand_by(self) -> None:
        """Fork ahead what a restart would need, one process at a look, once the ranks no longer need the time themselves."""
        assert self._workers is not None
        if self._workers.underway or time.monotonic() - self._started_t > STANDBY_S:
            workers = self._worker_group.workers
            rank = self._standbys.missing([each.global_rank for each in workers], workers[0].world_size)
            if rank is not None:
                self._standbys.fork(rank, workers[0].world_size)

    # -- the world outside ---------------------------------------------------------------------------------------------

    def _next(self, timeout_s: float) -> Message | None:
        """Wait for a message, the end of a worker, or a signal, at most `timeout_s`; returns the message, if there is one.

        Raises:
            RendezvousGracefulExitError: the driver has ended the run, is gone, or silent for longer than the fence.
        """
        if not self._inbox:
            self._wait(timeout_s)
        if not self._inbox:
            return None
        message = self._inbox.popleft()
        if message["type"] == "shutdown":
            self._clear = message["clear"]
            raise RendezvousGracefulExitError("the driver has ended the run")
        return message

    def _wait(self, timeout_s: float) -> None:
        self._watch_sentinels(self._workers.sentinels() if self._workers is not None else ())
        keeper = self._keeper.fileno() if self._keeper.running else None
        passing = [self._fork_server.fileno(), *([keeper] if keeper is not None else [])]
        if self._check is not None:
            passing += [connection.fileno() for connection in self._check.examination.waitable()]
        if self._preparation is not None:
            passing += self._preparation.readable()
        for each in passing:
            self._selector.register(each, selectors.EVENT_READ)
        try:
            ready = {key.fileobj for key, _ in self._selector.select(min(timeout_s, LINKS_S))}
        finally:
            for each in passing:
                self._selector.unregister(each)
        self._ended = not self._watched.isdisjoint(ready)
        if keeper in ready:
            if self._workers is not None:
                self._tell_records()  # of a step that others may go on from, should this node be lost in the next moment
            for news in self._keeper.receive():
                self._send("storage", news=news)
        if self._fork_server.fileno() in ready:
            self._hear_of_servers()
        if self._preparation is not None and self._preparation.due(ready):
            self._tell_preparation(self._preparation)
        if self._signals in ready:
            for name in self._signals.take():
                self._send("signal", name=name)
        self._tell_links()
        try:
            messages = self._connection.receive() if self._connection in ready else []
        except Disconnected as error:
            raise _gone(f"the driver is gone: {error}") from error
        now = time.monotonic()
        if messages:
            self._heard_t = now
        elif now - self._heard_t > self._settings.fence_s:
            self.fenced = True
            raise _gone(f"no word from the driver for {self._settings.fence_s:.0f} s: fenced")
        for message in messages:
            if message["type"] == "kept":
                for _ in range(message["count"]):
                    _, page, end = self._unkept.popleft()
                    page.keep(end)
            elif message["type"] == "storage":
                self._keeper.send(message["order"])
            elif message["type"] == "prepare":
                self._prepare()
            elif message["type"] == "ping":
                if self._workers is None:  # else their beats say that this agent lives
                    self._send("alive")
            else:
                self._inbox.append(message)

    def _watch_sentinels(self, wanted: Iterable[int]) -> None:
        """Have the selector know these and no others. None of them may be closed before it has been taken out here."""
        sentinels = frozenset(wanted)
        for each in self._watched - sentinels:
            self._selector.unregister(each)
        for each in sentinels - self._watched:
            self._selector.register(each, selectors.EVENT_READ)
        self._watched = sentinels

    def _send(self, kind: str, **fields: object) -> None:
        try:
            self._connection.send({"type": kind, "node": self._settings.node, **fields})
        except Disconnected as error:
            raise _gone(f"the driver is gone: {error}") from error

    def _tell_records(self) -> None:
        items = self._collect()
        if items:
            self._send("records", items=items)

    def _collect(self) -> list[spill.Item]:
        """Take new records from the pages; they stay in `_unkept` until the driver has written them."""
        assert self._workers is not None
        items: list[spill.Item] = []
        for rank, record, page in self._workers.take_records():
            items.append((rank, record.t, record.event, dict(record.fields)))
            self._unkept.append((items[-1], page, record.end))
        return items

    def _tell_pulses(self) -> None:
        assert self._workers is not None
        now = time.monotonic()
        if now - self._looked_t > UNWATCHED_S:
            self._workers.watch_from_now()
        self._looked_t = now
        if now - self._told_t < BEAT_S:
            return
        signs = self._workers.signs()
        news = {rank: (sign.mark, sign.state) for rank, sign in signs.items()}
        if news == self._told and now - self._told_t < QUIET_S:
            return
        self._told, self._told_t = news, now
        self._tell_records()  # what a rank has told before it finished these steps goes first
        self._send("beat", ranks={str(rank): vars(sign) for rank, sign in signs.items()})

    def _tell_links(self) -> None:
        now = time.monotonic()
        if now - self._links_t < LINKS_S:
            return
        self._links_t = now
        changes = self._links.look()
        if changes:
            self._send("link", t=clock.now(), changes=[asdict(change) for change in changes])

    def _tell_end(self, end: WorkerEnd) -> None:
        assert self._workers is not None
        stopped = self._workers.pulses()[end.rank].stopped
        self._send("exited", end=asdict(end), stopped=stopped)


def _gone(why: str) -> RendezvousGracefulExitError:
    """The end of this agent for a reason that somebody may look for in its log."""
    log.warning("%s; ending the workers", why)
    return RendezvousGracefulExitError(why)


class _OwnLogs(LogsSpecs):
    """Stands where torchelastic wants to be told of logs: our workers open their own, and no directory is made."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return LogsDest()

    @property
    def root_log_dir(self) -> str:
        return ""


class _Signals:
    """Signals as something to select on. The agent takes none of them for itself: they are news for the driver."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        for sig in FORWARDED:
            signal.signal(sig, lambda *_: None)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def take(self) -> list[str]:
        forwarded = {int(sig) for sig in FORWARDED}
        return [signal.Signals(number).name for number in self._reader.recv(256) if number in forwarded]
