"""The coordinator: membership, generations, faults and drains of one job, as a state machine without input or output.

Messages, losses, signals and the clock go in; effects come out (`resilient.driver.effects`), for the driver to carry out. So
every course of events can be played in a test without a process.

A generation goes through three states, and a job ends in a fourth. *Gathering*: its nodes start up or stop the workers of the
generation before, and say `ready`. *Running*: all were told to `start`. *Settling*: a worker has failed in a way that blames a
peer, and for a moment the peer may still be heard of. Then the policy's action leads back to gathering, or to the end.
*Saving*: no worker runs any more, and what the keepers hold is made durable.

Messages of an agent: `hello`, `health` (what the check of its node has found), `ready`, `started`, `beat`, `records`, `proposed`,
`exited`, `signal`, `link` (changes of its links), `looked` (what its workers were doing), `alive` (there is nothing else to say),
`storage` (news of its keeper). Messages to an agent: `start`, `stop`, `propose`, `arm`, `look`, `kept` (so many records are in the
ledger), `ping`, `shutdown`, `storage` (an order for its keeper).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Literal

from checkpoint.tiers.cadence import mean_time_between_failures
from resilient.config.timeouts import PING_S, TOLD_S
from resilient.driver import fitness
from resilient.driver.custody import Custody, News, StoragePlan
from resilient.driver.drain import Drain, fits
from resilient.driver.effects import Effect, Finish, Launch, RaiseFence, Send, WriteEvent, WriteMetrics, WriteText
from resilient.driver.links import Links
from resilient.driver.membership import Membership, Node
from resilient.driver.stragglers import Episode, Rules, Stragglers
from resilient.driver.watchdog import PATIENCE_S, Limits, Suspicion, Watchdog
from resilient.exits import Exit
from resilient.faults import INCIDENTS, Fault, OutOfMemory, Raised, WorkerEnd, computed, from_ends, is_victim
from resilient.page import NOT_BEATEN
from resilient.policy import UNFIT, Action, Budget, Situation, decide
from resilient.rollback import RollBack, Stretch, bad_numbers, data_of, merged
from resilient.wire import Message

SETTLE_S = 0.5  # how long a failure that blames a peer waits for that peer's own failure
LINK_MEMORY_S = 15.0  # a stall that began so soon after a link came back may be its doing
LOOK_AGAIN_S = 5.0  # at ranks that wait for a link
UNHEARD_S = 2 * TOLD_S  # without a word of an agent: the way to it is broken, or it is gone
MOST_STACKS = 64  # files of ranks in the folder of an incident
RESERVE_S = 1.0  # of a drain, for what is neither copying nor writing


@dataclass(frozen=True)
class Job:
    """What the coordinator must know of the campaign.

    Attributes:
        layouts: by number of nodes, those that a generation may be of; the largest is what is asked for.
        spares: nodes that stand by.
        rejoin_s: how long a node that is gone is waited for, where no spare is there and fewer nodes would do.
    """

    layouts: Mapping[int, Mapping[str, int]]
    spares: int
    rejoin_s: float
    procs_per_node: int
    storage: StoragePlan
    budget: Budget
    drain_s: float
    silence_s: float  # a node that has not been heard of for so long is lost
    silence_with_spare_s: float  # the same while a spare stands by
    hang: Limits
    link_grace_s: float  # how long ranks may wait for each other while a link is down, or has just come back
    collective_timeout_s: float  # of process groups: longer than the watchdog bears
    stragglers: Rules | None = None  # None: nobody looks for them
    replace_stragglers: bool = False
    skip: tuple[Stretch, ...] = ()  # steps that earlier jobs found to be bad whatever the weights
    tiers_vanish: bool = False  # what is on the nodes is gone with the job: only the durable tier is there for the next one


class State(Enum):
    GATHERING = auto()
    RUNNING = auto()
    SETTLING = auto()
    SAVING = auto()
    FINISHED = auto()


@dataclass
class Run:
    """What is known of the generation that runs, or ran last."""

    started_t: float
    resumed_step: int | None = None
    step: int = NOT_BEATEN
    announced: bool = False
    ends: list[WorkerEnd] = field(default_factory=list)
    stopped: bool = False
    settle_until: float = 0.0
    beat_t: float = 0.0
    step_s: float = 0.0


@dataclass
class Ending:
    """How the job will end, once what the keepers hold is durable, or at the deadline (unix seconds)."""

    code: Exit
    message: str
    deadline_t: float | None
    waiting: set[int]  # for nodes that have not settled what their workers left
    troubled_t: float | None = None


@dataclass
class Looking:
    """All ranks are looked at, because some are suspected; judged when all agents have answered, or at the deadline."""

    suspicion: Suspicion
    deadline_t: float
    waiting: set[int]
    looks: dict[int, Mapping[str, Any]] = field(default_factory=dict)


class Coordinator:
    """See the module. Every method that takes news returns the effects to carry out, in order; `now` is unix seconds."""

    def __init__(self, job: Job, *, last_generation: int) -> None:
        self.job = job
        self.generation = last_generation
        self.state = State.GATHERING
        self.faults: list[tuple[float, Fault]] = []
        self._told_of = 0  # faults, also those that stop no rank, so that no two have the same id
        self.membership = Membership(job.layouts, job.spares, job.rejoin_s)
        self._prepared = False
        self._run: Run | None = None
        self._drain: Drain | None = None
        self._unrecovered: list[tuple[Fault, float]] = []
        self._pinged_t = 0.0
        self._last_step = 0
        self.custody = Custody(job.storage)
        self.links = Links()
        self._ending: Ending | None = None
        self._began_t = 0.0
        self._watchdog = Watchdog(job.hang)
        self._stragglers = Stragglers(job.stragglers) if job.stragglers is not None else None
        self._looking: Looking | None = None
        self._waited: list[tuple[Fault, float]] = []  # stalls that a link explains, and when they began
        self._patient_until = 0.0
        self._grown_from: int | None = None  # the newest snapshot when nodes came to stand by that were missing
        self._not_before = 0.0  # unix seconds: the next generation is held back until then
        self._roll_backs: list[tuple[Fault, RollBack]] = []
        self._skip = list(job.skip)
        self._go_back_to: int | None = None

    @property
    def _nodes(self) -> list[Node]:
        return self.membership.nodes

    @property
    def _members(self) -> tuple[int, ...]:
        return self.membership.members

    # -- news ----------------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Effect]:
        self._began_t = now
        self.membership.begin(now)
        return list(self._launch(now))

    def _launch(self, now: float) -> Iterator[Effect]:
        return (Launch(index) for index in self.membership.launches(now))

    def prepared(self, now: float) -> list[Effect]:
        """What the entry point prepares once per job is there: generations may start."""
        self._prepared = True
        return list(self._gather(now))

    def message(self, message: Message, now: float) -> list[Effect]:
        """News from an agent."""
        index = message["node"]
        node = self._nodes[index]
        node.heard_t = now
        if self.state is State.FINISHED:
            return []
        match message["type"]:
            case "hello":
                self.membership.hello(index, message["host"], message["addr"], now, skew_s=message.get("t", now) - now)
                return []
            case "health":
                return list(self._health(index, message, now))
            case "ready":
                self.membership.is_ready(index, message["store_port"])
                self.custody.inventory(index, message["storage"])
                if self.state is State.SAVING:
                    return [self._sync(index)]
                self._grown_from = self._newest_step if self.membership.can_grow() else None
                return list(self._gather(now))
            case "storage":
                return list(self._storage(index, message["news"], now))
            case "signal":
                return self.stop(message["name"], now)
            case "link":
                return [self._link(index, change, message["t"], now) for change in message["changes"]]
            case "started":
                return list(self._propose_to(index))
            case "beat":
                ranks = message["ranks"]
                return [*self._beat(ranks, now), *self._watch(ranks, now), *self._compare(ranks, now)]
            case "looked":
                return list(self._looked(index, message["ranks"], now))
            case "records":
                effects = [effect for item in message["items"] for effect in self._record(node, now, *item)]
                return [*effects, Send(index, {"type": "kept", "count": len(message["items"])})]
            case "proposed" if self._drain is not None:
                return self._drain.proposed(index, message["checked"])
            case "exited":
                return list(self._exited(_end(message["end"]), message["stopped"], now))
        return []

    def lost(self, index: int, detail: str, now: float) -> list[Effect]:
        """A node's agent has ended, or its connection has."""
        node = self._nodes[index]
        if self.state is State.FINISHED:
            return []
        self.membership.lost(index, detail, now)
        if not node.joined:
            return [*self._launch(now), *self._gather(now)]
        self.links.forget(index)
        if self.membership.is_member(index):
            self.custody.hold()
        effects = self.custody.lost(index)
        if self.state is State.SAVING:  # there are no workers to start anew, but what the node holds is still needed
            assert self._ending is not None
            if self.membership.is_member(index):
                self._ending.waiting.add(index)
            return [*effects, *self._launch(now)]
        what = f"the agent of node {index} on {node.host} is gone: {detail}"
        fault = self._node_lost(index, f"node {index}", what, detail, max(0.0, now - node.heard_t))
        if self.membership.is_member(index):
            return [*effects, *self._fault(fault, now, now)]
        effects += self._told(fault, decide(self._situation(fault, now, None)), now)
        return [*effects, *self._launch(now), *self._gather(now)]

    def _node_lost(self, index: int, cause: str, detail: str, evidence: str, detect_s: float) -> Fault:
        run = self._run
        return Fault(
            fault_id=self._fault_id(),
            kind="node_lost",
            cause=cause,
            ranks=self.membership.ranks(index, self.job.procs_per_node),
            nodes=(index,),
            step=computed(run.step, run.resumed_step) if run is not None else None,
            detail=detail,
            evidence=evidence,
            detect_s=detect_s,
        )

    def _health(self, index: int, message: Message, now: float) -> Iterator[Effect]:
        """A node has been checked. One that is not fit is left out, but its agent lives, for what it holds."""
        node = self._nodes[index]
        found = fitness.judge(f"node {index} ({node.host})", message, node.skew_s)
        if found.event is not None:
            yield WriteEvent("health", {"node": index, **found.event}, self.generation, now, node.host)
        if found.unfit is None or self.state is State.SAVING:  # no ranks are wanted any more, but what it holds is
            return
        fault = self._node_lost(index, UNFIT, found.unfit, found.unfit, 0.0)
        self.membership.refused(index, found.unfit)
        yield from self._told(fault, decide(self._situation(fault, now, None)), now)
        yield from self._gather(now)

    def stop(self, signal_name: str, now: float, *, until_t: float | None = None) -> list[Effect]:
        """A stop is asked for. The first drains, the second ends the run at once.

        Args:
            until_t: when the drain must be over, unix seconds; None: as the config says.
        """
        if self.state is State.FINISHED:
            return []
        if self._drain is not None:
            return self._finish(Exit.STOPPED, f"stopped at once by a second {signal_name}", now)
        self._drain = Drain(signal_name, now, now + self.job.drain_s if until_t is None else until_t, self._members)
        if self.state is State.SAVING:
            self._hurry(self._drain.deadline_t)
            return []
        if self.state is State.GATHERING:
            return list(self._conclude(Exit.STOPPED, f"stopped by {signal_name} while no step was being computed", now))
        effects: list[Effect] = []
        if not self._time_for_a_snapshot():
            effects += self.custody.save_newest(now)
        return [*effects, *(effect for index in self._members for effect in self._propose_to(index))]

    def run_out(self, kind: Literal["preempted", "time_limit"], detail: str, now: float, *, until_t: float) -> list[Effect]:
        """The job's time is nearly over, or its nodes are wanted back: drain until then; a drain that is under way hurries."""
        if self.state is State.FINISHED:
            return []
        if self._drain is not None:
            self.hurry(until_t)
            return []
        fault = Fault(self._fault_id(), kind, kind, (), (), None, detail, "", 0.0)
        told = list(self._told(fault, Action("finish_drain", "the state is made durable while there is time"), now))
        return [*told, *self.stop(kind, now, until_t=until_t)]

    def hurry(self, until_t: float) -> None:
        """A drain that is under way must be over by then."""
        if self._drain is not None:
            self._drain.deadline_t = min(self._drain.deadline_t, until_t)
            self._hurry(until_t)

    def _hurry(self, until_t: float) -> None:
        if self._ending is not None:
            self._ending.deadline_t = min(self._ending.deadline_t or until_t, until_t)

    @property
    def draining(self) -> bool:
        """Whether a stop is under way."""
        return self._drain is not None

    def drain_estimate_s(self) -> float | None:
        """How long a step, a snapshot of it, and its flush have taken last; None before all three are known."""
        newest, rate = self.custody.newest, self.custody.rate_bytes_per_s
        if newest is None or rate is None or self._run is None or not self._run.step_s:
            return None
        size, stall_s = self.custody.cost(newest)
        return self._run.step_s + stall_s + size / rate

    def _reserve_s(self, drain: Drain) -> float:
        """How long before the end of a drain the workers must have stopped, so that what is held can be made durable."""
        newest, rate = self.custody.newest, self.custody.rate_bytes_per_s
        if newest is None:
            return 0.0
        wanted = 2 * self.custody.cost(newest)[0] / rate if rate is not None else drain.budget_s
        return min(drain.budget_s / 2, RESERVE_S + wanted)

    def _time_for_a_snapshot(self) -> bool:
        """Whether a snapshot of the next step boundary can be durable in time; what is held already is saved at once where not."""
        newest, rate = self.custody.newest, self.custody.rate_bytes_per_s
        if newest is None or rate is None or self._run is None or self._drain is None:
            return True
        size, stall_s = self.custody.cost(newest)
        return fits(self._drain.budget_s, step_s=self._run.step_s, stall_s=stall_s, size_bytes=size, rate_bytes_per_s=rate)

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        if self.state is State.FINISHED:
            return []
        effects: list[Effect] = list(self._launch(now))
        if now - self._pinged_t >= PING_S:
            self._pinged_t = now
            effects += [Send(index, {"type": "ping"}) for index, node in enumerate(self._nodes) if node.joined]
        for index, node in enumerate(self._nodes):
            ready_to_replace = self.membership.is_member(index) and self.membership.spare() is not None
            limit_s = self.job.silence_with_spare_s if ready_to_replace else self.job.silence_s
            if node.joined and now - node.heard_t > limit_s:
                effects += self.lost(index, f"silent for {now - node.heard_t:.0f} s", now)
        if self.state is State.GATHERING:
            effects += self._gather(now)
        if self.state is State.SETTLING and self._run is not None and now >= self._run.settle_until:
            effects += self._blame(now)
        if self._looking is not None and now >= self._looking.deadline_t:
            effects += self._judge(now)
        effects += self._gather(now)
        if self.state is State.SAVING:
            effects += self._saved(now)
        elif self._drain is not None and self.custody.behind and now >= self._drain.deadline_t - self._reserve_s(self._drain):
            effects += self._conclude(Exit.STOPPED, "the workers did not stop in time; what the agents hold is the state", now)
        elif self._drain is not None and now >= self._drain.deadline_t:
            effects += self._finish(
                Exit.STOPPED,
                f"the drain took longer than {self._drain.budget_s:.0f} s; the newest checkpoint is the state",
                now,
            )
        return effects

    def give_up(self, code: Exit, message: str, now: float) -> list[Effect]:
        """End the run for a reason that lies outside the coordinator."""
        return [] if self.state is State.FINISHED else self._finish(code, message, now)

    # -- generations ---------------------------------------------------------------------------------------------------

    def _gather(self, now: float) -> Iterator[Effect]:
        """Start the next generation if nothing is missing."""
        if self.state is not State.GATHERING or now < self._not_before:
            return
        before, members = self._members, self.membership.choose(now) if self._prepared else None
        if members is None:
            why = self.membership.hopeless(now)
            if why is not None:
                yield from self._conclude(Exit.UNUSABLE, why, now)
            return
        first = self._nodes[members[0]]
        address = first.addr, first.ready_port
        if len(members) < len(before):
            yield from self._shrunk(len(members), now)
        self.membership.start(members)
        self._grown_from = None
        self.generation += 1
        self.state = State.RUNNING
        self._run = Run(started_t=now)
        self._watchdog.begin()
        if self._stragglers is not None:
            self._stragglers.begin(self._world_size // self.job.layouts[len(members)].get("pp", 1))
        yield RaiseFence(self.generation)
        yield from self.custody.begin(self.generation, members)
        mtbf_s = mean_time_between_failures(len(self.faults), now - self._began_t)
        for node_rank, index in enumerate(members):
            yield Send(
                index,
                {
                    "type": "start",
                    "generation": self.generation,
                    "node_rank": node_rank,
                    "nodes": len(members),
                    "master_addr": address[0],
                    "master_port": address[1],
                    "collective_timeout_s": self.job.collective_timeout_s,
                    "storage": {"candidates": self.custody.candidates(index), "mtbf_s": mtbf_s},
                    "guard": {"go_back_to": self._go_back_to, "skip": self._skip},
                },
            )

    def _shrunk(self, count: int, now: float) -> Iterator[Effect]:
        """The next generation has fewer nodes than the one before."""
        gone = [index for index in self._members if not self._nodes[index].joined]
        names = ", ".join(map(str, gone))
        reason = f"no spare stands in for node {names}: {count} nodes go on, with the same global batch"
        yield self._action("shrink", reason, now)

    def _maybe_grow(self, now: float) -> Iterator[Effect]:
        """Take in nodes that stand by, once a snapshot is there that is newer than they are: then next to nothing is lost."""
        newest = self._newest_step
        if self.state is not State.RUNNING or self._drain is not None or self._grown_from is None or newest <= self._grown_from:
            return
        if not self.membership.can_grow():
            self._grown_from = None
            return
        yield self._action("grow", f"nodes have returned; all go on from step {newest}", now)
        yield from self._regather(now)

    @property
    def _newest_step(self) -> int:
        """The newest step that a generation could go on from."""
        newest = self.custody.newest
        return max(self.custody.durable_step, newest[0] if newest is not None else 0)

    def _regather(self, now: float) -> Iterator[Effect]:
        """End this generation, for the next one."""
        was_running = self.state is not State.GATHERING
        self.state = State.GATHERING
        self._looking = None
        self.custody.hold()
        yield from self._launch(now)
        for index in self._members if was_running else ():
            if self._nodes[index].joined:
                yield self._stop(index)

    def _action(self, name: str, reason: str, now: float) -> Effect:
        """An action that follows from the loss of a node, not from a new fault."""
        lost = [fault.fault_id for _, fault in self.faults if fault.kind == "node_lost"]
        fields = {"fault_id": lost[-1] if lost else None, "name": name, "reason": reason}
        return WriteEvent("action", fields, self.generation, now)

    @property
    def _world_size(self) -> int:
        return len(self._members) * self.job.procs_per_node

    def _announce(self, resumed_step: int | None, tier: str | None, now: float) -> Iterator[Effect]:
        """Write `generation_started`, once it is known from which step."""
        run = self._run
        if run is None or run.announced:
            return
        run.announced, run.resumed_step = True, resumed_step
        yield WriteEvent(
            "generation_started",
            {
                "nodes": [self._nodes[index].host for index in self._members],
                "members": list(self._members),
                "world_size": self._world_size,
                "layout": dict(self.job.layouts[len(self._members)]),
                "resumed_step": resumed_step,
                "tier": tier if resumed_step else None,
            },
            self.generation,
            run.started_t,
        )
        if resumed_step is not None:
            yield from self.custody.resumed(resumed_step, now)

    def _beat(self, ranks: dict[str, dict[str, Any]], now: float) -> Iterator[Effect]:
        run = self._run
        if run is None or self.state is State.GATHERING:
            return
        if not run.announced and "0" not in ranks:
            return  # rank 0 says from where all go on, and its agent passes that on before its beats
        for pulse in ranks.values():
            if pulse["step"] <= run.step:
                continue
            yield from self._announce(pulse["step"] - 1, self.job.storage.durable.name, now)
            if run.step != NOT_BEATEN:
                run.step_s = (pulse["beat_t"] - run.beat_t) / (pulse["step"] - run.step)
            run.step, run.beat_t = pulse["step"], pulse["beat_t"]
            self._last_step, self._go_back_to = run.step, None
            for fault, t in self._unrecovered:
                finished = (fault.step or 1) - 1
                yield WriteEvent(
                    "recovered",
                    {
                        "fault_id": fault.fault_id,
                        "step": run.step,
                        "downtime_s": round(pulse["beat_t"] - t, 3),
                        "lost_steps": max(0, finished - (run.resumed_step or 0)),
                    },
                    self.generation,
                )
            self._unrecovered = []
            for fault, t in self._waited:
                waited_s = round(pulse["beat_t"] - t, 3)
                fields = {"fault_id": fault.fault_id, "step": run.step, "downtime_s": waited_s, "lost_steps": 0}
                yield WriteEvent("recovered", fields, self.generation)
            self._waited = []

    def _record(self, node: Node, now: float, rank: int, t: float, event: str | None, fields: dict[str, Any]) -> Iterator[Effect]:
        if event == "resumed":
            yield from self._announce(int(fields["step"]), fields.get("tier"), now)
            self._last_step = int(fields["step"])
        elif event is None:
            yield WriteMetrics(fields, self.generation, t)
        else:
            yield WriteEvent(event, fields, self.generation, t, node.host)

    def _link(self, index: int, change: dict[str, Any], t: float, now: float) -> Effect:
        self.links.heard(index, change, now)
        down_s = change["down_s"]
        fields = {"node": index, **change, "down_s": round(down_s, 3) if down_s is not None else None}
        return WriteEvent("link", fields, self.generation, t, self._nodes[index].host)

    # -- ends and faults -----------------------------------------------------------------------------------------------

    def _exited(self, end: WorkerEnd, stopped: bool, now: float) -> Iterator[Effect]:
        run = self._run
        if run is None or self.state not in (State.RUNNING, State.SETTLING):  # what to do about this generation is decided
            return
        run.ends.append(end)
        run.stopped |= stopped
        self._watchdog.ended(end.rank)
        if end.failed:
            if not is_victim(end):
                yield from self._blame(now)
            elif self.state is State.RUNNING:
                self.state, run.settle_until = State.SETTLING, now + SETTLE_S
        elif len(run.ends) == self._world_size and self.state is State.RUNNING:
            self._last_step = max(self._last_step, *(each.step for each in run.ends))
            if run.stopped and self._drain is not None:
                yield from self._conclude(Exit.STOPPED, f"stopped by {self._drain.signal} at step {self._last_step}", now)
            else:
                yield from self._conclude(Exit.OK, "", now)

    def _watch(self, ranks: Mapping[str, Mapping[str, Any]], now: float) -> Iterator[Effect]:
        """Tell the watchdog; have all ranks looked at if it suspects one."""
        for rank, pulse in ranks.items():
            self._watchdog.heard(int(rank), pulse)
        if self.state is not State.RUNNING or self._looking is not None or now < self._patient_until:
            return
        suspicion = self._watchdog.suspects()
        if suspicion is not None:
            self._looking = Looking(suspicion, now + PATIENCE_S, set(self._members))
            for index in self._members:
                yield Send(index, {"type": "look"})

    def _compare(self, ranks: Mapping[str, Mapping[str, Any]], now: float) -> Iterator[Effect]:
        """Tell who compares the ranks with each other; what it finds is told, or the node is replaced."""
        if self._stragglers is None or self.state is not State.RUNNING or self._drain is not None:
            return
        for rank, pulse in ranks.items():
            self._stragglers.heard(int(rank), pulse)
        for episode in list(self._stragglers.judge()):
            yield from self._straggling(episode, now)

    def _straggling(self, episode: Episode, now: float) -> Iterator[Effect]:
        fault_id = f"g{self.generation}-straggler-{episode.number}"
        if episode.over:
            fields = {"fault_id": fault_id, "step": episode.step, "downtime_s": 0.0, "lost_steps": 0}
            yield WriteEvent("recovered", fields, self.generation, now)
        else:
            yield from self._fault(episode.fault(fault_id, self.job.procs_per_node, self._members), now, now)

    def _looked(self, index: int, ranks: Mapping[str, Mapping[str, Any]], now: float) -> Iterator[Effect]:
        if self._looking is not None:
            self._looking.looks.update((int(rank), each) for rank, each in ranks.items())
            self._looking.waiting.discard(index)
            if not self._looking.waiting:
                yield from self._judge(now)

    def _judge(self, now: float) -> Iterator[Effect]:
        """All that can be known of a suspicion is known."""
        assert self._looking is not None
        suspicion, looks, self._looking = self._looking.suspicion, self._looking.looks, None
        if self.state is not State.RUNNING or (suspicion.kind == "hang" and not self._watchdog.still(suspicion)):
            return
        fault = self._watchdog.fault(self._fault_id(), suspicion, looks, self.job.procs_per_node)
        if fault is None:
            self._watchdog.excuse(suspicion)
            return
        fault = replace(fault, nodes=tuple(self._members[node_rank] for node_rank in fault.nodes))
        outage = next(iter(self.links.outages(now, within_s=LINK_MEMORY_S + suspicion.silent_s)), None)
        if outage is not None:
            fault = replace(fault, detail=f"{fault.detail}; {outage}")
        why = None if outage is None else str(outage)
        if unheard := self._unheard(fault, now):
            fault, why = replace(fault, kind="link_down", detail=f"{fault.detail}; {unheard}"), unheard
        # Of a large world not every rank: the suspects first.
        shown = sorted(looks, key=lambda rank: (rank not in fault.ranks, rank))[:MOST_STACKS]
        for rank, each in ((rank, looks[rank]) for rank in sorted(shown)):
            about = f"rank {rank}: state {each['state'] or 'none'}, {each['cpu']:.0%} of a core\n\n"
            yield WriteText(f"{INCIDENTS}/{fault.fault_id}/rank{rank}.txt", about + each["stacks"])
        yield from self._fault(fault, now - fault.detect_s, now, why)

    def _unheard(self, fault: Fault, now: float) -> str | None:
        """Whether nothing at all is heard of the culprit's node, so that nobody can say whether its rank hangs."""
        longest_s = min((now - self._nodes[index].heard_t for index in fault.nodes), default=0.0)
        if fault.cause != "silent" or longest_s < UNHEARD_S:
            return None
        return f"nothing has been heard of node {', '.join(map(str, fault.nodes))} for {longest_s:.1f} s"

    def _blame(self, now: float) -> Iterator[Effect]:
        run = self._run
        assert run is not None
        fault = from_ends(self._fault_id(), run.ends, resumed_step=run.resumed_step, now=now)
        yield from self._fault(fault, now - fault.detect_s, now)

    def _fault(self, fault: Fault, happened_t: float, now: float, outage: str | None = None) -> Iterator[Effect]:
        yield from self._announce(None, None, now)
        action = decide(self._situation(fault, now, outage))
        if action.name == "wait":
            self._patient_until = now + max(1.0, min(LOOK_AGAIN_S, self.job.link_grace_s - fault.detect_s))
            if self._waited:
                return  # it is told already
            self._waited.append((fault, happened_t))
        elif action.name != "report":
            self.faults.append((now, fault))
            self._unrecovered.append((fault, happened_t))
        yield from self._told(fault, action, now)
        yield from self._act(action, fault, now)

    def _situation(self, fault: Fault, now: float, outage: str | None) -> Situation:
        return Situation(
            fault=fault,
            earlier=self.faults,
            budget=self.job.budget,
            draining=self._drain is not None,
            now=now,
            outage=outage,
            link_grace_s=self.job.link_grace_s,
            stand_in=self._stand_in(now),
            roll_backs=self._roll_backs,
            checkpoints=self.custody.checkpoints,
            beginning=self.custody.beginning,
            replace_stragglers=self.job.replace_stragglers,
        )

    def _told(self, fault: Fault, action: Action, now: float) -> Iterator[Effect]:
        self._told_of += 1
        yield WriteEvent(
            "fault",
            {
                "fault_id": fault.fault_id,
                "kind": fault.kind,
                "class": fault.verdict,
                "ranks": list(fault.ranks),
                "nodes": list(fault.nodes),
                "step": fault.step,
                "phase": fault.phase,
                "detail": fault.detail,
                "evidence": fault.evidence,
                "detect_s": round(fault.detect_s, 4),
            },
            self.generation,
            now,
        )
        told: dict[str, object] = {"fault_id": fault.fault_id, "name": action.name, "reason": action.reason}
        if action.roll_back is not None:
            told |= {"step": action.roll_back.step, "skip": [action.roll_back.skip] if action.roll_back.skip else []}
        yield WriteEvent("action", told, self.generation, now)

    def _act(self, action: Action, fault: Fault, now: float) -> Iterator[Effect]:
        match action.name:
            case "give_up" if fault.final is not None:
                yield from self._conclude(Exit(fault.final), fault.evidence, now)
            case "give_up":
                if bad_numbers(fault):  # nothing of it becomes durable, and takes the place of what is sound
                    yield from self.custody.roll_back(data_of(fault)[0] - 1, fault.detail)
                who = f"rank {', '.join(map(str, fault.ranks))}"
                yield from self._conclude(Exit.GAVE_UP, f"{action.reason}; {who}:\n{fault.evidence.rstrip()}", now)
            case "finish_drain":
                yield from self._conclude(Exit.STOPPED, f"{fault.detail} while stopping: {action.reason}", now)
            case "replace_node" | "restart_workers" | "roll_back":
                if action.roll_back is not None:
                    yield from self._roll_back(action.roll_back, fault)
                if fault.kind == "straggler":
                    yield from self._give_up_on(fault.nodes, now)
                self._not_before = now + action.delay_s
                yield from self._regather(now)

    def _give_up_on(self, nodes: Sequence[int], now: float) -> Iterator[Effect]:
        """Nodes that are slow: a spare takes their place if there is one, else their agents are to be others."""
        for index in nodes:
            if self.membership.spare() is not None:
                self.membership.shun(index)
                continue
            self.links.forget(index)
            self.custody.hold()
            self.membership.lost(index, "it was too slow", now)
            yield from self.custody.lost(index)

    def _stand_in(self, now: float) -> str:
        """What becomes of the place of a node that is gone, in words."""
        spare, fewer = self.membership.spare(), self.membership.fewer(now)
        if spare is not None:
            return f"spare node {spare} takes over"
        if not fewer:
            return "its agent is started anew"
        return f"its agent is started anew, and if it is not back in {self.job.rejoin_s:g} s, {fewer} nodes go on"

    def _roll_back(self, back: RollBack, fault: Fault) -> Iterator[Effect]:
        self._roll_backs.append((fault, back))
        self._go_back_to = back.step
        if back.skip is not None:
            self._skip = merged([*self._skip, back.skip])
        yield from self.custody.roll_back(back.step, f"rolled back to step {back.step}: {fault.detail}")

    def _stop(self, index: int) -> Effect:
        """End a node's workers; those that hang are asked for their last words before."""
        fault = self._unrecovered[-1][0] if self._unrecovered else None
        asked = fault is not None and fault.hung and fault.fault_id.startswith(f"g{self.generation}-")
        return Send(index, {"type": "stop", "incident": fault.fault_id if fault is not None and asked else None})

    def _fault_id(self) -> str:
        return f"g{self.generation}-{self._told_of + 1}"

    # -- storage -------------------------------------------------------------------------------------------------------

    def _storage(self, index: int, news: News, now: float) -> Iterator[Effect]:
        """News of a node's keeper."""
        if news["what"] == "no_room" and self.state is not State.SAVING:
            places = ", ".join(news["places"])
            message = f"no tier of node {index} has room for the {news['bytes'] / 2**20:,.0f} MiB of its snapshots: {places}"
            yield from self._finish(Exit.UNUSABLE, message, now)
            return
        yield from self.custody.heard(index, news, now)
        yield from self._maybe_grow(now)
        if self.state is State.SAVING and self._ending is not None:
            if news["what"] == "synced":
                self._ending.waiting.discard(index)
            elif news["what"] == "inventory":
                yield self._sync(index)
            yield from self._saved(now)

    def _sync(self, index: int) -> Effect:
        return Send(index, {"type": "storage", "order": {"do": "sync"}})

    def _conclude(self, code: Exit, message: str, now: float) -> Iterator[Effect]:
        """End the job, but make durable first what the keepers hold."""
        if self._run is None:
            yield from self._finish(code, message, now)
            return
        running = self.state in (State.RUNNING, State.SETTLING)
        self.state = State.SAVING
        deadline = self._drain.deadline_t if self._drain is not None else None if code is Exit.OK else now + self.job.drain_s
        self._ending = Ending(code, message, deadline, set(self._members))
        yield from self._launch(now)
        for index in self._members:
            node = self._nodes[index]
            if not node.joined:
                continue
            if running and code is not Exit.OK:
                yield self._stop(index)  # and once its workers are gone it says ready
            elif running or node.ready_port is not None:
                yield self._sync(index)

    def _saved(self, now: float) -> Iterator[Effect]:
        """End the job as soon as nothing more can be done for its state."""
        ending, custody = self._ending, self.custody
        assert ending is not None
        ending.waiting -= self.membership.overdue(now)
        if not ending.waiting:
            yield from custody.save_newest(now)
            if not custody.behind:
                yield from self._finish(ending.code, ending.message, now)
                return
        ending.troubled_t = (ending.troubled_t or now) if custody.troubled else None
        late = ending.deadline_t is not None and now >= ending.deadline_t
        late |= ending.troubled_t is not None and now - ending.troubled_t > self.job.drain_s
        if not late and not custody.given_up():
            return
        message, code = ending.message, ending.code
        if custody.behind and custody.newest is not None:
            rest = (
                "the other tiers vanish with the job: the next one goes on from there"
                if self.job.tiers_vanish
                else "it is still held by the other tiers: run again on the same nodes to go on"
            )
            lost = (
                f"step {custody.newest[0]} could not be made durable on tier {self.job.storage.durable.name}, where step "
                f"{custody.durable_step} is the newest; {rest}"
            )
            message, code = f"{message}; {lost}" if message else lost, Exit.UNUSABLE if code is Exit.OK else code
        yield from self._finish(code, message, now)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _propose_to(self, index: int) -> Iterator[Effect]:
        if self._drain is not None and self.state is State.RUNNING:
            yield self._drain.propose(index)

    def _finish(self, code: Exit, message: str, now: float) -> list[Effect]:
        self.state = State.FINISHED
        effects: list[Effect] = [*self._announce(None, None, now)]
        if self._drain is not None:
            drained = {
                "signal": self._drain.signal,
                "deadline_s": round(self._drain.budget_s, 3),
                "took_s": round(now - self._drain.asked_t, 3),
                "step": self._last_step,
            }
            effects.append(WriteEvent("drain", drained, self.generation, now))
        clear = self.custody.superseded(ended=code is not Exit.STOPPED)
        effects += [Send(index, {"type": "shutdown", "clear": clear}) for index, node in enumerate(self._nodes) if node.joined]
        finished = {"exit_code": int(code), "step": self._last_step}
        effects.append(WriteEvent("run_finished", finished, self.generation, now))
        effects.append(Finish(code, message))
        return effects


def _end(fields: dict[str, Any]) -> WorkerEnd:
    raised, oom = fields.pop("raised"), fields.pop("oom")
    return WorkerEnd(
        **fields,
        raised=Raised(**raised) if raised is not None else None,
        oom=OutOfMemory(**oom) if oom is not None else None,
    )
