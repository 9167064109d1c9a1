"""The driver: the shell around the coordinator.

Owns the run directory's lease, the ledger, the control socket, the agents' processes and the signals of one job. It feeds the
coordinator with news and carries out the effects that come back; it decides nothing.
"""

import asyncio
import hmac
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from checkpoint.errors import CheckpointError
from checkpoint.fence import raise_fence
from checkpoint.naming import steps
from checkpoint.voiding import set_aside
from resilient import clock, diagnosis, ledger, rollback, storage
from resilient.campaign import communication, gpu_count
from resilient.config import Config, ConfigError, Layout, Problem, layouts, write
from resilient.config.timeouts import timeouts
from resilient.driver.coordinator import Coordinator, Job
from resilient.driver.custody import StoragePlan, TierPlan
from resilient.driver.display import Display
from resilient.driver.effects import Effect, Finish, Launch, RaiseFence, Send, SetAside, WriteEvent, WriteMetrics, WriteText
from resilient.driver.launch import AgentAhead, AgentCommand, Launcher, LocalLauncher
from resilient.driver.lease import LEASE_S, RENEW_S, RunLease
from resilient.driver.preparation import Preparation
from resilient.driver.starting import Stage, Starting
from resilient.driver.stops import Stops
from resilient.driver.stragglers import Rules
from resilient.driver.tensorboard import ScalarWriter
from resilient.driver.watchdog import Limits
from resilient.exits import EnvironmentUnusable, Exit
from resilient.logs.packing import Packer
from resilient.policy import Budget
from resilient.slurm import badnodes, container
from resilient.slurm.allocation import Allocation
from resilient.slurm.blame import nodes_at_fault
from resilient.slurm.chain import standing
from resilient.slurm.launch import SlurmLauncher, addresses
from resilient.slurm.succession import Succession
from resilient.spill import take_in
from resilient.version import commit
from resilient.wire import LINE_LIMIT, Line, decode, outlast_outages
from resilient.worker import CHAOS_VARIABLE

log = logging.getLogger(__name__)

