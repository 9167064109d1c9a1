"""What workers do, as their agents tell it: reports, ends, and what inspections have found."""

from checkpoint.protocol import DaemonNews, Inventory, NoRoom, Synced
from resilient.control.attendance import Moment
from resilient.control.core import Core
from resilient.control.generations import State
from resilient.control.liveness import NO_STEP
from resilient.control.response import Response
from resilient.control.stragglers import Episode
from resilient.exits import Exit
from resilient.outbox import AcknowledgeRecords, Outbox, WriteMetrics
from resilient.protocol.messages import FindEnds, Inspected, Record, Report, WorkerEnded


class Workers:
    """Has no state of its own: it tells those who have, and has faults answered."""

    def __init__(self, core: Core, response: Response) -> None:
        self._core = core
        self._response = response

    @property
    def _generation(self) -> int:
        return self._core.generations.generation

    def on_report(self, node: int, message: Report, running: bool, when: Moment, out: Outbox) -> None:
        """All that is new on a node. Args: running: the message is of the generation that runs."""
        for record in message.records:
            self._on_record(node, record, message.generation, when, out)
        if message.records:
            out.append(AcknowledgeRecords(node, len(message.records)))
        if running and message.heartbeats:
            heartbeats = message.heartbeats
            self._core.generations.on_heartbeats(heartbeats, when, out)
            self._watch(message, when, out)
            self._compare(message, when, out)
        for news in message.news:
            self._on_news(node, news, when, out)
        if any(record.event == "script_checkpoint" for record in message.records):
            self._grow(when, out)

    def _on_record(self, node: int, record: Record, generation: int, when: Moment, out: Outbox) -> None:
        if record.event == "resumed":
            step = record.fields.get("step")
            if generation == self._generation and isinstance(step, int):
                self._core.generations.resumed(step, record.fields.get("tier"), when, out)
        elif record.event == "script_checkpoint":
            step = record.fields.get("step")
            fresh = generation == self._generation and isinstance(step, int) and self._core.generations.script_saved(step)
            if fresh or record.rank == 0:  # each rank that writes a part of it tells
                out.event(record.event, {"rank": record.rank, **record.fields}, generation, record.t, self._host_of(node))
        elif record.event is None:
            step = record.fields.get("step")
            if generation == self._generation and isinstance(step, int):
                self._core.generations.metrics_arrived(step)
            out.append(WriteMetrics(record.fields, generation, record.t))
        else:
            out.event(record.event, record.fields, generation, record.t, self._host_of(node))

    def _host_of(self, node: int) -> str:
        return self._core.membership.nodes[node].host

    def _watch(self, message: Report, when: Moment, out: Outbox) -> None:
        """Tell the watchdog; have ranks inspected if it suspects one."""
        for rank, heartbeat in message.heartbeats.items():
            self._core.watchdog.on_heartbeat(rank, heartbeat, when.attended_s)
        if self._core.ends.settling or not self._core.inspector.idle(when.attended_s):
            return
        suspicion = self._core.watchdog.suspects()
        if suspicion is not None:
            members = self._core.membership.members
            self._core.inspector.begin(suspicion, self._core.watchdog.alive, members, when.attended_s, self._generation, out)

    def judge(self, when: Moment, out: Outbox) -> None:
        """If an inspection is finished, find out whose fault it is."""
        case = self._core.inspector.finished(when.attended_s)
        if case is not None:
            self._response.judge(case, when, out)

    def _compare(self, message: Report, when: Moment, out: Outbox) -> None:
        """Tell who compares the ranks with each other; what it finds is told, or the node is replaced."""
        if self._core.stragglers is None or self._core.ends.settling or self._core.shutdown.drain is not None:
            return
        for rank, heartbeat in message.heartbeats.items():
            self._core.stragglers.on_heartbeat(rank, heartbeat)
        for episode in self._core.stragglers.judge():
            if self._core.generations.state is State.RUNNING:
                self._on_straggler(episode, when, out)

    def _on_straggler(self, episode: Episode, when: Moment, out: Outbox) -> None:
        fault_id = f"g{self._generation}-straggler-{episode.number}"
        if episode.over:
            self._core.incidents.recovered(fault_id, episode.step, when.now, self._generation, out)
        else:
            fault = episode.fault(fault_id, self._core.membership.assignment.node_of(episode.rank))
            self._response.on_fault(fault, when, out)

    def _on_news(self, node: int, news: DaemonNews, when: Moment, out: Outbox) -> None:
        """News of a node's snapshot daemon."""
        if self._core.shutdown.finished:
            return
        saving = self._core.shutdown.saving is not None
        if isinstance(news, NoRoom) and not saving:
            size, places = f"{news.size_bytes / 2**20:,.0f} MiB", ", ".join(news.places)
            message = f"no tier of node {node} has room for the {size} of its snapshots: {places}"
            self._core.shutdown.finish(Exit.UNUSABLE, message, when, out)
            return
        self._core.snapshots.on_news(node, news, when.now, out)
        self._grow(when, out)
        if saving:
            if isinstance(news, Synced):
                self._core.shutdown.synced(node)
            elif isinstance(news, Inventory):
                self._core.shutdown.sync(node, when, out)
            self._core.shutdown.progress(when, out)

    def _grow(self, when: Moment, out: Outbox) -> None:
        """There may be something newer to go on from."""
        if self._core.shutdown.drain is None and self._core.generations.may_grow:
            self._response.grow(when, out)

    def on_worker_ended(self, message: WorkerEnded, when: Moment, out: Outbox) -> None:
        """A worker of the generation that runs has ended."""
        self._core.watchdog.ended(message.end.rank)
        match self._core.ends.on_end(message.end, message.stopped, when.attended_s):
            case "blame":
                self._response.blame(when, out)
            case "ask":
                nodes = tuple(self._core.membership.members)
                self._core.ends.ask(nodes, when.attended_s)
                for node in nodes:
                    out.send(node, FindEnds(generation=self._generation))
            case "all_ended":
                self._core.generations.workers_ended(self._core.ends.last_step)
                if self._core.ends.stopped and self._core.shutdown.drain is None and self._core.generations.hold is not None:
                    self._response.evacuate(when, out)
                    return
                self._core.shutdown.all_ended(self._core.ends.stopped, when, out)

    def on_inspected(self, node: int, message: Inspected, when: Moment, out: Outbox) -> None:
        """An agent has inspected its ranks."""
        self._core.inspector.on_inspected(node, message.ranks)
        self._core.first_step.on_inspected(node, message.ranks)
        self.judge(when, out)

    def await_first_step(self, when: Moment, out: Outbox) -> None:
        """Tell what ranks do that have not finished a step for long."""
        core, run = self._core, self._core.generations.run
        if core.generations.state is not State.RUNNING or core.ends.settling or core.shutdown.drain is not None:
            return
        if run is None or run.step != NO_STEP or core.watchdog.sees_collectives:
            return
        core.first_step.ask(core.watchdog.alive, core.membership.members, when.attended_s, self._generation, out)
        fields = core.first_step.told(when.attended_s)
        if fields is not None:
            out.event("no_step_yet", fields, self._generation, when.now)
