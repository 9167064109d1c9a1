"""Generations: nodes are gathered, the durable tier is closed to all who came before, and then all are told to start.

    GATHERING   nodes start up, or end the workers of the generation before, and say `Ready`
    FENCING     the fence is being raised, then what is invalidated is quarantined; a node that is lost meanwhile ends it
    RUNNING     all were told to start
    OVER        the job ends: there will be no other generation

A number is used for one fence only. So what comes back late, of a fence that was given up for the loss of a node, is known by it.
Nobody waits for ever: what the shell has not answered long after its limit counts as failed (`unanswered`).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from checkpoint.tiers.cadence import mean_time_between_failures
from resilient.config.timeouts import ANSWER_S, FENCE_HANG_S, FENCE_RAISE_S, QUARANTINE_S, WRITING_S
from resilient.control.attendance import Moment
from resilient.control.hold import Hold
from resilient.control.incidents import Incidents
from resilient.control.job import JobSpec
from resilient.control.liveness import NO_STEP
from resilient.control.membership import Membership
from resilient.control.roll_back import RollBacks
from resilient.outbox import Launch, Outbox, Quarantine, RaiseFence
from resilient.protocol.messages import Heartbeat, Start, Stop
from resilient.recovery.attempts import Attempt
from resilient.recovery.faults import listed
from resilient.snapshots import Snapshots

log = logging.getLogger(__name__)

LEAST_REPORT_S = 0.2
SCRIPT = "script"  # the tier of a generation whose script goes on from a checkpoint of its own
REPORTS_PER_S = 2048  # of all nodes together, while nothing but heartbeats is new


class State(Enum):
    GATHERING = auto()
    FENCING = auto()
    RUNNING = auto()
    OVER = auto()


@dataclass
class Run:
    """What is known of the generation that runs, or ran last.

    Attributes:
        resumed_step: the one that it went on from; None while that is not known.
        step: the newest that a rank has finished, at `beat_t` (unix seconds).
        step_s: how long it took.
        observed: its steps are counted from outside; the script says nothing of them.
        saved_step: the step after which the script wrote its newest checkpoint by itself; 0 where its steps are not seen.
        unnumbered: checkpoints that were told of a script whose steps are not seen.
        metrics_step: the newest of which there are metrics; these come before its heartbeat.
    """

    started_t: float
    resumed_step: int | None = None
    announced: bool = False
    of_script: bool = False  # announced as one that goes on from a checkpoint of its own
    step: int = NO_STEP
    beat_t: float = 0.0
    step_s: float = 0.0
    observed: bool = False
    saved_step: int | None = None
    unnumbered: int = 0
    metrics_step: int = NO_STEP


class Generations:
    """Owns the number of the generation, its state, and what it has come to.

    Invariants: `generation` is that of the last `Start`, and never goes back; while `FENCING`, all of `_chosen` are ready, and the
    answer to `_awaited` is due at `_answer_by_s`.
    """

    def __init__(
        self,
        job: JobSpec,
        membership: Membership,
        snapshots: Snapshots,
        incidents: Incidents,
        roll_backs: RollBacks,
        last_generation: int,
    ) -> None:
        self._job, self._membership, self._snapshots = job, membership, snapshots
        self._incidents, self._roll_backs = incidents, roll_backs
        self.generation = last_generation
        self.state = State.GATHERING
        self.run: Run | None = None
        self.hold: Hold | None = None  # of the generation that runs
        self.last_step = 0  # of the job
        self.trained = False  # a step was finished in this job
        self._began_t = 0.0
        self._prepared = False
        self._not_before_s = 0.0
        self._fenced = last_generation  # the last number that was used for a fence
        self._awaited: Literal["fence", "quarantine"] = "fence"
        self._answer_by_s = 0.0  # attended seconds
        self._chosen: tuple[int, ...] = ()
        self._saved_step = job.saved_step  # after which the script wrote its newest checkpoint by itself
        self._grown_from: tuple[int, int] | None = None  # what was newest when nodes came to stand by that were missing

    # -- before a generation -------------------------------------------------------------------------------------------

    def begin(self, when: Moment, out: Outbox) -> None:
        """The job begins."""
        self._began_t = when.now
        self._membership.begin(when.attended_s)
        self.launch(when, out)

    def launch(self, when: Moment, out: Outbox) -> None:
        """Start the agents that are due."""
        for node in self._membership.launches(when.attended_s):
            out.append(Launch(node))

    def prepared(self) -> None:
        """What the entry point prepares once per job is there."""
        self._prepared = True

    def hold_back(self, until_s: float) -> None:
        """The next generation does not begin before then, in attended seconds."""
        self._not_before_s = until_s

    def gather(self, when: Moment, out: Outbox) -> None:
        """Raise the fence for the next generation if nobody is missing."""
        if self.state is not State.GATHERING or when.attended_s < self._not_before_s or not self._prepared:
            return
        members = self._membership.choose(when.attended_s)
        if members is None:
            return
        self.state, self._chosen = State.FENCING, members
        self._fenced = max(self._fenced, self.generation) + 1
        patience_s = FENCE_HANG_S if self._snapshots.may_start_without_fence else FENCE_RAISE_S
        self._await("fence", patience_s, when)
        out.append(RaiseFence(self._fenced, patience_s))

    def _await(self, what: Literal["fence", "quarantine"], limit_s: float, when: Moment) -> None:
        self._awaited, self._answer_by_s = what, when.attended_s + limit_s + ANSWER_S

    def unanswered(self, when: Moment, out: Outbox) -> str | None:
        """If the fence or the quarantine was not answered in time, that is a failure of it; why the job must end, if it must."""
        if self.state is not State.FENCING or when.attended_s < self._answer_by_s:
            return None
        if self._awaited == "fence":
            return self.fence_raised(self._fenced, "nothing is heard of it", when, out)
        return self.quarantined(self._fenced, (), "nothing is heard of it", when, out)

    def hopeless(self, when: Moment) -> str | None:
        """Why there can be no other generation; None if there can."""
        if self.state is not State.GATHERING or when.attended_s < self._not_before_s:
            return None
        return self._membership.hopeless(when.attended_s)

    def left(self, node: int) -> None:
        """A node is gone, or not fit: if it was chosen, others have to be."""
        if self.state is State.FENCING and node in self._chosen:
            self.state = State.GATHERING

    def fence_raised(self, generation: int, error: str | None, when: Moment, out: Outbox) -> str | None:
        """The fence is up, or could not be raised; why the job must end, if it must."""
        if self.state is not State.FENCING or generation != self._fenced or self._awaited != "fence":
            return None
        if error is not None and not self._snapshots.may_start_without_fence:
            return f"the checkpoint fence: {error}"
        if error is not None:
            # A tier that cannot be written is closed to everybody; whoever flushes raises the fence first.
            log.warning("the checkpoint fence could not be raised: %s", error)
        invalidated = self._snapshots.invalidated_due()
        if invalidated:
            self._await("quarantine", QUARANTINE_S, when)
            out.append(Quarantine(invalidated, generation))
        else:
            self._start(when, out)
        return None

    def quarantined(
        self, generation: int, renamed: Sequence[tuple[int, str]], error: str | None, when: Moment, out: Outbox
    ) -> str | None:
        """What is invalidated is out of the way, or could not be renamed; why the job must end, if it must.

        Args:
            renamed: step and new name.
        """
        tier = self._job.storage.durable.name
        for step, name in renamed:
            fields = {"step": step, "tier": tier, "reason": f"rolled back: it is {name} now"}
            out.event("checkpoint_rejected", fields, self.generation, when.now)
        if self.state is not State.FENCING or generation != self._fenced:
            return None
        if error is not None:
            return f"a checkpoint that was rolled back cannot be set aside on tier {tier}: {error}"
        self._start(when, out)
        return None

    def _start(self, when: Moment, out: Outbox) -> None:
        membership, members = self._membership, self._chosen
        first = membership.nodes[members[0]]
        port = first.ready_port
        assert port is not None
        asked = {node for node in membership.members if membership.is_left(node) and not membership.has_departed(node)}
        goes_on = set(members)
        gone = [node for node in membership.members if node not in goes_on and node not in asked]
        if len(members) < len(membership.members) and gone:
            fewer = "1 node goes on" if len(members) == 1 else f"{len(members)} nodes go on"
            reason = f"no spare stands in for node {listed(gone)}: {fewer}, with the same global batch"
            self._incidents.follow_up("shrink", reason, when.now, self.generation, out)
        membership.start(members)
        self.generation, self.state, self.run, self.hold = self._fenced, State.RUNNING, Run(when.now), None
        self._snapshots.begin(self.generation, members, out, membership.failure_domains())
        self._snapshots.quarantine_done(out)
        self.stand_by()  # who came while the fence was raised will say nothing more
        mtbf_s = mean_time_between_failures(len(self._incidents.faults), when.now - self._began_t)
        candidates = self._snapshots.candidates()
        go_back_to = self._roll_backs.go_back_to
        if go_back_to is not None and self._saved_step is not None and self._saved_step > go_back_to:
            self._saved_step = None  # the script has to delete it
        for node_rank, node in enumerate(members):
            own = membership.assignment.ranks(node)
            message = Start(
                generation=self.generation,
                node_rank=node_rank,
                nodes=len(members),
                master_addr=first.addr,
                master_port=port,
                collective_timeout_s=self._job.collective_timeout_s,
                report_s=max(LEAST_REPORT_S, len(members) / REPORTS_PER_S),
                mtbf_s=mtbf_s,
                candidates=candidates,
                durable_step=self._snapshots.durable_step,
                go_back_to=go_back_to,
                skip=tuple(self._roll_backs.skip),
                saved_step=self._saved_step,
                world_size=membership.assignment.world_size,
                first_rank=own.start,
                devices=membership.assignment.devices(node),
            )
            out.send(node, message)

    # -- while it runs -------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Ranks of the present members."""
        return self._membership.assignment.world_size

    @property
    def place_ranks(self) -> int:
        """Ranks that have the same to do: those of a stage of the pipeline."""
        return self.world_size // self._job.layouts[self.world_size].get("pp", 1)

    @property
    def longer_ranks(self) -> int:
        """The first ranks of a stage that have a micro batch more to compute than the others: those of whole replicas."""
        layout = self._job.layouts[self.world_size]
        return layout.get("longer", 0) * layout.get("tp", 1) * layout.get("cp", 1)

    def resumed(self, step: int, tier: str | None, when: Moment, out: Outbox) -> None:
        """Rank 0 says from where all go on. It says so again where optimizers have stepped before the script is attached."""
        run = self.run
        if run is not None and run.of_script and tier != SCRIPT:
            run.of_script, run.resumed_step, run.step = False, step, NO_STEP
            self._snapshots.resumed(step, when.now, out)
        self.announce(step, tier, when, out)
        self.last_step = step

    def announce(self, resumed_step: int | None, tier: str | None, when: Moment, out: Outbox) -> None:
        """Write `generation_started`, once it is known from which step, or that it will not be."""
        run, membership = self.run, self._membership
        if run is None or run.announced:
            return
        run.announced, run.resumed_step = True, resumed_step
        fields: dict[str, object] = {
            "nodes": [membership.nodes[node].host for node in membership.members],
            "members": list(membership.members),
            "world_size": self.world_size,
            "layout": dict(self._job.layouts[self.world_size]),
            "resumed_step": resumed_step,
            "tier": tier if resumed_step else None,
        }
        ranks = [len(membership.assignment.ranks(node)) for node in membership.members]
        if len(set(ranks)) > 1:
            fields["ranks"] = ranks
        if left_out := membership.left_out():
            fields["left_out"] = {str(node): devices for node, devices in left_out.items()}
        out.event("generation_started", fields, self.generation, run.started_t)
        run.of_script = tier == SCRIPT
        if resumed_step is not None and not run.of_script:
            self._snapshots.resumed(resumed_step, when.now, out)

    def on_heartbeats(self, heartbeats: Mapping[int, Heartbeat], when: Moment, out: Outbox) -> None:
        """What ranks of a node have come to. Until rank 0 has said it, or finished a step, nobody knows from where all went on."""
        run = self.run
        if run is not None and 0 in heartbeats and heartbeats[0].step > run.step:
            self._announce_beaten(heartbeats[0], when, out)
        if run is None or not run.announced:
            return
        for heartbeat in heartbeats.values():
            if heartbeat.step <= run.step:
                continue
            if run.step != NO_STEP:
                run.step_s = (heartbeat.beat_t - run.beat_t) / (heartbeat.step - run.step)
            run.step, run.beat_t, run.observed = heartbeat.step, heartbeat.beat_t, heartbeat.observed
            self.last_step, self.trained = max(run.step, run.metrics_step), True
            self._roll_backs.step_finished()
            self._incidents.step_finished(run.step, run.beat_t, run.resumed_step or 0, self.generation, out)

    def _announce_beaten(self, heartbeat: Heartbeat, when: Moment, out: Outbox) -> None:
        """Rank 0 has finished a step. Where it has said nothing before, a script may yet be attached: no snapshot is forgotten."""
        first_step = heartbeat.step if heartbeat.first_step == NO_STEP else heartbeat.first_step
        self.announce(max(0, first_step - 1), SCRIPT if self._job.script else self._job.storage.durable.name, when, out)

    def script_saved(self, step: int) -> bool:
        """A script has written a checkpoint after this step by itself; whether that is news."""
        run = self.run
        if run is None:
            return False
        run.unnumbered += step == 0
        if run.saved_step == step:
            return False
        run.saved_step = self._saved_step = step
        return True

    def attempt(self, when: Moment) -> Attempt | None:
        """What this generation has come to, of a script that says nothing by itself; None where somebody does."""
        run = self.run
        if run is None or not (run.observed or (self._job.script and run.step == NO_STEP)):
            return None
        steps = run.step - (run.resumed_step or 0) if run.step != NO_STEP else None
        return Attempt(steps, run.saved_step is not None, when.now - run.started_t, run.resumed_step or 0)

    # -- its end -------------------------------------------------------------------------------------------------------

    def hold_ranks(self, reason: str, out: Outbox) -> None:
        """Have all ranks stop at one step boundary, the next that none has passed; once in a generation."""
        if self.hold is None and self.state is State.RUNNING:
            self.hold = Hold(reason, self.generation, self._membership.members)
            for node in self._membership.members:
                self.hold.propose(node, out)

    def propose_to(self, node: int, out: Outbox) -> None:
        """A node's workers are there: if they are to stop, it is proposed to them."""
        if self.hold is not None and self.state is State.RUNNING:
            self.hold.propose(node, out)

    def proposed(self, node: int, checked: int, out: Outbox) -> None:
        """A node answers a proposal."""
        if self.hold is not None:
            self.hold.proposed(node, checked, out)

    def stand_by(self) -> None:
        """A node is ready: if it makes a larger generation possible, it is taken in once there is something newer to go on from."""
        self._grown_from = self._newest if self._membership.can_grow() else None

    @property
    def may_grow(self) -> bool:
        """Whether nodes stand by for a larger generation, and what it goes on from is newer: next to nothing would be lost."""
        if self.state is not State.RUNNING or self._grown_from is None or self._newest <= self._grown_from:
            return False
        if not self._membership.can_grow():
            self._grown_from = None
            return False
        return True

    def report_growth(self, when: Moment, out: Outbox) -> None:
        """Write down that this generation ends for a larger one."""
        step, _ = self._newest
        reason = f"nodes have returned; all go on from {f'step {step}' if step else 'the newest checkpoint of the script'}"
        self._incidents.follow_up("grow", reason, when.now, self.generation, out)

    @property
    def _newest(self) -> tuple[int, int]:
        """The newest step that a generation could go on from, and beside it the checkpoints of a script whose steps are not seen.

        A script that is not attached goes on from its own checkpoints.
        """
        newest, run = self._snapshots.newest, self.run
        held_step = max(self._snapshots.durable_step, newest.step if newest is not None else 0)
        if run is None or run.saved_step is None or (run.announced and not run.of_script):
            return held_step, 0
        return max(held_step, run.saved_step), run.unnumbered

    def regather(self, when: Moment, out: Outbox) -> None:
        """End this generation, for the next one."""
        running, self.state = self.state is State.RUNNING, State.GATHERING
        self._snapshots.hold()
        self.launch(when, out)
        if running:
            for node in self._membership.members:
                self.stop_workers(node, out)

    def stop_workers(self, node: int, out: Outbox) -> None:
        """End a node's workers. Those that hang may say something before; else a script's own checkpoint is finished first."""
        if self._membership.nodes[node].joined:
            hung = self._incidents.hung(self.generation)
            writing_s = WRITING_S if hung is None and self.hold is None else 0.0
            out.send(node, Stop(generation=self.generation, incident=hung, writing_s=writing_s))

    def metrics_arrived(self, step: int) -> None:
        """There are metrics of this step of the generation that runs."""
        if self.run is not None:
            self.run.metrics_step = max(self.run.metrics_step, step)
            self.last_step = max(self.last_step, step)

    def workers_ended(self, step: int) -> None:
        """All workers have ended, the last at this step."""
        self.last_step = max(self.last_step, step)

    def end(self) -> bool:
        """There will be no other generation; whether one is running."""
        running, self.state = self.state is State.RUNNING, State.OVER
        return running