TICK_S = 0.1
FENCE_RAISE_S = 30.0  # for a commit that is under way; the workers that could make one are dead by then
FENCE_HANG_S, FENCE_MARGIN_S = 4.0, 0.5  # where there are snapshots to go on from meanwhile
SHUTDOWN_S = 3.0
INJECTION = "chaos.hands.inside"  # by name: the runtime knows nothing of it
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Driver:
    """One job of a campaign.

    Args:
        config: the checked config, with an existing and locked run directory.
        layout: what the config comes to on these machines.
        display: where a person looks.
        kept: what the config's tiers come to.
        explain: turns an error that is found after the config was read into a message that names file and line.
        allocation: of Slurm, whose nodes are used; None: agents are processes of this machine.
        succession: the chain that this job belongs to, if it does.
        lease: of the run directory.
        ahead: the first agent's process, if it was started before all that was known.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        display: Display,
        kept: storage.Storage,
        explain: Callable[[ConfigError], str],
        allocation: Allocation | None,
        succession: Succession | None,
        lease: RunLease,
        ahead: AgentAhead | None = None,
    ) -> None:
        self._config = config
        self._allocation = allocation
        self._succession = succession
        box = config.slurm.container
        self._runtime = container.runtime_of(box, os.environ) if box is not None and allocation is not None else ""
        self._lease = lease
        self._ahead = ahead
        self._taken_over = False  # nothing more may be written: another driver does
        self._explain = explain
        self._layout = layout
        self._display = display
        self._run_dir = config.run_dir
        self._config_path = self._run_dir / "config.yaml"
        limits = timeouts(config)
        self._fence_s = limits.fence_s
        voids, skip = rollback.remembered(ledger.read(self._run_dir / ledger.EVENTS))
        self._coordinator = Coordinator(
            Job(
                layouts={nodes: _axes(each) for nodes, each in layouts(config, layout).items()},
                spares=config.cluster.spares,
                rejoin_s=limits.rejoin_s,
                procs_per_node=layout.procs_per_node,
                storage=replace(storage_plan(kept, config.checkpoint.tiers[-1].path), voids=tuple(voids)),
                budget=budget(config),
                drain_s=limits.drain_s,
                silence_s=limits.lost_s,
                silence_with_spare_s=limits.lost_with_spare_s,
                link_grace_s=limits.link_grace_s,
                hang=Limits(limits.soft_s, limits.hard_s),
                collective_timeout_s=limits.collective_s,
                stragglers=straggler_rules(config),
                replace_stragglers=config.resilience.straggler == "replace",
                skip=tuple(skip),
                tiers_vanish=allocation is not None,
            ),
            last_generation=ledger.last_generation(self._run_dir),
        )
        self._stops = self._make_stops(limits.drain_s)
        self._token = secrets.token_hex(16)
        self._incarnations = dict.fromkeys(range(config.cluster.slots), 0)
        self._alive: set[tuple[int, int]] = set()
        self._lines: dict[int, Line] = {}
        self._preparation = Preparation()
        self._starting = Starting()
        self._faults: list[Mapping[str, Any]] = []  # as the ledger has them
        self._judged = True  # the last one: whether a node is at fault
        self._packer = Packer(config.run_dir)
        self._pending: set[asyncio.Task[None]] = set()
        self._finished: asyncio.Future[Finish] | None = None

    async def run(self) -> tuple[Exit, str]:
        """Run the job to its end; the exit code, and what a person should know of it."""
        loop = asyncio.get_running_loop()
        self._finished = loop.create_future()
        for sig in STOP_SIGNALS:
            loop.add_signal_handler(sig, self._on_signal, sig)
        server = await self._listen()
        self._launcher = self._make_launcher(server.sockets[0].getsockname()[1])
        self._scalars = _scalar_writer(self._config) if self._config.logging.tensorboard else None
        with ledger.Ledger(self._run_dir) as self._ledger:
            works = [self._tick(), self._watch_duration(), self._see_to_a_successor(), self._keep_lease()]
            tasks = [self._background(work) for work in (*works, *([self._stops.watch()] if self._stops is not None else []))]
            try:
                take_in(self._run_dir, self._ledger)
                self._write_event(WriteEvent("run_started", self._description(), self._coordinator.generation))
                self._do(self._coordinator.begin(clock.now()))
                finish = await self._finished
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, *self._pending, return_exceptions=True)
                await self._launcher.close(0.0 if self._taken_over else SHUTDOWN_S)
                if not self._taken_over:
                    take_in(self._run_dir, self._ledger)
                server.close()
                self._packer.close()
                if self._scalars is not None:
                    self._scalars.close()
        if self._taken_over:
            return finish.code, finish.message
        if self._succession is not None and self._allocation is not None:
            await self._succession.ended(self._allocation.job_id, finish.code)
        return finish.code, self._explained(finish)

    def _explained(self, finish: Finish) -> str:
        """What a person should know of the end; where it is a failure, the whole of it on a page of the run directory."""
        if finish.code not in (Exit.GAVE_UP, Exit.UNUSABLE):
            return finish.message
        found = diagnosis.diagnose(ledger.read(self._run_dir / ledger.EVENTS), code=finish.code, message=finish.message)
        path = self._run_dir / diagnosis.FILE
        try:
            path.write_text(diagnosis.page(found))
        except OSError as error:
            log.warning("%s could not be written: %s", path, error)
            return finish.message
        told = diagnosis.short(found) if finish.code is Exit.GAVE_UP and found.failure and not found.alone else finish.message
        return f"{told}\nmore in {path}"

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task beside the others; an error in it, which is a bug, ends the run with its traceback."""

        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) and self._finished and not self._finished.done():
                self._finished.set_exception(error)

        task = asyncio.create_task(work)
        task.add_done_callback(done)
        return task

    async def _listen(self) -> asyncio.Server:
        """Wait for agents; on one machine nobody else is let in."""
        if self._allocation is None:
            return await asyncio.start_server(self._serve, LocalLauncher.addr, 0, limit=LINE_LIMIT)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=1024)
        return await asyncio.start_server(self._serve, sock=listener, limit=LINE_LIMIT)

    def _make_launcher(self, port: int) -> Launcher:
        allocation, slurm = self._allocation, self._config.slurm
        if allocation is None:
            return LocalLauncher(self._agent_command(f"{LocalLauncher.addr}:{port}"), self._on_ended, self._ahead)
        reached = addresses(allocation.hosts[0], port, suffix=slurm.hostname_suffix, interface=slurm.interface)
        command = self._agent_command(",".join(reached))
        return SlurmLauncher(
            command,
            self._on_ended,
            allocation=allocation,
            cpu_bind="none" if slurm.cpu_bind == "auto" else slurm.cpu_bind,
            gpus_per_task=slurm.gpus_per_task,
            extra=slurm.srun_args,
            inside=self._inside,
        )

    def _inside(self, command: list[str]) -> list[str]:
        """The command line of an agent, in the container where there is one."""
        box = self._config.slurm.container
        if box is None:
            return command
        gpus = gpu_count() > 0 and self._config.cluster.device != "cpu"
        return container.on_node(self._config, box, command, runtime=self._runtime, gpus=gpus)

    def _make_stops(self, drain_s: float) -> Stops | None:
        if self._allocation is None:
            return None
        lead, drain = self._config.slurm.signal_lead_s, self._config.resilience.drain_s
        end = os.environ.get("SLURM_JOB_END_TIME", "")  # since Slurm 23
        return Stops(
            self._coordinator,
            self._allocation.job_id,
            asked_lead_s=None if lead == "auto" else lead,
            asked_drain_s=None if drain == "auto" else drain,
            drain_s=drain_s,
            end_t=float(end) if end.isdigit() else None,
            do=self._do,
            note=self._display.note,
        )

    def _agent_command(self, address: str) -> AgentCommand:
        environ = {
            "OMP_NUM_THREADS": str(self._layout.threads_per_proc),
            **clock.environment(),
            **communication(self._config, self._allocation),
            **({CHAOS_VARIABLE: INJECTION} if self._config.chaos.allow else {}),
        }
        return AgentCommand(
            driver=address,
            procs=self._layout.procs_per_node,
            run_dir=self._run_dir,
            run_id=self._config.name,
            entrypoint=self._config.entrypoint,
            fence_s=self._fence_s,
            health_s=timeouts(self._config).health_s,
            world=self._layout.world_size,
            device="cuda" if gpu_count() > 0 and self._config.cluster.device != "cpu" else "cpu",
            token=self._token,
            environ=environ,
            log_level=self._config.logging.level,
        )

    def _description(self) -> dict[str, object]:
        return {
            "name": self._config.name,
            "run_dir": str(self._run_dir),
            "pid": os.getpid(),
            "version": version("resilient"),
            "commit": commit(),
            "target_step": self._config.train.steps,
            "layout": asdict(self._layout),
        }

    # -- news for the coordinator --------------------------------------------------------------------------------------

    def _on_signal(self, sig: signal.Signals) -> None:
        if self._stops is not None and sig is not signal.SIGINT:
            self._soon(self._stops.signalled(sig.name))
            return
        self._display.note(f"{sig.name}: stopping at the next step; once more to stop at once")
        self._do(self._coordinator.stop(sig.name, clock.now()))

    def _on_ended(self, node: int, incarnation: int, detail: str) -> None:
        if (node, incarnation) in self._alive:
            self._alive.discard((node, incarnation))
            self._hang_up(node)
            self._starting.ready(node)
            other = self._preparation.lost(node, self._lines)
            if other is not None:
                self._lines[other].send({"type": "prepare"})
            self._do(self._coordinator.lost(node, detail, clock.now()))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One agent's connection, from hello to its end."""
        outlast_outages(writer.get_extra_info("socket"))
        node, incarnation = -1, -1
        detail = "its connection was closed"
        try:
            async for line in reader:
                message = decode(line)
                if incarnation < 0:
                    node, incarnation = int(message["node"]), self._admit(message)
                    message["t"] = clock.here(message["t"])
                    if incarnation < 0:
                        break
                    self._lines[node] = Line(writer)
                    self._launcher.connected(node)
                    self._starting.reached(node, Stage.IMPORTS)
                    if self._preparation.connected(node):
                        self._lines[node].send({"type": "prepare"})
                if message["type"] == "signal" and self._stops is not None:
                    self._soon(self._stops.signalled(message["name"]))
                elif (node, incarnation) not in self._alive:
                    continue
                elif message["type"] == "preparation":
                    self._on_preparation(message)
                elif message["type"] == "imported":
                    self._starting.reached(node, Stage.CHECKS)
                else:
                    if message["type"] == "ready":
                        self._starting.ready(node)
                    self._do(self._coordinator.message(message, clock.now()))
        except asyncio.CancelledError:
            return  # the run is over, and a node that is gone has not hung up: asyncio would complain of the task
        except (OSError, ValueError, KeyError) as error:
            if not isinstance(error, OSError):  # a defect, of the agent or here: the node is started anew, but not in silence
                log.error("the connection of node %d", node, exc_info=True)
            detail = f"its connection broke: {type(error).__name__}: {error}"
        finally:
            writer.close()
        self._on_ended(node, incarnation, detail)

    def _admit(self, hello: dict[str, object]) -> int:
        """The incarnation of the agent that says hello, -1 if it is none of ours."""
        token, _, incarnation = str(hello.get("token")).rpartition(".")
        if hello["type"] != "hello" or not hmac.compare_digest(token, self._token) or not incarnation.isdigit():
            log.warning("refused a connection that is not one of this run's agents")
            return -1
        return int(incarnation)

    async def _tick(self) -> None:
        while True:
            self._do(self._coordinator.tick(clock.now()))
            hosts = dict(enumerate(self._allocation.hosts)) if self._allocation is not None else {}
            waited_for = self._starting.text(hosts, self._preparation.done)
            if waited_for is not None:
                self._display.waiting(waited_for)
            self._display.refresh()
            await asyncio.sleep(TICK_S)

    async def _watch_duration(self) -> None:
        """Stop as on a signal once the config's duration has passed."""
        limit = self._config.train.exit_duration_min
        if limit is not None:
            await asyncio.sleep(60 * limit)
            self._display.note(f"{limit:g} minutes have passed (train.exit_duration_min): stopping at the next step")
            self._do(self._coordinator.stop("exit_duration_min", clock.now()))

    async def _keep_lease(self) -> None:
        """Renew it; who finds that it was taken over stops at once, and leaves everything to the other one."""
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                other = self._lease.renew()
            except OSError as error:
                log.warning("the lease of %s could not be renewed: %s", self._run_dir, error)
                continue
            if other is not None and self._finished is not None and not self._finished.done():
                self._taken_over = True
                message = f"{self._run_dir} was taken over by {other}, which had not heard of this driver for {LEASE_S:.0f} s"
                self._finished.set_result(Finish(Exit.UNUSABLE, message))

    async def _see_to_a_successor(self) -> None:
        """Once, however long it takes: whoever cancels the next job by hand wants it gone."""
        if self._succession is not None and self._allocation is not None:
            why_none = await self._succession.ensure(self._allocation.job_id, self._config.slurm.max_jobs)
            if why_none:
                self._display.note(f"no job will follow this one: {why_none}")

    def _on_preparation(self, told: Mapping[str, Any]) -> None:
        """A word of the preparation, from the node that is at it."""
        if self._preparation.done:
            return
        match told:
            case {"progress": [str(what), int(done), int(total)]}:
                self._display.preparing(what, done, total)
                return
            case {"problems": [*problems]}:
                wrong = ConfigError([Problem(key=key, value=value, message=text) for key, value, text in problems])
                self._do(self._coordinator.give_up(Exit.CONFIG, self._explain(wrong), clock.now()))
            case {"failed": str(text)}:
                self._do(self._coordinator.give_up(Exit.GAVE_UP, text, clock.now()))
            case _:
                self._do(self._coordinator.prepared(clock.now()))
        self._preparation.done = True

    # -- effects -------------------------------------------------------------------------------------------------------

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects if not self._taken_over else ():
            match effect:
                case Send(node, message):
                    if node in self._lines:
                        self._lines[node].send(message)
                case Launch(node):
                    self._launch(node)
                case WriteEvent():
                    self._write_event(effect)
                case WriteMetrics(fields, generation, t):
                    line = self._ledger.metrics(fields, generation=generation, t=t)
                    self._display.metrics(line)
                    if self._scalars is not None:
                        self._scalars.metrics(line)
                case RaiseFence(generation):
                    error = self._raise_fence(generation)
                    if error is not None and not self._coordinator.custody.may_go_on_without_the_fence:
                        self._do(self._coordinator.give_up(Exit.UNUSABLE, f"the checkpoint fence: {error}", clock.now()))
                        return  # the generation that was to start behind it does not
                    if error is not None:
                        # A tier that cannot be written is closed to everybody; whoever flushes raises the fence first.
                        log.warning("the checkpoint fence could not be raised: %s", error)
                case SetAside(voids, generation):
                    if not self._set_aside(voids, generation):
                        return  # nor does a generation that would go on from what is void
                case WriteText(name, text):
                    path = self._config.run_dir / name
                    try:
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_text(text)
                    except OSError as error:
                        log.warning("%s could not be written: %s", path, error)
                case Finish():
                    assert self._finished is not None
                    if not self._finished.done():
                        self._finished.set_result(effect)

    def _raise_fence(self, generation: int) -> Exception | None:
        """Close the durable tier to older generations; why not. A file system that hangs holds up the thread alone."""
        root = self._config.checkpoint.tiers[-1].path
        patience_s = FENCE_HANG_S if self._coordinator.custody.may_go_on_without_the_fence else FENCE_RAISE_S
        outcome: list[Exception | None] = []

        def work() -> None:
            try:
                storage.must_be_there(root)
                raise_fence(root, generation, timeout_s=patience_s)
                outcome.append(None)
            except (OSError, CheckpointError) as error:
                outcome.append(error)

        thread = threading.Thread(target=work, name="fence", daemon=True)
        thread.start()
        thread.join(patience_s + FENCE_MARGIN_S)
        return outcome[0] if outcome else TimeoutError(f"{root} has not answered for {patience_s:g} s")

    def _set_aside(self, voids: Sequence[rollback.Void], generation: int) -> bool:
        """Rename the durable checkpoints that are void; the run ends where that cannot be done."""
        tier = self._config.checkpoint.tiers[-1]
        try:
            renamed = set_aside(
                tier.path, lambda *key: any(void.covers(*key) for void in voids), "rolled-back", generation=generation
            )
        except (OSError, CheckpointError) as error:
            message = f"a checkpoint that was rolled back cannot be set aside on tier {tier.name}: {error}"
            self._do(self._coordinator.give_up(Exit.UNUSABLE, message, clock.now()))
            return False
        for step, path in renamed:
            fields = {"step": step, "tier": tier.name, "reason": f"rolled back: it is {path.name} now"}
            self._write_event(WriteEvent("checkpoint_rejected", fields, generation))
        return True

    def _write_event(self, event: WriteEvent) -> None:
        line = self._ledger.event(event.event, event.fields, generation=event.generation, t=event.t, host=event.host)
        self._display.event(line)
        if event.event == "generation_started":
            self._starting.over()
            self._packer.begin()
        if event.event == "fault":
            self._faults.append(line)
            self._judged = False
        elif event.event == "action" and not self._judged and line["fault_id"] == self._faults[-1]["fault_id"]:
            self._judged = True
            self._blame(str(line["name"]))
        if self._scalars is not None:
            self._scalars.event(line)

    def _blame(self, action: str) -> None:
        """Have the next jobs do without the nodes whose own fault the last fault is."""
        hours = self._config.slurm.bad_node_hours
        if self._allocation is None or not hours:
            return
        found = nodes_at_fault(self._faults[-1], action, self._faults[:-1])
        if not found:
            return
        reasons = {self._allocation.hosts[node]: reason for node, reason in found.items()}
        try:
            badnodes.remember(self._run_dir, reasons, now=clock.now(), for_s=3600 * hours)
        except OSError as error:
            log.warning("%s could not be written: %s", self._run_dir / badnodes.FILE, error)
            return
        self._display.note(f"the next jobs do without {', '.join(reasons)} for {hours:g} hours")
        if self._succession is not None:
            self._soon(self._succession.avoid_bad_nodes())

    def _launch(self, node: int) -> None:
        self._hang_up(node)
        self._alive.discard((node, self._incarnations[node]))
        self._incarnations[node] += 1
        self._alive.add((node, self._incarnations[node]))
        self._starting.reached(node, Stage.STARTS)
        self._soon(self._launcher.launch(node, self._incarnations[node], prepare=self._preparation.launched(node)))

    def _hang_up(self, node: int) -> None:
        """End the connection of a node's agent; one that is still there ends its workers, and itself."""
        line = self._lines.pop(node, None)
        if line is not None:
            line.close()

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        """A task that ends by itself; the run's end waits for it."""
        task = self._background(work)
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)


