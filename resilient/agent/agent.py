"""The node's agent: torchelastic's `LocalElasticAgent`, obeying our driver.

Owns the life cycle: ready, started, watched, ended, generation after generation. It acts on the driver's messages only;
torchelastic's own decision to restart is not used. All waits are turns of the loop (`resilient.agent.loop`), in which pings are
answered and the daemon's news passed on, so that none of them keeps the driver waiting.
"""

import logging
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as PipeEnd
from typing import Any, TypeVar

import msgspec
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from checkpoint.handshake import daemon_keys
from checkpoint.protocol import Clear, DaemonNews, Inventory
from resilient.agent import memory, node_check, preparation
from resilient.agent.daemon import DaemonProcess
from resilient.agent.driver import Driver, gone
from resilient.agent.ending import end_output, end_workers, leave_records, leave_salvaged
from resilient.agent.environment import environment_of, token_of
from resilient.agent.forkserver import ForkServer, ForkServerGone
from resilient.agent.limits import CLEAR_S, INVENTORY_S, JOIN_S, QUIET_S, REGION_POLL_S, RUN_DIR_S, STORE_TRY_S
from resilient.agent.links import interface_of
from resilient.agent.logs import NodeOutput
from resilient.agent.loop import Loop
from resilient.agent.memory import daemon_directory, region_directory
from resilient.agent.node_events import NodeEvents
from resilient.agent.rendezvous import CalledOff, DriverRendezvous, store_prefix
from resilient.agent.reports import Reports
from resilient.agent.settings import AgentSettings
from resilient.agent.standby import Standbys
from resilient.agent.watch import Watch
from resilient.agent.workers import Workers
from resilient.health.node import NodeCheck
from resilient.logs.paths import agent_log, generation_directory, node_log
from resilient.protocol.connection import Connection
from resilient.protocol.messages import (
    AgentFailed,
    AgentMessage,
    DaemonRequests,
    DriverMessage,
    Hello,
    Imported,
    Prepare,
    Ready,
    RecordsWritten,
    ReplaceDaemon,
    Shutdown,
    Start,
    Started,
    Stop,
)
from resilient.storage import nonce_of

log = logging.getLogger(__name__)

T = TypeVar("T")


