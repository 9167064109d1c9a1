"""What must hold of the effects of a control core, whatever happens to it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from control_agents import Agent

from checkpoint.protocol import SnapshotKey
from resilient.outbox import AcknowledgeRecords, Effect, WriteEvent, WriteMetrics
from resilient.protocol.candidates import unpack
from resilient.protocol.messages import Start
from resilient.recovery.policy import Budget
from resilient.recovery.rollback import InvalidationRule

DRIVERS_OWN = {"generation_started", "fault", "action", "recovered", "drain", "run_finished"}
RESTARTS = {"restart_workers", "replace_node", "roll_back"}
STOPPING = {*RESTARTS, "wait"}  # what the next step ends


@dataclass
class LedgerChecks:
    """What the driver's own events must say.

    Attributes:
        open: faults that may recover, with what is done about each.
        incidents: by fault.
        lost: nodes of faults that are losses.
        restarts: that were decided on after a generation: when, unix seconds, and which nodes had been lost, if that was why.
        voids: what roll-backs have invalidated.
        bad: by fault that put the state in doubt, what is invalid where nothing is gone back to.
        go_back_to: the target of the last roll-back, until a generation has finished a step.
        said: by generation the step from which its rank 0 went on.
        silent: how often the daemon of a node did not answer at the end of the job.
    """

    budget: Budget
    last_generation: int = 0
    faults: set[str] = field(default_factory=set)
    open: dict[str, str] = field(default_factory=dict)
    incidents: dict[str, str] = field(default_factory=dict)
    lost: dict[str, frozenset[int]] = field(default_factory=dict)
    restarts: dict[int, list[tuple[float, frozenset[int]]]] = field(default_factory=dict)
    voids: list[InvalidationRule] = field(default_factory=list)
    bad: dict[str, InvalidationRule] = field(default_factory=dict)
    go_back_to: int | None = None
    said: dict[int, int] = field(default_factory=dict)
    silent: Counter[int] = field(default_factory=Counter)
    announced: set[int] = field(default_factory=set)
    gave_up: bool = False

    def check(self, effects: Iterable[Effect], now: float, left: frozenset[int]) -> list[WriteEvent]:
        """Look at what one call has appended; the driver's own events in it. Args: left: nodes that were left before it."""
        events = [each for each in effects if isinstance(each, WriteEvent) and each.event in DRIVERS_OWN]
        unanswered: set[object] = set()
        for each in events:
            assert each.generation >= self.last_generation, f"{each} after generation {self.last_generation}"
            self.last_generation = each.generation
            match each.event:
                case "fault":
                    fault_id = str(each.fields["fault_id"])
                    assert fault_id not in self.faults, "two faults with one id"
                    self.faults.add(fault_id)
                    self.incidents[fault_id] = str(each.fields["incident_id"])
                    assert self.incidents[fault_id] in (fault_id, self.opened), f"{each}: ranks stand still since {self.opened}"
                    unanswered.add(fault_id)
                    if "at the end of the job" in str(each.fields["detail"]):
                        self.silent.update(each.fields["nodes"])  # type: ignore[call-overload]
                    if each.fields["kind"] in ("not_finite", "loss_spike"):
                        self.bad[fault_id] = InvalidationRule(each.generation, max(1, int(str(each.fields["step"] or 1))) - 1)
                    if each.fields["kind"] == "node_lost":
                        self.lost[fault_id] = frozenset(each.fields["nodes"])  # type: ignore[arg-type]
                case "action":
                    unanswered.discard(each.fields["fault_id"])
                    self._act(each, now, left)
                case "recovered":
                    assert each.fields["incident_id"] == self.incidents[str(each.fields["fault_id"])], f"{each}: another incident"
                    assert self.open.pop(str(each.fields["fault_id"]), None), f"{each} is no fault, or over already"
                case "generation_started":
                    assert each.generation not in self.announced, "a generation begins twice"
                    self.announced.add(each.generation)
                    step = each.fields["resumed_step"]
                    assert step is None or step == self.said.get(each.generation), f"{each}: rank 0 has said something else"
        assert not unanswered, "a fault without an action"
        return events

    def _act(self, event: WriteEvent, now: float, left: frozenset[int]) -> None:
        name, reason = str(event.fields["name"]), str(event.fields["reason"])
        in_last_hour = sum(
            any(now - t < 3600 and not (nodes and nodes <= left) for t, nodes in which)  # no losses of a node that was left
            for ended, which in self.restarts.items()
            if ended != event.generation
        )
        if name in RESTARTS:
            leaves = "it is left, and the others go on without it" in reason  # for what it does, whatever the others have done
            assert leaves or in_last_hour < self.budget.max_restarts_per_hour, "a restart that the budget does not allow"
            nodes = self.lost.get(str(event.fields["fault_id"]), frozenset())
            self.restarts.setdefault(event.generation, []).append((now, nodes))
        if name in (*STOPPING, "degrade", "degrade_tier", "report"):
            fault_id = str(event.fields["fault_id"])
            assert name not in STOPPING or self.incidents[fault_id] == (self.opened or fault_id), f"{event} meets {self.opened}"
            self.open[fault_id] = name
        if name == "give_up":
            self.gave_up = True
            if "within an hour" in reason:
                assert in_last_hour >= self.budget.max_restarts_per_hour, f"{reason}, but there were {in_last_hour}"
        if name == "finish_drain" and (bad := self.bad.get(str(event.fields["fault_id"]))) is not None:
            step = event.fields.get("step")  # nothing of it becomes durable
            self.voids.append(bad if step is None else InvalidationRule(event.generation, int(str(step))))
        if name == "roll_back":
            step = event.fields["step"]
            assert isinstance(step, int)
            self.go_back_to = step
            self.voids.append(InvalidationRule(event.generation, step))

    @property
    def opened(self) -> str | None:
        """The incident for which ranks stand still."""
        return next((self.incidents[fault_id] for fault_id, name in self.open.items() if name in STOPPING), None)

    def void(self, key: SnapshotKey) -> bool:
        return any(each.covers(key.step, key.generation) for each in self.voids)

    def check_over(self) -> None:
        """A step was finished: nothing keeps the ranks from getting on."""
        left = [fault_id for fault_id, name in self.open.items() if name in STOPPING]
        assert not left, f"{left} never recovered, although the ranks get on"


