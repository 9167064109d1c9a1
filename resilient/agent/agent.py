"""The node's agent: torchelastic's `LocalElasticAgent`, obeying our driver.

Owns the life cycle: ready, started, watched, ended, generation after generation. It acts on the driver's messages only;
torchelastic's own decision to restart is not used. All waits are turns of the loop (`resilient.agent.loop`), in which pings are
answered and the daemon's news passed on, so that none of them keeps the driver waiting.
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as PipeEnd
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from checkpoint.protocol import Clear, Cleared, DaemonNews, Inventory, TakeInventory
from resilient import clock, storage
from resilient.agent import memory, preparation
from resilient.agent.daemon import DaemonProcess
from resilient.agent.driver import Driver, gone
from resilient.agent.ending import end_workers, leave_records, leave_salvaged
from resilient.agent.environment import environment_of, token_of
from resilient.agent.forkserver import ForkServer, ForkServerGone
from resilient.agent.limits import (
    CLEAR_S,
    INSPECT_S,
    INVENTORY_S,
    LAST_WORDS_S,
    LOOK_S,
    QUIET_S,
    RUN_DIR_S,
    STANDBY_S,
    STORE_TRY_S,
    TURN_S,
)
from resilient.agent.links import LinkWatch, interface_of, interfaces_of, ports_of
from resilient.agent.loop import Loop
from resilient.agent.memory import daemon_directory, page_directory
from resilient.agent.rendezvous import CalledOff, DriverRendezvous
from resilient.agent.reports import Reports
from resilient.agent.signals import Signals
from resilient.agent.standby import Standbys
from resilient.agent.workers import Workers
from resilient.faults import INCIDENTS, WorkerEnd
from resilient.health.node import NodeCheck, NodeSpec, tiers_of
from resilient.protocol.connection import Connection
from resilient.protocol.messages import (
    AgentMessage,
    Arm,
    DaemonRequests,
    DriverMessage,
    Health,
    HealthFinding,
    Hello,
    Imported,
    Inspect,
    Inspected,
    LinkChange,
    LinksChanged,
    Prepare,
    Propose,
    Proposed,
    Ready,
    RecordsWritten,
    Shutdown,
    SignalReceived,
    Start,
    Started,
    Stop,
    WorkerEnded,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

CHECK = "health-check"  # beside the heartbeat regions; whatever is no region goes when the next agent starts


@dataclass(frozen=True)
class AgentSettings:
    """What an agent is started with. Attributes: token: what the driver knows it by, a dot, and its incarnation."""

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

    Invariants: there are workers from `_start_workers` to `_stop_workers`, and `_watch` runs in between. Handlers of the loop send,
    note and pass on; what has to wait is done by `_next` and those who call it.

    Args:
        connection: to the driver.
        control: to the template; see `resilient.agent.forkserver`.
        outcome: what the preparation writes to, where the template forks it.
    """

    def __init__(
        self,
        settings: AgentSettings,
        connection: Connection,
        control: socket.socket,
        outcome: PipeEnd | None = None,
    ) -> None:
        self._settings = settings
        self._token, self._incarnation = token_of(settings.token)
        self._config = settings.run_dir / "config.yaml"
        self._storage = storage.read(settings.run_dir)
        self._pages = page_directory(settings.run_dir, settings.node)
        self._loop = Loop()
        self._driver = Driver(
            self._loop,
            connection,
            fence_s=settings.fence_s,
            handlers={RecordsWritten: self._on_written, DaemonRequests: self._on_requests, Prepare: self._on_prepare},
        )
        self._reports = Reports(
            lambda report, droppable: self._driver.send(report, droppable=droppable), lambda: self._driver.generation
        )
        self._workers: Workers | None = None
        self._worker_has_ended = False
        self._left_behind = False
        self._started_t = 0.0
        self._ending = False
        self._clear: tuple[str, ...] = ()
        self._links = LinkWatch(interfaces_of(settings.addr, os.environ), ports_of(os.environ))
        self._links_t = time.monotonic()
        self._interface = interface_of(settings.addr)
        log.info("watching the links %s", ", ".join(self._links.names))
        self._signals = Signals()
        self._rendezvous_handler = DriverRendezvous(settings.run_id, self._ready, self._pause, settings.fence_s, self._call)
        self._inventory: Inventory | None = None
        self._inventory_awaited = self._cleared = False
        self._daemon = DaemonProcess(
            self._loop,
            self._storage,
            daemon_directory(settings.run_dir, settings.node),
            node=settings.node,
            procs=settings.procs,
            host=settings.addr,
            token=self._token,
            on_news=self._on_news,
        )
        self._check: NodeCheck | None = None
        self._fork_server = ForkServer(control, self._loop.wait_readable)
        self._prepare_here = False
        self._preparation = self._prepared_by(outcome, lambda: self._fork_server.prepared) if outcome is not None else None
        self._standbys = Standbys(self._config, settings.entrypoint, self._fork_server)
        self._loop.watch(self._signals.fileno(), self._on_signals)
        self._loop.watch(self._fork_server.fileno(), self._on_template)
        self._loop.each_turn(self._reports.tick)
        self._loop.each_turn(self._watch_links)
        spec = WorkerSpec(
            role="worker",
            local_world_size=settings.procs,
            rdzv_handler=self._rendezvous_handler,
            entrypoint=settings.entrypoint,
            max_restarts=0,
            monitor_interval=LOOK_S,
        )
        super().__init__(spec, _OwnLogs())

    @property
    def fenced(self) -> bool:
        """Whether it has ended because it did not hear from its driver any more."""
        return self._driver.fenced

    # -- what torchelastic calls ---------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = "worker") -> RunResult:
        settings = self._settings
        found = memory.salvaged(self._pages)
        if found:
            leaving = self._loop.in_thread(lambda: leave_salvaged(settings.run_dir, found), "salvage")
            self._loop.wait_until(leaving.done, RUN_DIR_S)
        memory.leave_record(settings.run_dir, settings.node, settings.driver)
        self._driver.send(
            Hello(
                generation=0,
                node=settings.node,
                incarnation=self._incarnation,
                token=self._token,
                host=socket.gethostname(),
                addr=settings.addr,
                t=time.time(),
            )
        )
        while not self._fork_server.ready:  # it imports, which takes a minute where many nodes share a file system
            self._next(QUIET_S)
        self._driver.send(Imported(generation=0))
        if settings.health_s:
            self._check = NodeCheck(self._node_spec(), self._fork_server)
        while True:
            # Ends by the RendezvousGracefulExitError of `_ready`, once the driver has no more generations.
            self._initialize_workers(self._worker_group)
            self._watch()
            self._stop_workers(self._worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        start, settings = self._rendezvous_handler.current, self._settings
        assert start is not None
        log_dir = settings.run_dir / "logs" / f"g{start.generation}"
        made = self._loop.in_thread(lambda: log_dir.mkdir(parents=True, exist_ok=True), "logs")
        self._loop.wait_until(made.done, RUN_DIR_S)
        try:
            self._daemon.begin(start, renew=self._left_behind)
        except ValueError as error:
            raise gone(f"the driver has sent what workers cannot go on from: {error}") from error
        self._left_behind = False
        environs = [
            environment_of(
                start,
                local,
                settings.procs,
                run_dir=settings.run_dir,
                run_id=settings.run_id,
                session=self._daemon.session_path,
                interface=self._interface,
                log_dir=log_dir,
            )
            for local in range(settings.procs)
        ]
        self._workers = Workers(
            settings.node,
            environs,
            pages=self._pages,
            log_dir=log_dir,
            config=self._config,
            entrypoint=settings.entrypoint,
            standbys=self._standbys,
        )
        self._started_t, self._worker_has_ended = time.monotonic(), False
        self._reports.begin(self._workers, start.report_s)
        self._send(Started(generation=start.generation, pids=self._workers.pids))
        return dict(enumerate(self._workers.pids.values()))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        workers = self._workers
        if workers is None:
            return
        self._left_behind = not end_workers(workers, self._loop)
        self._reports.end()
        self._workers = None
        workers.close()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return RunResult(state=WorkerState.HEALTHY)

    def _shutdown(self, death_sig: Any = None, timeout: int = 30) -> None:
        """The end of this agent: its workers go, and what they have reported is kept."""
        self._ending = True
        self._driver.hang_up()
        self._loop.unwatch(self._fork_server.fileno())
        if self._workers is not None:
            end_workers(self._workers, self._loop)
            self._reports.collect()
        self._standbys.close()
        kept = leave_records(self._settings.run_dir, self._reports.unwritten, self._loop)
        if self._workers is not None:
            self._workers.close(keep_records=not kept)
            self._workers = None
        self._end_check()
        if self._preparation is not None:
            self._preparation.close()
        self._fork_server.close()
        with contextlib.suppress(OSError):
            memory.forget_record(self._settings.run_dir, self._settings.node)
            self._pages.rmdir()
        if self._clear:
            self._daemon.send(Clear(generation=self._driver.generation, tiers=self._clear))
            self._loop.wait_until(lambda: self._cleared or not self._daemon.running, CLEAR_S)
        self._daemon.close()
        self._links.close()
        self._loop.close()

    # -- before a generation -------------------------------------------------------------------------------------------

    def _ready(self, store_port: int) -> Start:
        """Say that no worker is left here, and wait for the next generation."""
        if self._check is not None:
            self._report_health(self._check)
        inventory = self._take_inventory()
        self._send(Ready(generation=self._driver.generation, store_port=store_port, inventory=inventory))
        while True:
            message = self._next(QUIET_S)
            if isinstance(message, Start):
                self._driver.generation = message.generation
                return message

    def _take_inventory(self) -> Inventory:
        """What this node holds; nothing if its daemon does not say."""
        generation = self._driver.generation
        self._inventory, self._inventory_awaited = None, True
        self._daemon.send(TakeInventory(generation=generation))
        self._await(lambda: self._inventory is not None or not self._daemon.running, INVENTORY_S)
        self._inventory_awaited = False
        if self._inventory is None:
            log.warning("the snapshot daemon does not say what it holds")
            return Inventory(generation=generation, address="", shards=())
        return self._inventory

    def _report_health(self, check: NodeCheck) -> None:
        """Go on until the check of this node has come to its end; what it has found is reported before `Ready`."""
        while not check.examination.collect():
            self._next(check.examination.left_s, [each.fileno() for each in check.examination.waitable()])
        report = check.report()
        self._end_check()
        unwell = [finding for finding in report.findings if not finding.good]
        log.info("health check: %d findings in %.2f s", len(report.findings), report.took_s)
        for each in unwell:
            log.warning("health check: %s: %s: %s", each.verdict, each.check, each.text)
        findings = tuple(
            HealthFinding(check=each.check, verdict=each.verdict, text=each.text, measured=each.measured) for each in unwell
        )
        self._send(Health(generation=self._driver.generation, took_s=report.took_s, findings=findings))

    def _node_spec(self) -> NodeSpec:
        settings = self._settings
        return NodeSpec(
            procs=settings.procs,
            world=settings.world,
            device=settings.device,
            addr=settings.addr,
            tiers=tiers_of(self._storage, settings.node),
            meeting=self._pages / CHECK,
            limit_s=settings.health_s,
        )

    def _end_check(self) -> None:
        if self._check is not None:
            self._check.close()
            self._check = None

    def _pause(self, seconds: float) -> None:
        """Wait between two tries to join the generation's store. Raises CalledOff when the driver has given the generation up."""
        self._loop.wait_until(self._is_called_off, seconds)
        self._raise_if_called_off()

    def _call(self, function: Callable[[], T]) -> T:
        """Try a store, in a thread: a name or a server that does not answer takes seconds. Raises CalledOff."""
        trying = self._loop.in_thread(function, "store")
        done = self._loop.wait_until(lambda: trying.done() or self._is_called_off(), STORE_TRY_S)
        self._raise_if_called_off()
        if not done:
            raise TimeoutError(f"no store within {STORE_TRY_S:.0f} s")
        return trying.result()

    def _is_called_off(self) -> bool:
        return self._driver.awaits(Stop, Shutdown)

    def _raise_if_called_off(self) -> None:
        if self._is_called_off():
            while not isinstance(self._next(0.0), Stop):
                pass  # nothing else matters to a generation that does not start; a shutdown raises
            raise CalledOff

    # -- while workers run ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Watch the workers and answer the driver until it says stop."""
        assert self._workers is not None
        workers, generation = self._workers, self._driver.generation
        while True:
            message = self._next(self._reports.due_in_s(), workers.sentinels())
            match message:
                case Stop() if message.generation >= generation:
                    if message.incident is not None:
                        self._take_last_words(workers, self._settings.run_dir / INCIDENTS / message.incident)
                    return
                case Propose() if message.generation >= generation:
                    self._send(Proposed(generation=generation, checked=workers.propose(message.reason)))
                case Arm() if message.generation >= generation:
                    workers.arm(message.target)
                case Inspect() if message.generation >= generation:
                    looking = self._loop.in_thread(workers.inspect, "inspection")
                    found = looking.result() if self._loop.wait_until(looking.done, INSPECT_S) else {}
                    self._send(Inspected(generation=generation, ranks=found))
            ended = self._worker_has_ended
            if message is None and not ended and self._reports.due_in_s() > 0:
                continue  # woken by what is none of the workers' business
            self._reports.report()
            self._stand_by(workers)
            if ended:
                self._worker_has_ended = False
                for end in workers.reap():
                    self._report_end(workers, end)

    def _take_last_words(self, workers: Workers, folder: Path) -> None:
        """It is written to the run directory: a file system that stands still keeps nobody alive for it."""
        taking = self._loop.in_thread(lambda: workers.last_words(folder), "last words")
        if not self._loop.wait_until(taking.done, LAST_WORDS_S):
            log.warning("the last words of the workers are not in %s within %.0f s", folder, LAST_WORDS_S)

    def _stand_by(self, workers: Workers) -> None:
        """Fork ahead what a restart would need, one process at a look, once the ranks no longer need the time themselves."""
        if workers.underway or time.monotonic() - self._started_t > STANDBY_S:
            group = self._worker_group.workers
            rank = self._standbys.missing([each.global_rank for each in group], group[0].world_size)
            if rank is not None:
                self._standbys.fork(rank, group[0].world_size)

    def _report_end(self, workers: Workers, end: WorkerEnd) -> None:
        stopped = workers.pulses()[end.rank].stopped
        self._send(WorkerEnded(generation=self._driver.generation, end=end, stopped=stopped))

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _next(self, timeout_s: float, also: Sequence[int] = ()) -> DriverMessage | None:
        """Wait for a message of the driver, at most `timeout_s`; it is returned, if there is one.

        Args:
            also: descriptors that end the wait; the sentinels of workers that run, or what belongs to a check.

        Raises:
            RendezvousGracefulExitError: the driver has ended the run, is gone, or silent for longer than the fence.
        """
        ready: set[int] = set()
        if not self._driver.inbox:
            preparing = self._preparation.readable() if self._preparation is not None else []
            ready = self._loop.turn(timeout_s, [*also, *preparing])
        if self._workers is not None and not ready.isdisjoint(also):
            self._worker_has_ended = True
        if self._preparation is not None and self._preparation.due(ready):
            self._report_preparation(self._preparation)
        if self._prepare_here and self._fork_server.ready:
            self._prepare_here = False
            self._prepare()
        message = self._driver.next()
        if isinstance(message, Shutdown):
            self._clear = message.clear
            raise RendezvousGracefulExitError("the driver has ended the run")
        return message

    def _await(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Run turns until the condition holds, at most `limit_s`.

        Raises:
            RendezvousGracefulExitError: the driver has ended the run meanwhile, or is gone.
        """
        self._loop.wait_until(lambda: condition() or self._driver.awaits(Shutdown), limit_s)
        while self._driver.awaits(Shutdown):
            self._next(0.0)

    def _send(self, message: AgentMessage) -> None:
        """Send what is told at once; the records so far go before it."""
        self._reports.flush()
        self._driver.send(message)

    def _on_written(self, message: RecordsWritten) -> None:
        self._reports.written(message.count)

    def _on_requests(self, message: DaemonRequests) -> None:
        for request in message.requests:
            self._daemon.send(request)

    def _on_prepare(self, _: Prepare) -> None:
        self._prepare_here = True

    def _on_news(self, news: Sequence[DaemonNews]) -> None:
        passed_on: list[DaemonNews] = []
        for each in news:
            if isinstance(each, Inventory) and self._inventory_awaited:
                self._inventory, self._inventory_awaited = each, False
            elif isinstance(each, Cleared):
                self._cleared = True
            else:
                passed_on.append(each)
        if not self._ending:
            self._reports.add_news(passed_on)

    def _on_signals(self) -> None:
        for name in self._signals.take():
            if not self._ending:
                self._send(SignalReceived(generation=self._driver.generation, name=name))

    def _on_template(self) -> None:
        try:
            self._fork_server.receive()
        except ForkServerGone as error:
            raise gone(f"nothing can be forked any more: {error}") from error

    def _watch_links(self) -> None:
        now = time.monotonic()
        if self._ending or now - self._links_t < TURN_S:
            return
        self._links_t = now
        changes = tuple(
            LinkChange(interface=each.interface, state=each.state, down_s=each.down_s, detail=each.detail, counters=each.counters)
            for each in self._links.look()
        )
        if changes:
            self._send(LinksChanged(generation=self._driver.generation, t=clock.now(), changes=changes))

    # -- the preparation -----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """The node that was at it is gone: do it here."""
        ours, its = self._fork_server.Pipe()
        args = (its, self._config, self._settings.entrypoint, preparation.log_of(self._settings.run_dir))
        process = self._fork_server.Process(target=preparation.run, args=args, name="prepare")
        process.start()
        its.close()
        self._preparation = self._prepared_by(ours, lambda: process.exitcode)

    def _prepared_by(self, outcome: PipeEnd, status: Callable[[], int | None]) -> preparation.Preparation:
        log_file = preparation.log_of(self._settings.run_dir)
        return preparation.Preparation(outcome, status, self._settings.entrypoint, log_file)

    def _report_preparation(self, running: preparation.Preparation) -> None:
        if (news := running.receive()) is not None:
            self._driver.send(msgspec.structs.replace(news, generation=self._driver.generation))
        if running.over:
            running.close()
            self._preparation = None


class _OwnLogs(LogsSpecs):
    """Stands where torchelastic wants to be told of logs: our workers open their own, and no directory is made."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return LogsDest()

    @property
    def root_log_dir(self) -> str:
        return ""
