"""The driver: the shell around the control core.

Owns the clock, the signals, the agents' processes and what connects them to the core: it feeds the core with news and carries out
the effects that come back, in order; it decides nothing. Its event loop touches no file of the run directory and waits for nobody.
"""

import asyncio
import logging
import os
import secrets
import signal
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from checkpoint.handshake import encrypting
from resilient import clock, entries, ledger
from resilient.config import Config, ConfigError, Layout, Problem
from resilient.control import Coordinator
from resilient.control.preparation import Preparation
from resilient.driver import server
from resilient.driver.agents import launcher_of, listening_addresses
from resilient.driver.departures import Departures
from resilient.driver.display import Display, duration
from resilient.driver.durable import Durable
from resilient.driver.ending import Ending
from resilient.driver.inquiries import inquire
from resilient.driver.job import description
from resilient.driver.launch import AgentAhead, Launcher
from resilient.driver.lease import LEASE_S
from resilient.driver.server import Server
from resilient.driver.signals import Signals
from resilient.driver.sinks_client import SinksClient, unsent
from resilient.driver.spill_file import SpillFile
from resilient.driver.starting import Stage, Starting
from resilient.driver.stops import stops_of
from resilient.driver.writer import Listeners, Writer
from resilient.exits import Exit
from resilient.outbox import (
    AcknowledgeRecords,
    Effect,
    Finish,
    InquireAbout,
    Launch,
    Outbox,
    Quarantine,
    RaiseFence,
    RequestDaemon,
    Send,
    WriteEvent,
    WriteMetrics,
    WriteText,
)
from resilient.protocol.disk import DiskSettings
from resilient.protocol.messages import (
    AgentMessage,
    Hello,
    Imported,
    PreparationEnded,
    PreparationProgress,
    Prepare,
    Ready,
    Shutdown,
    SignalReceived,
    Stop,
)
from resilient.slurm.allocation import Allocation
from resilient.summaries import Summaries

log = logging.getLogger(__name__)

TICK_S = 0.1
PING_S = 1.0
SHUTDOWN_S = 3.0
KILL_S = 8.0  # for agents that did not end by themselves
FLUSH_S = 5.0  # for a run directory that does not get on at the end
SINKS_S = 5.0  # for what sinks have not sent at the end