def check_starts(starts: Sequence[tuple[int, Start]], agents: Sequence[Agent], members: Sequence[int], size: int) -> None:
    """Of all that are told to start at the same moment. Args: size: of the generation, as the nodes allowed that were there."""
    assert [start.node_rank for _, start in starts] == list(range(len(starts)))
    assert len(starts) == size, f"a generation of {len(starts)} nodes, where there could be one of {size}"
    assert [node for node, _ in starts] == list(members), f"{members} are members, and others were told to start"
    for node, _ in starts:
        agent = agents[node]
        assert agent.joined and agent.ready, f"a start to node {node}, which is not ready"
        assert not agent.unfit, f"a start to node {node}, which has failed its check"
    for node, agent in enumerate(agents):
        assert not agent.joined or agent.idle, f"node {node} may still run generation {agent.generation}"


def check_way_back(start: Start, agents: Sequence[Agent], ledger: LedgerChecks) -> None:
    """From where a generation goes on."""
    if ledger.go_back_to is None:
        assert start.go_back_to is None, "a roll-back that nobody asked for, or that is over"
    else:
        assert start.go_back_to == ledger.go_back_to, "ranks are not told how far to go back"
    for candidate in unpack(start.candidates):
        assert not ledger.void(candidate.key), f"{candidate.key} was rolled back"
        for number, holders in enumerate(candidate.shards):
            assert holders, f"shard {number} of {candidate.key} is nowhere"
            for holder in holders:
                held = {(each.key, each.shard) for each in agents[holder.node].will_hold()}
                assert (candidate.key, number) in held, f"node {holder.node} has no shard {number} of {candidate.key}"


def check_records(effects: Sequence[Effect], count: int) -> None:
    """So many records of an agent were handed in: all are acknowledged once, behind what was written of them."""
    where = [place for place, each in enumerate(effects) if isinstance(each, AcknowledgeRecords)]
    found = [each.count for each in effects if isinstance(each, AcknowledgeRecords)]
    assert found == ([count] if count else []), f"{found} records are acknowledged instead of {count}"
    written = [place for place, each in enumerate(effects) if isinstance(each, WriteMetrics) or _of_agent(each)]
    assert not where or not written or max(written) < where[0], "records are acknowledged before they are written"


def _of_agent(effect: Effect) -> bool:
    return isinstance(effect, WriteEvent) and effect.host is not None and effect.event not in DRIVERS_OWN


def newest_held(agents: Sequence[Agent], ledger: LedgerChecks) -> int:
    """The newest step of which daemons that have told all they know hold every shard; 0: none."""
    found: dict[SnapshotKey, set[int]] = {}
    shards: Mapping[SnapshotKey, int] = {e.key: e.shards for agent in agents for e in agent.held}
    for agent in agents:
        if agent.joined and not agent.outbox:
            for each in agent.will_hold():
                found.setdefault(each.key, set()).add(each.shard)
    whole = [key for key, numbers in found.items() if len(numbers) == shards[key] and not ledger.void(key)]
    return max((key.step for key in whole), default=0)
