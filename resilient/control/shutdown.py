"""The end of a job: stops on request, the drain, and what is held made durable before the last word.

A first stop drains, a second ends the run at once. Once no worker computes any more the job is *saving*: the nodes' snapshot
daemons settle what workers have left, the newest snapshot is flushed, and when nothing is behind any more, or the deadline has
come, it ends. Deadlines of drains are unix seconds: they were set outside. The patience with a durable tier that fails, and with a
daemon that does not answer, is in attended seconds. Daemons are asked as soon as no worker of theirs is left, and again while they
flush; that of a node which never says that its workers are gone is asked after a while all the same. One that does not answer is
replaced by another, which finds what it held; where that one is silent too, the job has as long as a drain may take.
"""

from dataclasses import dataclass, field

from checkpoint.protocol import Sync
from resilient.config.timeouts import SETTLE_S
from resilient.control.attendance import Moment
from resilient.control.drain import Drain, fits
from resilient.control.generations import Generations, State
from resilient.control.job import JobSpec
from resilient.control.membership import Membership
from resilient.exits import Exit
from resilient.outbox import Finish, Outbox
from resilient.protocol.messages import ReplaceDaemon
from resilient.protocol.messages import Shutdown as ShutdownMessage
from resilient.recovery.faults import listed
from resilient.snapshots import Snapshots

RESERVE_S = 1.0  # of a drain, for what is neither copying nor writing
ASK_S = 5.0  # daemons are asked so often whether they are there
SHARE = 0.5  # of what is left of a drain: a daemon has answered by then; another one, and the flush, need time as well


@dataclass
class Saving:
    """How the job will end, once what the daemons hold is durable, or at the deadline (unix seconds; None: however long it takes).

    Attributes:
        waiting: for nodes that have not settled what their workers left.
        troubled_s: since when the durable tier fails, attended seconds.
        asked: since when nodes have not answered, attended seconds.
        replaced: nodes whose daemon was replaced, for it did not answer.
        held_step: the newest step of which nodes have held every shard since.
        lost: nodes that are waited for no more, for they are gone.
        ask_s: when daemons are asked again whether they are there, attended seconds.
    """

    code: Exit
    message: str
    deadline_t: float | None
    waiting: set[int]
    troubled_s: float | None = None
    asked: dict[int, float] = field(default_factory=dict)
    replaced: set[int] = field(default_factory=set)
    held_step: int = 0
    lost: set[int] = field(default_factory=set)
    ask_s: float = 0.0

    def patience_s(self, began_t: float) -> float:
        """How long a daemon may take to answer what it was asked at `began_t`, unix seconds.

        The deadline may have passed while the driver was away, which is no daemon's fault.
        """
        return SETTLE_S if self.deadline_t is None else min(SETTLE_S, max(ASK_S, SHARE * (self.deadline_t - began_t)))

    def hurry(self, until_t: float) -> None:
        self.deadline_t = until_t if self.deadline_t is None else min(self.deadline_t, until_t)