class Driver:
    """One job of a campaign.

    Invariant: once `_finished` is set, the core is not asked again; once `_taken_over`, nothing more is written.

    Args:
        config: the checked config, with an existing and locked run directory.
        layout: what the config comes to on these machines.
        coordinator: the control core of this job.
        display: where a person looks.
        explain: turns an error that is found after the config was read into a message that names file and line.
        allocation: of Slurm, whose nodes are used; None: agents are processes of this machine.
        chain: name of the jobs of the chain that this job belongs to, if it does.
        settings: of the disk process.
        spill: for what the run directory does not take.
        drain_s: of a stop on request.
        ahead: the first agent's process, if it was started before all that was known.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        coordinator: Coordinator,
        display: Display,
        explain: Callable[[ConfigError], str],
        *,
        identity: str,
        nonce: str,
        allocation: Allocation | None,
        chain: str | None,
        settings: DiskSettings,
        spill: SpillFile,
        drain_s: float,
        ahead: AgentAhead | None = None,
    ) -> None:
        self._config = config
        self._layout = layout
        self._coordinator = coordinator
        self._display = display
        self._explain = explain
        self._allocation = allocation
        self._chain = chain
        self._nonce = nonce
        self._ahead = ahead
        secret = secrets.token_hex(16)
        self._secret = encrypting(secret) if config.cluster.tls == "psk" else secret
        listeners = Listeners(self._on_trouble, self._on_well, self._on_taken_over, self._on_defect)
        self._writer = Writer(settings, spill, listeners, display.log)
        self._summaries = Summaries()
        self._durable = Durable(config, identity, allocation, chain, self._writer, display.note)
        self._sinks = SinksClient(config)
        heard = server.Listeners(self._on_connected, self._on_message, self._on_failing, self._on_ended)
        self._server = Server(self._secret, lambda: self._coordinator.generation, heard)
        self._stops = stops_of(config, allocation, coordinator, drain_s, self._turn, display.note)
        self._departures = Departures(
            coordinator,
            config.run_dir,
            settings.token,
            allocation,
            self._stops,
            reservation=os.environ.get("SLURM_JOB_RESERVATION", ""),
            turn=self._turn,
            note=display.note,
        )
        self._incarnations = dict.fromkeys(range(config.cluster.slots), 0)
        self._alive: set[tuple[int, int]] = set()
        self._preparation = Preparation()
        self._starting = Starting()
        self._outbox = Outbox()
        self._taken_over = False
        self._defect = ""  # its traceback
        self._tasks: set[asyncio.Task[None]] = set()
        self._launcher: Launcher
        self._finished: asyncio.Future[Finish]

    # -- from beginning to end -----------------------------------------------------------------------------------------

    async def run(self) -> Ending:
        """Run the job to its end."""
        loop = asyncio.get_running_loop()
        self._finished = loop.create_future()
        Signals(loop, self._on_signal, self._display, drains=self._config.resilience.on_hangup == "drain").install()
        self._writer.start()
        self._sinks.start()
        port = self._server.listen(listening_addresses(self._config, self._allocation))
        self._launcher = launcher_of(
            self._config,
            self._layout,
            self._allocation,
            secret=self._secret,
            port=port,
            ended=self._on_ended,
            ahead=self._ahead,
            nonce=self._nonce,
        )
        for work in (self._tick(), self._ping(), self._watch_duration(), self._departures.watch()):
            self._soon(work)
        if self._stops is not None:
            self._soon(self._stops.watch())
        if self._chain is not None:
            self._soon(self._durable.ensure_successor())
        self._write_event(WriteEvent("run_started", description(self._config, self._layout), self._coordinator.generation))
        self._turn(self._coordinator.begin)
        finish = await self._finished
        return await self._end(finish)

    async def _end(self, finish: Finish) -> Ending:
        """End the agents, and have everything written that can be."""
        if launching := [task for task in self._tasks if task.get_name() == "launch"]:
            await asyncio.wait(launching, timeout=SHUTDOWN_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        grace_s = 0.0 if self._taken_over else SHUTDOWN_S
        try:
            async with asyncio.timeout(grace_s + KILL_S):
                await self._launcher.close(grace_s)
        except TimeoutError:
            log.warning("agents that wait for a file system cannot be killed, and end when it answers")
        self._server.close()
        if self._taken_over:
            await self._writer.abandon()
            await self._sinks.close(0.0)
            return Ending(finish.code, finish.message)
        written = await self._writer.flush(FLUSH_S)
        message = await self._durable.explain(finish, self._defect) if written else finish.message
        if written:
            await self._durable.ended(finish.code)
        closed = await self._writer.close(FLUSH_S if written else 0.0)
        sent = await self._sinks.close(SINKS_S if closed else 0.0)
        if closed:
            return Ending(finish.code, message if sent else "\n".join(filter(None, (message, unsent(self._config.run_dir)))))
        lost = f"the run directory {self._config.run_dir} could not be written to the end"
        if self._writer.spill.path.exists():
            lost += f": what is missing lies in {self._writer.spill.path}, and the next run on this machine takes it in"
        return Ending(finish.code, f"{message}\n{lost}" if message else lost, written=False)

    def _soon(self, work: Coroutine[Any, Any, None], name: str | None = None) -> None:
        """Run a task beside the others; an error in it is a defect."""

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._on_defect(error)

        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(done)

    # -- news for the core ---------------------------------------------------------------------------------------------

    def _turn(self, handler: Callable[..., None], *news: object, at: float | None = None, **more: object) -> None:
        """Tell the core of something, and do what it wants done. Args: at: unix seconds; None: now."""
        if self._finished.done():
            return
        try:
            handler(*news, clock.now() if at is None else at, self._outbox, **more)
        except Exception as error:  # noqa: BLE001 - whatever a core raises is a defect, and no node's fault
            self._outbox.take()
            self._on_defect(error)
            return
        for effect in self._outbox.take():
            self._do(effect)
        self._server.end_turn()

    def _on_defect(self, error: BaseException) -> None:
        """End the run as well as can be done without the core: workers are ended, what is held stays on the tiers."""
        self._defect = "".join(traceback.format_exception(error))
        log.critical("a defect in resilient, which ends the run:\n%s", self._defect)
        if self._finished.done():
            return
        for node in self._server.nodes:
            self._server.send(node, Stop(generation=self._coordinator.generation))
            self._server.send(node, Shutdown(generation=self._coordinator.generation))
        words = traceback.format_exception_only(error)[-1].strip()
        self._finished.set_result(Finish(Exit.GAVE_UP, f"a defect in resilient: {words}; run again to go on"))

    def _on_signal(self, sig: signal.Signals) -> None:
        if sig is signal.SIGHUP and self._coordinator.draining:
            return  # a second word would stop at once
        if self._stops is not None and sig in (signal.SIGTERM, signal.SIGUSR1):
            self._soon(self._stops.signalled(sig.name))
            return
        how = "stopping at once" if self._coordinator.draining else "stopping at the next step; once more to stop at once"
        self._display.note(f"{sig.name}: {how}")
        self._turn(self._coordinator.stop, sig.name)

    def _on_connected(self, node: int, hello: Hello) -> None:
        self._launcher.connected(node)
        if self._finished.done():  # it was still starting when the run ended
            self._server.send(node, Shutdown(generation=self._coordinator.generation))
            return
        self._starting.reached(node, Stage.IMPORTS)
        if self._preparation.connected(node):
            self._server.send(node, Prepare(generation=self._coordinator.generation))
        self._turn(self._coordinator.on_message, node, hello)

    def _on_message(self, node: int, message: AgentMessage) -> None:
        match message:
            case SignalReceived(name=name) if self._stops is not None:
                self._soon(self._stops.signalled(name))
            case PreparationProgress(what=what, done=done, total=total):
                if not self._preparation.done:
                    self._display.preparing(what, done, total)
            case PreparationEnded():
                self._on_prepared(node, message)
            case Imported():
                self._starting.reached(node, Stage.CHECKS)
            case _:
                self._coordinator.check(node, message)
                if isinstance(message, Ready):
                    self._starting.ready(node)
                self._turn(self._coordinator.on_message, node, message)

    def _on_prepared(self, node: int, message: PreparationEnded) -> None:
        if self._preparation.done:
            return
        if message.killed and not self._coordinator.draining and self._preparation.killed():
            self._display.note(f"{message.failure}; it is made again")
            self._server.send(node, Prepare(generation=self._coordinator.generation))
            return
        self._preparation.done = True
        if message.problems:
            wrong = ConfigError([Problem(key=key, value=value, message=text) for key, value, text in message.problems])
            self._turn(self._coordinator.give_up, Exit.CONFIG, self._explain(wrong))
        elif message.failure is not None:
            self._turn(self._coordinator.give_up, Exit(message.code), message.failure)
        else:
            self._turn(self._coordinator.prepared)

    def _on_failing(self, node: int) -> None:
        self._turn(self._coordinator.failing, node)

    def _on_ended(self, node: int, incarnation: int, detail: str) -> None:
        """A node's agent has ended, or its connection has."""
        if (node, incarnation) not in self._alive:
            return
        self._alive.discard((node, incarnation))
        self._server.hang_up(node)
        self._starting.ready(node)
        other = self._preparation.lost(node, self._server.nodes)
        if other is not None:
            self._server.send(other, Prepare(generation=self._coordinator.generation))
        self._turn(self._coordinator.lost, node, detail)

    async def _tick(self) -> None:
        hosts = dict(enumerate(self._allocation.hosts)) if self._allocation is not None else {}
        while True:
            self._turn(self._coordinator.tick)
            waited_for = self._starting.text(hosts, self._preparation.done)
            if waited_for is not None:
                self._display.waiting(waited_for)
            self._display.refresh()
            await asyncio.sleep(TICK_S)

    async def _ping(self) -> None:
        while True:
            self._server.ping()
            await asyncio.sleep(PING_S)

    async def _watch_duration(self) -> None:
        """Stop as on a signal once the config's duration has passed."""
        limit = self._config.train.exit_duration_min
        if limit is not None:
            await asyncio.sleep(60 * limit)
            if self._coordinator.draining:
                return
            self._display.note(f"{limit:g} minutes have passed (train.exit_duration_min): stopping at the next step")
            self._turn(self._coordinator.stop, "exit_duration_min")

    # -- the run directory ---------------------------------------------------------------------------------------------

    def _on_trouble(self, detail: str, since_t: float) -> None:
        self._display.run_dir_trouble(f"{self._config.run_dir}: {detail}")
        self._turn(self._coordinator.run_dir_trouble, detail, since_t)

    def _on_well(self, down_s: float) -> None:
        self._display.run_dir_well(f"{self._config.run_dir} works again after {duration(down_s)}")
        self._turn(self._coordinator.run_dir_well, down_s)

    def _on_taken_over(self, owner: str) -> None:
        """Stop at once, and leave everything to the other one."""
        if not self._finished.done():
            self._taken_over = True
            why = f"{self._config.run_dir} was taken over by {owner}, which had not heard of this driver for {LEASE_S:.0f} s"
            self._finished.set_result(Finish(Exit.UNUSABLE, why))

    # -- effects -------------------------------------------------------------------------------------------------------

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send(node, message):
                self._server.send(node, message)
            case RequestDaemon(node, request):
                self._server.request(node, request)
            case Launch(node):
                self._launch(node)
            case WriteEvent():
                self._write_event(effect)
            case WriteMetrics(fields, generation, t):
                entry = ledger.metrics_entry(fields, generation=generation, t=t)
                self._writer.metrics(entry)
                if entries.is_metrics(entry):
                    self._display.metrics(entry)
            case AcknowledgeRecords(node, count):
                incarnation = self._server.incarnation(node)
                self._writer.written(lambda: self._server.records_written(node, incarnation, count))
            case RaiseFence():
                self._soon(self._raise_fence(effect))
            case Quarantine():
                self._soon(self._quarantine(effect))
            case InquireAbout():
                self._soon(self._inquire(effect))
            case WriteText(path, text):
                self._writer.text(path, text)
            case Finish():
                if not self._finished.done():
                    self._finished.set_result(effect)

    def _write_event(self, effect: WriteEvent) -> None:
        entry = ledger.event_entry(effect.event, effect.fields, generation=effect.generation, t=effect.t, host=effect.host)
        for line in self._summaries.take(entry):
            self._writer.event(line)
        if not entries.is_event(entry):
            return  # a training script says so, and means something of its own
        self._display.event(entry)
        if effect.event == "generation_started":
            self._starting.over()
            self._soon(self._durable.pack_logs())
        if reasons := self._durable.blamed(entry):
            self._soon(self._durable.avoid(reasons))

    async def _raise_fence(self, effect: RaiseFence) -> None:
        if (error := await self._durable.raise_fence(effect)) is not None:
            log.warning("the checkpoint fence could not be raised: %s", error)
        self._turn(self._coordinator.fence_raised, effect.generation, error)

    async def _quarantine(self, effect: Quarantine) -> None:
        renamed, error = await self._durable.quarantine(effect)
        self._turn(self._coordinator.quarantined, effect.generation, renamed, error)

    async def _inquire(self, effect: InquireAbout) -> None:
        self._turn(self._coordinator.inquired, await inquire(effect, self._allocation))

    def _launch(self, node: int) -> None:
        self._alive.discard((node, self._incarnations[node]))
        self._incarnations[node] += 1
        incarnation = self._incarnations[node]
        self._alive.add((node, incarnation))
        self._server.expect(node, incarnation)
        self._starting.reached(node, Stage.STARTS)
        launching = self._launcher.launch(node, incarnation, prepare=self._preparation.launched(node))
        self._soon(launching, "launch")