class NodeAgent(LocalElasticAgent):
    """Runs the workers of one node, generation after generation, as the driver says.

    Invariants: there are workers from `_start_workers` to `_stop_workers`, and a `Watch` runs in between. Handlers of the loop
    send, note and pass on; what has to wait is done by `_next` and those who call it.

    Args:
        connection: to the driver.
        control: to the template; see `resilient.agent.template`.
        output: reads what ranks print.
        kept: the campaign's storage, as `storage.read` gives it.
        outcome: what the preparation writes to, where the template forks it.
    """

    def __init__(
        self,
        settings: AgentSettings,
        connection: Connection,
        control: socket.socket,
        output: NodeOutput,
        kept: dict[str, Any],
        outcome: PipeEnd | None = None,
    ) -> None:
        self._settings = settings
        self._output = output
        self._token, self._incarnation = token_of(settings.token)
        self._storage = kept
        nonce = nonce_of(kept)
        self._regions = region_directory(settings.run_dir, settings.node, nonce=nonce)
        self._loop = Loop()
        self._driver = Driver(
            self._loop,
            connection,
            fence_s=settings.fence_s,
            handlers={
                RecordsWritten: self._on_written,
                DaemonRequests: self._on_requests,
                ReplaceDaemon: lambda _: self._daemon.kill("does not answer the driver"),
                Prepare: self._on_prepare,
            },
        )
        self._reports = Reports(
            lambda report, droppable: self._driver.send(report, droppable=droppable), lambda: self._driver.generation
        )
        self._workers: Workers | None = None
        self._watch: Watch | None = None
        self._left_behind = False
        self._stuck: tuple[int, ...] = ()
        self._devices: tuple[int, ...] | None = None  # that ranks computed on last
        self._ending = False
        self._clear: tuple[str, ...] = ()
        self._interface = interface_of(settings.addr)
        self._rendezvous_handler = DriverRendezvous(
            settings.run_id, settings.addr, self._token, self._ready, self._pause, JOIN_S, self._call
        )
        self._daemon = DaemonProcess(
            self._loop,
            self._storage,
            daemon_directory(settings.run_dir, settings.node, nonce=nonce),
            run_dir=settings.run_dir,
            node=settings.node,
            host=settings.addr,
            keys=daemon_keys(self._token),
            on_news=self._on_news,
            pass_on=lambda fd: output.pass_on(fd, agent_log(settings.run_dir, settings.node)),
        )
        self._check: NodeCheck | None = None
        self._fork_server = ForkServer(control, self._loop.wait_readable)
        self._preparations = preparation.Preparations(
            self._fork_server,
            config=settings.config,
            entrypoint=settings.entrypoint,
            log=preparation.log_of(settings.run_dir),
            send=lambda news: self._send(msgspec.structs.replace(news, generation=self._driver.generation)),
            outcome=outcome,
        )
        self._standbys = Standbys(settings.config, settings.entrypoint, self._fork_server, left_behind=self._never_died)
        self._loop.watch(self._fork_server.fileno(), self._on_template)
        self._loop.each_turn(self._reports.tick)
        self._events = NodeEvents(self._loop, settings.addr, self._send, lambda: self._driver.generation, settings.gpus)
        spec = WorkerSpec(
            role="worker",
            local_world_size=settings.procs,
            rdzv_handler=self._rendezvous_handler,
            entrypoint=settings.entrypoint,
            max_restarts=0,
            monitor_interval=REGION_POLL_S,
        )
        super().__init__(spec, _OwnLogs())

    @property
    def fenced(self) -> bool:
        """Whether it has ended because it did not hear from its driver any more."""
        return self._driver.fenced

    @property
    def driver_gone(self) -> bool:
        """Whether it has ended without a word of its driver that it should."""
        return self._driver.gone

    # -- what torchelastic calls ---------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = "worker") -> RunResult:
        try:
            return self._obey()
        except RendezvousGracefulExitError:
            raise
        except Exception as error:
            self._driver.last_word(AgentFailed(generation=self._driver.generation, error=f"{type(error).__name__}: {error}"))
            raise

    def _obey(self) -> RunResult:
        """All generations. Ends by an exception: RendezvousGracefulExitError where that was to be."""
        settings = self._settings
        found = memory.salvaged(self._regions)
        if found:
            leaving = self._loop.in_thread(lambda: leave_salvaged(settings.run_dir, found), "salvage")
            self._loop.wait_until(leaving.done, RUN_DIR_S)
        memory.leave_record(self._regions, settings.driver, settings.addr)
        self._driver.send(
            Hello(
                generation=0,
                node=settings.node,
                incarnation=self._incarnation,
                host=socket.gethostname(),
                addr=settings.addr,
                t=time.time(),
                place=settings.place,
            )
        )
        while not self._fork_server.ready:  # it imports, which takes a minute where many nodes share a file system
            self._next(QUIET_S)
        self._driver.send(Imported(generation=0))
        if settings.health_s:
            self._check = NodeCheck(node_check.spec_of(settings, self._storage, self._regions), self._fork_server)
        while True:
            # Ends by the RendezvousGracefulExitError of `_ready`, once the driver has no more generations.
            self._initialize_workers(self._worker_group)
            assert self._watch is not None
            self._watch.run()
            self._stop_workers(self._worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        start, settings = self._rendezvous_handler.current, self._settings
        assert start is not None
        try:
            self._daemon.begin(start, renew=self._left_behind)
        except ValueError as error:
            raise gone(f"the driver has sent what workers cannot go on from: {error}") from error
        self._left_behind = False
        environs = [
            environment_of(
                start,
                local,
                settings,
                session=self._daemon.session_path,
                interface=self._interface,
                store_prefix=store_prefix(self._token, start.generation),
                log_dir=generation_directory(settings.run_dir, start.generation),
            )
            for local in range(len(start.devices))
        ]
        memory.keep(self._regions, settings.driver, settings.addr)
        self._workers = Workers(
            settings.node,
            environs,
            regions=self._regions,
            output=self._output,
            log_file=node_log(settings.run_dir, start.generation, settings.node),
            config=settings.config,
            entrypoint=settings.entrypoint,
            standbys=self._standbys,
        )
        self._watch = Watch(
            start,
            self._workers,
            loop=self._loop,
            reports=self._reports,
            standbys=self._standbys,
            next_message=self._next,
            send=self._send,
            run_dir=settings.run_dir,
        )
        self._reports.begin(self._workers, start.report_s)
        self._send(Started(generation=start.generation, pids=self._workers.pids))
        return dict(enumerate(self._workers.pids.values()))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        workers = self._workers
        if workers is None:
            return
        self._left_behind = not end_workers(workers, self._loop)
        self._fork_server.end_strays()
        self._stuck += workers.stuck
        self._reports.end()
        self._workers = None
        workers.close()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return RunResult(state=WorkerState.HEALTHY)

    def _shutdown(self, death_sig: Any = None, timeout: int = 30) -> None:
        """The end of this agent: its workers go, and what they have reported is kept."""
        self._ending = True
        self._driver.hang_up()
        self._events.hush()
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
        self._preparations.close()
        self._fork_server.end_strays()
        self._fork_server.close()
        end_output(self._output, self._loop)
        memory.clear_up(self._regions)
        if self._clear:
            self._daemon.send(Clear(generation=self._driver.generation, tiers=self._clear))
            self._loop.wait_until(lambda: self._daemon.cleared or not self._daemon.running, CLEAR_S)
        self._daemon.close()
        self._events.close()
        self._loop.close()

    # -- before a generation -------------------------------------------------------------------------------------------

    def _ready(self, store_port: int) -> Start:
        """Say that no worker is left here, and wait for the next generation."""
        faults = [each for each in self._events.take_gpu_faults() if not each.over]
        if faults:
            self._standbys.close()  # what they hold ready on a GPU may have gone with the ranks' contexts
        if (faults or self._stuck) and self._check is None and self._settings.health_s:
            spec = node_check.spec_of(self._settings, self._storage, self._regions, faults, self._stuck, self._devices)
            self._check, self._stuck = NodeCheck(spec, self._fork_server), ()
        if self._check is not None:
            self._report_health(self._check)
        inventory = self._take_inventory()
        self._send(Ready(generation=self._driver.generation, store_port=store_port, inventory=inventory))
        while True:
            message, _ = self._next(QUIET_S)
            if isinstance(message, Start):
                self._driver.generation = message.generation
                self._devices = message.devices
                self._worker_group.spec.local_world_size = len(message.devices)
                return message

    def _never_died(self, pid: int) -> None:
        """A standby may hold memory of a GPU: the next ranks wait for it as for that of a worker."""
        self._stuck += (pid,)

    def _take_inventory(self) -> Inventory:
        """What this node holds; nothing if its daemon does not say."""
        self._daemon.ask_inventory()
        self._await(lambda: self._daemon.inventory is not None or not self._daemon.running, INVENTORY_S)
        self._daemon.ask_no_more()
        if self._daemon.inventory is None:
            log.warning("the snapshot daemon does not say what it holds")
            return Inventory(generation=self._driver.generation, address="", shards=())
        return self._daemon.inventory

    def _report_health(self, check: NodeCheck) -> None:
        """Go on until the check of this node has come to its end; what it has found is reported before `Ready`."""
        while not check.examination.collect():
            self._next(check.examination.left_s, [each.fileno() for each in check.examination.waitable()])
        health = node_check.message_of(check.report())
        self._end_check()
        self._send(msgspec.structs.replace(health, generation=self._driver.generation))

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
            while not isinstance(self._next(0.0)[0], Stop):
                pass  # nothing else matters to a generation that does not start; a shutdown raises
            raise CalledOff

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _next(self, timeout_s: float, also: Sequence[int] = ()) -> tuple[DriverMessage | None, bool]:
        """Wait for a message of the driver, at most `timeout_s`; returns it, if there is one.

        Args:
            also: descriptors that end the wait; whether one of them is readable is returned.

        Raises:
            RendezvousGracefulExitError: the driver has ended the run, is gone, or silent for longer than the fence.
        """
        ready: set[int] = set()
        if not self._driver.inbox:
            ready = self._loop.turn(timeout_s, [*also, *self._preparations.readable()])
        self._preparations.step(ready)
        message = self._driver.next()
        if isinstance(message, Shutdown):
            self._clear = message.clear
            raise RendezvousGracefulExitError("the driver has ended the run")
        return message, not ready.isdisjoint(also)

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
        self._preparations.want()

    def _on_news(self, news: Sequence[DaemonNews]) -> None:
        if not self._ending:
            self._reports.add_news(news)

    def _on_template(self) -> None:
        try:
            self._fork_server.receive()
        except ForkServerGone as error:
            raise gone(f"nothing can be forked any more: {error}") from error


class _OwnLogs(LogsSpecs):
    """Stands where torchelastic wants to be told of logs: our workers open their own, and no directory is made."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return LogsDest()

    @property
    def root_log_dir(self) -> str:
        return ""