class Shutdown:
    """Invariants: at most one drain in a job; `saving` from when no generation will follow; nothing happens once `finished`.

    Attributes:
        end_t: of the job's time, as it was told last; unix seconds, None: it has no limit, or it is not known.
    """

    def __init__(self, job: JobSpec, membership: Membership, snapshots: Snapshots, generations: Generations) -> None:
        self._job, self._membership, self._snapshots, self._generations = job, membership, snapshots, generations
        self.drain: Drain | None = None
        self.saving: Saving | None = None
        self.finished = False
        self.end_t = job.end_t

    def limit_is(self, end_t: float | None) -> None:
        """The job's time ends then, unix seconds; None: it has no limit."""
        self.end_t = end_t

    # -- a stop --------------------------------------------------------------------------------------------------------

    def stop(
        self, signal: str, when: Moment, out: Outbox, *, until_t: float | None, code: Exit = Exit.STOPPED, why: str = ""
    ) -> None:
        """A stop is asked for.

        Args:
            signal: by what.
            until_t: when the drain must be over, unix seconds; None: as the config says.
            code: with which the job ends; why: said before all else at its end.
        """
        if self.drain is not None:
            code, message = self.drain.code, self.drain.explained(f"stopped at once by a second {signal}")
            if self.saving is not None and self.saving.code not in (Exit.OK, Exit.STOPPED):  # it had failed before the stop
                code, message = self.saving.code, f"{message}; {self.saving.message}"
            self.finish(code, message, when, out)
            return
        deadline_t = when.now + self._job.drain_s if until_t is None else until_t
        self.drain = drain = Drain(signal, when.now, deadline_t, code, why)
        if self.saving is not None:
            self.saving.hurry(deadline_t)
            return
        if self._generations.state is not State.RUNNING:
            self._conclude_drain(f"stopped by {signal} while no step was being computed", when, out)
            return
        if not self._time_for_a_snapshot(drain):
            self._snapshots.save_newest(when.now, out)
        self._generations.hold_ranks(signal, out)

    def begin(self, signal: str, when: Moment, out: Outbox) -> None:
        """A stop is asked for by what reaches many processes at once: a drain that is under way goes on."""
        if self.drain is None:
            self.stop(signal, when, out, until_t=None)

    def hurry(self, until_t: float) -> None:
        """A drain that is under way must be over by then, unix seconds."""
        if self.drain is not None:
            self.drain.hurry(until_t)
            if self.saving is not None:
                self.saving.hurry(until_t)

    def all_ended(self, stopped: bool, when: Moment, out: Outbox) -> None:
        """All workers have ended well; stopped: because they were asked to."""
        if stopped and self.drain is not None:
            message = self.drain.explained(f"stopped by {self.drain.signal} at step {self._generations.last_step}")
            self.conclude(self.drain.code, message, when, out, workers_ended=True)
        else:
            self.conclude(Exit.OK, "", when, out, workers_ended=True)

    def finish_drain(self, message: str, when: Moment, out: Outbox) -> None:
        """Something else has gone wrong while the job stops."""
        self._conclude_drain(message, when, out)

    def _conclude_drain(self, message: str, when: Moment, out: Outbox) -> None:
        drain = self.drain
        code, message = (drain.code, drain.explained(message)) if drain is not None else (Exit.STOPPED, message)
        self.conclude(code, message, when, out)

    # -- how long it takes ---------------------------------------------------------------------------------------------

    def drain_estimate_s(self) -> float | None:
        """How long a step, a snapshot of it, and its flush have taken last; None before all three are known."""
        newest, rate, run = self._snapshots.newest, self._snapshots.rate_bytes_per_s, self._generations.run
        if newest is None or rate is None or run is None or not run.step_s:
            return None
        size_bytes, stall_s = self._snapshots.cost(newest)
        return run.step_s + stall_s + size_bytes / rate

    def _reserve_s(self, drain: Drain) -> float:
        """How long before the end of a drain the workers must have stopped, so that what is held can be made durable."""
        newest, rate = self._snapshots.newest, self._snapshots.rate_bytes_per_s
        if newest is None:
            return 0.0
        wanted = 2 * self._snapshots.cost(newest)[0] / rate if rate is not None else drain.budget_s
        return min(drain.budget_s / 2, RESERVE_S + wanted)

    def _time_for_a_snapshot(self, drain: Drain) -> bool:
        """Whether a snapshot of the next step boundary can be durable in time; what is held already is saved at once where not."""
        newest, rate, run = self._snapshots.newest, self._snapshots.rate_bytes_per_s, self._generations.run
        if newest is None or rate is None or run is None:
            return True
        size_bytes, stall_s = self._snapshots.cost(newest)
        return fits(drain.budget_s, step_s=run.step_s, stall_s=stall_s, size_bytes=size_bytes, rate_bytes_per_s=rate)

    def tick(self, when: Moment, out: Outbox) -> None:
        """Time has passed."""
        drain = self.drain
        if self.finished:
            return
        if self.saving is not None:
            self._hear(self.saving, when, out)
            self._saved(self.saving, when, out)
        elif drain is not None and self._snapshots.behind and when.now >= drain.deadline_t - self._reserve_s(drain):
            self._conclude_drain("the workers did not stop in time; what the agents hold is the state", when, out)
        elif drain is not None and when.now >= drain.deadline_t:
            message = f"the drain took longer than {drain.budget_s:.0f} s; the newest checkpoint is the state"
            self.finish(drain.code, drain.explained(message), when, out)

    # -- saving --------------------------------------------------------------------------------------------------------

    def conclude(self, code: Exit, message: str, when: Moment, out: Outbox, *, workers_ended: bool = False) -> None:
        """End the job, but make durable first what the daemons hold.

        Args:
            workers_ended: all have, by themselves.
        """
        if self._generations.run is None:
            self.finish(code, message, when, out)
            return
        running = self._generations.end()
        deadline_t = self.drain.deadline_t if self.drain is not None else None if code is Exit.OK else when.now + self._job.drain_s
        members = self._membership.members
        self.saving = Saving(code, message, deadline_t, set(members), ask_s=when.attended_s + ASK_S)
        self._generations.launch(when, out)
        for node in members:
            if running and not workers_ended:
                self._generations.stop_workers(node, out)  # and once they are gone it says ready
            elif self._membership.nodes[node].joined and (running or self._membership.nodes[node].ready_port is not None):
                self.sync(node, when, out)

    def sync(self, node: int, when: Moment, out: Outbox) -> None:
        """Ask a node's daemon to settle what its workers have left."""
        if self.saving is not None:
            self.saving.asked[node] = when.attended_s
        out.request(node, Sync(generation=self._generations.generation))

    def synced(self, node: int) -> None:
        """It has."""
        if self.saving is not None:
            self.saving.waiting.discard(node)
            self.saving.asked.pop(node, None)

    def lost(self, node: int) -> None:
        """A node is gone while the job saves; there are no workers to start anew, but what it holds is still needed."""
        if self.saving is not None and self._membership.is_member(node):
            self.saving.waiting.add(node)
            self.saving.asked.pop(node, None)  # its agent is waited for, and asked when it is back

    def progress(self, when: Moment, out: Outbox) -> None:
        """Something has changed that the job may have waited for."""
        if self.saving is not None and not self.finished:
            self._saved(self.saving, when, out)

    def _saved(self, saving: Saving, when: Moment, out: Outbox) -> None:
        """End the job as soon as nothing more can be done for its state."""
        snapshots = self._snapshots
        if snapshots.newest is not None:
            saving.held_step = max(saving.held_step, snapshots.newest.step)
        if not saving.waiting:
            snapshots.save_newest(when.now, out)
            if not snapshots.behind:
                self.finish(*self._saved_all(saving), when, out)
                return
        if not snapshots.troubled:
            saving.troubled_s = None
        elif saving.troubled_s is None:
            saving.troubled_s = when.attended_s
        late = saving.deadline_t is not None and when.now >= saving.deadline_t
        late |= saving.troubled_s is not None and when.attended_s - saving.troubled_s > self._job.drain_s
        if late or snapshots.given_up():
            self.finish(*self._outcome(saving), when, out)

    def _hear(self, saving: Saving, when: Moment, out: Outbox) -> None:
        """See that the daemons are there: what they do may take as long as it takes, but they answer meanwhile.

        All nodes are visited, so it is for ticks: news of one node costs the same however many there are.
        """
        if when.attended_s >= saving.ask_s:
            saving.ask_s = when.attended_s + ASK_S
            for node in self._membership.members:
                if node not in saving.asked and self._snapshots.address(node) is not None:  # else its inventory is still to come
                    self.sync(node, when, out)
        for node, since_s in list(saving.asked.items()):
            silent_s = when.attended_s - since_s
            if silent_s > saving.patience_s(when.now - silent_s):
                self._silent(saving, node, silent_s, when, out)
        overdue = saving.waiting & self._membership.overdue(when.attended_s)
        saving.lost |= overdue
        saving.waiting -= overdue

    def _silent(self, saving: Saving, node: int, silent_s: float, when: Moment, out: Outbox) -> None:
        """A node's daemon has not answered in time."""
        detail = f"the snapshot daemon of node {node} has not answered for {silent_s:.0f} s at the end of the job"
        del saving.asked[node]
        if node in saving.replaced:
            saving.waiting.discard(node)
            saving.hurry(when.now + self._job.drain_s)
            action = f"the job ends without it, at the latest in {self._job.drain_s:.0f} s"
        else:
            saving.replaced.add(node)
            saving.waiting.add(node)
            saving.asked[node] = when.attended_s
            out.send(node, ReplaceDaemon(generation=self._generations.generation))
            action = "another one takes its place, which finds what it held"
        self._snapshots.silent_daemon(node, detail, action, out)

    def _saved_all(self, saving: Saving) -> tuple[Exit, str]:
        """Code and message where all that is left is durable; what nodes held that are gone is not."""
        durable_step = self._snapshots.durable_step
        if not saving.lost or durable_step >= saving.held_step:
            return saving.code, saving.message
        return self._short_of(
            saving,
            f"step {saving.held_step} was lost with what node {listed(saving.lost)} held of it, before it was durable on tier "
            f"{self._job.storage.durable.name}, where step {durable_step} is the newest: the same command goes on from there",
        )

    def _outcome(self, saving: Saving) -> tuple[Exit, str]:
        """Code and message where not all could be saved."""
        snapshots, newest = self._snapshots, self._snapshots.newest
        if newest is None or not snapshots.behind:
            return saving.code, saving.message
        rest = (
            "the other tiers vanish with the job: the next one goes on from there"
            if self._job.tiers_vanish
            else "it is still held by the other tiers: run again on the same nodes to go on"
        )
        return self._short_of(
            saving,
            f"step {newest.step} could not be made durable on tier {self._job.storage.durable.name}, where step "
            f"{snapshots.durable_step} is the newest; {rest}",
        )

    def _short_of(self, saving: Saving, lost: str) -> tuple[Exit, str]:
        message = f"{saving.message}; {lost}" if saving.message else lost
        return Exit.UNUSABLE if saving.code is Exit.OK else saving.code, message

    # -- the last word -------------------------------------------------------------------------------------------------

    def finish(self, code: Exit, message: str, when: Moment, out: Outbox) -> None:
        """End the run now."""
        if self.finished:
            return
        generations = self._generations
        self.finished = True
        generations.end()
        generations.announce(None, None, when, out)
        if self.drain is not None:
            drained = {
                "signal": self.drain.signal,
                "deadline_s": round(self.drain.budget_s, 3),
                "took_s": round(when.now - self.drain.asked_t, 3),
                "step": generations.last_step,
            }
            out.event("drain", drained, generations.generation, when.now)
        clear = tuple(self._snapshots.superseded(ended=code not in (Exit.STOPPED, Exit.UNUSABLE)))
        for node in self._membership.joined():
            known = self._snapshots.address(node) is not None  # else nobody knows what it holds
            out.send(node, ShutdownMessage(generation=generations.generation, clear=clear if known else ()))
        out.event("run_finished", {"exit_code": int(code), "step": generations.last_step}, generations.generation, when.now)
        out.append(Finish(code, message))