def budget(config: Config) -> Budget:
    """How much trouble the config puts up with."""
    told = config.resilience
    return Budget(told.max_restarts_per_hour, told.give_up_after_same_step, told.backoff_s, told.max_roll_backs)


def storage_plan(kept: storage.Storage, durable: Path) -> StoragePlan:
    """What custody must know of the tiers."""

    def plan(tier: storage.Place) -> TierPlan:
        return TierPlan(tier.name, tier.keep_last, tier.replicas)

    first, *middle, last = kept.tiers
    found = steps(durable)
    return StoragePlan(
        plan(first), tuple(map(plan, middle)), plan(last), kept.slabs, kept.domains, max(found, default=0), tuple(found)
    )


def _axes(layout: Layout) -> dict[str, int]:
    return {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp}


def straggler_rules(config: Config) -> Rules | None:
    """What makes a straggler; None where nobody looks for them."""
    resilience = config.resilience
    if resilience.straggler == "off":
        return None
    return Rules(resilience.straggler_factor, resilience.straggler_steps)


def _scalar_writer(config: Config) -> ScalarWriter:
    switches = config.logging
    return ScalarWriter(config.run_dir / "tensorboard", switches.tensorboard_queue_size, switches.log_interval)


def run_campaign(
    config: Config,
    layout: Layout,
    display: Display,
    explain: Callable[[ConfigError], str] = str,
    allocation: Allocation | None = None,
    ahead: AgentAhead | None = None,
) -> tuple[Exit, str]:
    """Run one job of the campaign in its run directory, which is made if need be; arguments as for `Driver`.

    Raises:
        EnvironmentUnusable: the run directory cannot be written, another run uses it, or no container can be started.
    """
    try:
        for directory in (config.run_dir / "logs", config.checkpoint.tiers[-1].path):
            directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentUnusable(f"cannot make {error.filename}: {error.strerror}") from error
    try:
        lease = RunLease(config.run_dir)
    except OSError as error:
        raise EnvironmentUnusable(f"cannot write {error.filename}: {error.strerror}") from error
    try:
        try:
            kept = storage.storage_of(config, config.cluster.slots)
            storage.write(config.run_dir, kept)
        except OSError as error:
            raise EnvironmentUnusable(f"cannot write {error.filename}: {error.strerror}") from error
        write(config, config.run_dir / "config.yaml")
        succession = Succession.of_job(config, os.environ) if allocation is not None else None
        if succession is not None and allocation is not None:
            over = succession.started(
                allocation.job_id, standing(steps(config.checkpoint.tiers[-1].path), ledger.read(config.run_dir / ledger.METRICS))
            )
            if over is not None:
                return over, f"the chain of {config.run_dir} is over; `resilient submit` begins it again"
        return asyncio.run(Driver(config, layout, display, kept, explain, allocation, succession, lease, ahead).run())
    finally:
        lease.close()
