"""The worker processes of one node in one generation: started warm, watched by heartbeat regions and sentinels, stopped for good.

Owns the processes and their heartbeat regions. It knows nothing of the driver.
"""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

import msgspec

from resilient import clock, worker
from resilient.agent import effort, inspection, lastwords, recorder
from resilient.agent.bootstrap import WorkerSpec
from resilient.agent.effort import OwnTime
from resilient.agent.forkserver import Forked
from resilient.agent.logs import NodeOutput, RankOutput
from resilient.agent.memory import pipe_name, region_name
from resilient.agent.oom import KernelLog, OomWatch
from resilient.agent.standby import Role, Standbys
from resilient.heartbeat.agent_side import AgentRegion
from resilient.heartbeat.layout import NOT_BEATEN, RAISED
from resilient.heartbeat.region import Activity, Record
from resilient.protocol.messages import Heartbeat, Inspection
from resilient.recovery.faults import Raised, WorkerEnd
from resilient.recovery.xids import parse

log = logging.getLogger(__name__)

SILENT_S = 1.0  # once a worker has shown no activity for so long, the states of the processes are reported
RUNS = ("R", "S", "D")  # states of a process that nobody has stopped and that has not ended
RECORDS_S = 1.5  # in which the flight recorders of an inspection are expected: the machine may be busy


@dataclass(eq=False)
class Rank:
    """One worker: its process, its heartbeat region, and what was found there so far."""

    rank: int
    process: Forked
    region: AgentRegion
    output: RankOutput
    own: OwnTime
    records: list[Record] = field(default_factory=list)
    raised: Raised | None = None
    end: WorkerEnd | None = None
    failure: int | None = None  # its exit status, known before the kernel has ended it

    def collect(self, *, last: bool = False) -> None:
        """Move the region's records over here; an exception is kept apart.

        Args:
            last: the worker has ended: with the steps of which it has not told.
        """
        for record in self.region.drain() + (self.region.unreported() if last else []):
            if record.event == RAISED:
                self.raised = _raised(record.fields)
            else:
                self.records.append(record)


class Workers:
    """The ranks of one node in one generation.

    Args:
        node: index of the node, for the reports.
        environs: environment of each local rank; RANK names the global one.
        regions: existing directory in RAM for the heartbeat regions.
        output: reads what the ranks print.
        log_file: where their lines are written.
        config: the resolved config's file.
        entrypoint: see `resilient.entry`.
        standbys: that become these ranks, as far as there are any.

    Attributes:
        roles: of the ranks, which standbys of theirs are warmed up as.
    """

    def __init__(
        self,
        node: int,
        environs: Sequence[Mapping[str, str]],
        *,
        regions: Path,
        output: NodeOutput,
        log_file: Path,
        config: Path,
        entrypoint: str,
        standbys: Standbys,
    ) -> None:
        self._node = node
        self.roles = [Role.of(environ) for environ in environs]
        self._output = output
        self._watched_t = 0.0
        self._underway = False
        self.silent = False  # whether one that runs had shown no activity for a while when heartbeats were read last
        self._oom = OomWatch()
        self._kernel_log = KernelLog(for_processes=False)
        self._xids: list[str] = []  # since this generation began, as the kernel log has them
        self._known_stacks: set[int] = set()  # ranks whose stacks the last inspection found
        self._ranks: list[Rank] = []
        self._ending: list[Rank] = []  # whose processes have ended, and whose ends were not told yet
        for environ in environs:
            number = int(environ["RANK"])
            generation = int(environ[worker.GENERATION_VARIABLE])
            region = AgentRegion(regions / region_name(generation, number))
            printed = output.open(number, regions / pipe_name(generation, number), log_file)
            spec = WorkerSpec(
                environ={**environ, worker.REGION_VARIABLE: str(region.path)},
                output=printed.pipe,
                stacks=_stacks_of(region),
                record=_record_of(region),
                config=config,
                entrypoint=entrypoint,
            )
            process = standbys.start(spec)
            assert process.pid is not None
            self._ranks.append(Rank(number, process, region, printed, OwnTime(process.pid)))

    @property
    def pids(self) -> dict[int, int]:
        """Process id by global rank."""
        return {rank.rank: rank.process.pid or 0 for rank in self._ranks}

    @property
    def underway(self) -> bool:
        """Whether every rank has finished a step; one that has ended does not count."""
        self._underway = self._underway or all(rank.region.activity().beat_t for rank in self._ranks if rank.end is None)
        return self._underway

    def sentinels(self) -> list[int]:
        """File descriptors that become readable when a worker ends that still runs."""
        return [rank.process.sentinel for rank in self._ranks if rank.end is None]

    def remaining(self) -> list[int]:
        """File descriptors that become readable when a worker is gone of which that was not told."""
        return [rank.process.sentinel for rank in self._ranks if rank.end is None or rank.failure is not None]

    def note_ends(self, *, early: bool = False) -> bool:
        """Note the workers that have ended, and kill what they have started; whether all that they have printed was read.

        Args:
            early: with those that have failed, and that the kernel has not ended yet.
        """
        running = [rank for rank in self._ranks if rank.end is None and rank not in self._ending]
        # Asked before the sentinels are: what has gone in between is seen by those.
        failures = {rank.rank: inspection.failure_of(rank.process.pid or 0) for rank in running} if early else {}
        ready = set(wait(self.sentinels(), timeout=0))
        for rank in running:
            if rank.process.sentinel not in ready:
                rank.failure = failures.get(rank.rank)
                if rank.failure is None:
                    continue
            _kill_tree(rank.process.pid, leader=False)
            self._output.end(rank.output)
            self._ending.append(rank)
        # A process that the kernel is ending prints nothing more, and holds its pipe open.
        return all(rank.output.over or (rank.failure is not None and rank.output.drained) for rank in self._ending)

    def reap(self) -> list[WorkerEnd]:
        """The workers whose ends were noted since the last call, their regions read to the end."""
        now = clock.now()
        ending, self._ending = self._ending, []
        return [self._finish(rank, now) for rank in ending]

    def _finish(self, rank: Rank, now: float) -> WorkerEnd:
        exitcode = rank.failure
        if exitcode is None:
            rank.process.join()
            exitcode = rank.process.exitcode if rank.process.exitcode is not None else -signal.SIGKILL
        rank.collect()
        activity = rank.region.activity()
        rank.end = WorkerEnd(
            rank=rank.rank,
            node=self._node,
            pid=rank.process.pid or 0,
            exitcode=exitcode,
            noticed_t=now,
            step=activity.step,
            phase=activity.phase,
            raised=rank.raised,
            log=rank.output.tail() + self._of_gpus() if exitcode != 0 else "",
            crash=inspection.crash_of(_stacks_of(rank.region)) if -exitcode in inspection.CRASHES else "",
            oom=self._oom.ended(rank.process.pid or 0) if exitcode == -signal.SIGKILL else None,
        )
        return rank.end

    def _of_gpus(self) -> str:
        """What the GPUs' driver has said of faults since the generation began, as further lines of a log: evidence of a failure."""
        self._xids += [each.line for each in parse(self._kernel_log.texts())]
        return "".join(f"\n{line}" for line in self._xids)

    def activities(self) -> dict[int, Activity]:
        """What the heartbeat regions say now, by global rank."""
        return {rank.rank: rank.region.activity() for rank in self._ranks}

    def heartbeats(self) -> dict[int, Heartbeat]:
        """When each worker that runs showed activity last, and where it is; by global rank."""
        now = clock.now()
        self._oom.poll(pid for rank in self._ranks if rank.end is None and (pid := rank.process.pid) is not None)
        activities = {rank: rank.region.activity() for rank in self._ranks if rank.end is None}
        active = {rank: max(activity.beat_t, activity.phase_t) for rank, activity in activities.items()}
        silent = {rank: max(0.0, now - max(t, self._watched_t)) if t else 0.0 for rank, t in active.items()}
        self.silent = not all(active.values()) or any(seconds > SILENT_S for seconds in silent.values())
        return {
            rank.rank: Heartbeat(
                step=activity.step,
                phase=activity.phase,
                beat_t=activity.beat_t,
                activity_t=active[rank],
                silent_s=silent[rank],
                state=inspection.state_of(rank.process.pid or 0) if self.silent else "",
                phased=activity.phase_t > 0,
                own_s=effort.own_s(activity, rank.own.seconds()),
                observed=activity.observed,
                first_step=activity.first_step,
                first_beat_t=activity.first_beat_t,
                inferred=activity.inferred,
            )
            for rank, activity in activities.items()
        }

    def watch_from_now(self) -> None:
        """Nobody has watched for a while: silence from before is not to be counted."""
        self._watched_t = clock.now()

    def inspect(self, *, early: bool = False) -> dict[int, Inspection]:
        """What the workers that run are doing, by global rank; takes a moment. Args: early: those, too, without any activity."""
        living = [rank for rank in self._ranks if rank.end is None]
        stopped = [rank for rank in living if inspection.state_of(rank.process.pid or 0) == "T"]
        active = [rank for rank in living if early or max(rank.region.activity().beat_t, rank.region.activity().phase_t)]
        awake = [rank for rank in active if rank not in stopped]
        running = [*awake, *stopped]
        asked_t = time.monotonic()
        for rank in awake:
            recorder.ask(rank.process.pid or 0, _record_of(rank.region))
        found = inspection.inspect({rank.rank: (rank.process.pid or 0, _stacks_of(rank.region)) for rank in running})
        self._known_stacks = {rank for rank, each in found.items() if each.stacks}
        # The one whose record is missing is taken for one that waits in no collective, and nobody can say who has gone astray.
        able = [_record_of(rank.region) for rank in awake if found[rank.rank].state in ("R", "S")]
        recorder.wait_for_standings(able, asked_t + RECORDS_S)
        standings = {rank.rank: recorder.standing_of(_record_of(rank.region)) for rank in awake}
        for rank in awake:
            each = found[rank.rank]
            others = recorder.threads_of(_record_of(rank.region)) if each.stacks else ""  # the main thread comes last
            found[rank.rank] = msgspec.structs.replace(each, stacks=others + each.stacks, standing=standings[rank.rank])
        return found

    def last_words(self, folder: Path) -> None:
        """Have the workers that run say what they can before they are killed; see `resilient.agent.lastwords`. Takes a moment."""
        witnesses = {
            rank.rank: lastwords.Witness(
                rank.process.pid or 0, _record_of(rank.region), None if rank.rank in self._known_stacks else _stacks_of(rank.region)
            )
            for rank in self._ranks
            if rank.end is None
        }
        try:
            lastwords.take(witnesses, folder, self._node, world=self.roles[0].world_size)
        except OSError as error:
            log.warning("the last words of the workers could not be left in %s: %s", folder, error)

    def take_records(self, *, last: bool = False) -> Iterator[tuple[int, Record, AgentRegion]]:
        """The records that came since the last call, with their rank and the region that has them until they are durable.

        Args:
            last: all workers have ended, and this is the last call: with the steps of which they have not told.
        """
        for rank in self._ranks:
            rank.collect(last=last)
            records, rank.records = rank.records, []
            for record in records:
                yield rank.rank, record, rank.region

    def propose(self, reason: str) -> int:
        """Propose to all ranks to hold at their next boundary; returns the furthest one that any of them has checked."""
        return max(rank.region.propose(NOT_BEATEN, reason) for rank in self._ranks)

    def writing(self) -> bool:
        """Whether a rank that runs writes a checkpoint of its script's own, as far as that is seen; the runtime tells its own."""
        running = [rank for rank in self._ranks if rank.end is None and inspection.state_of(rank.process.pid or 0) in RUNS]
        return any(each.inferred and each.phase == "snapshot" for each in (rank.region.activity() for rank in running))

    def arm(self, target: int) -> None:
        for rank in self._ranks:
            rank.region.arm(target)

    def kill(self) -> None:
        """Send SIGKILL to all workers and what they have started; returns at once. They go when all `remaining` are readable."""
        for rank in self._ranks:
            if rank.end is None:
                _kill_tree(rank.process.pid)

    def left_behind(self) -> list[int]:
        """The ranks whose processes have not ended although they were killed: the kernel holds them (state D)."""
        left = [rank for rank in self._ranks if rank.process.exitcode is None]
        for rank in left:
            log.error("rank %d (process %s) does not die; leaving it behind", rank.rank, rank.process.pid)
        return [rank.rank for rank in left]

    @property
    def stuck(self) -> tuple[int, ...]:
        """The process ids of those that were left behind: they keep their GPUs' memory."""
        return tuple(rank.process.pid or 0 for rank in self._ranks if rank.process.exitcode is None)

    def close(self, *, keep_records: bool = False) -> None:
        """Give the heartbeat regions back. The workers have ended, or were left behind.

        Args:
            keep_records: leave the regions' files in RAM: they hold records that are nowhere else, for the node's next agent.
        """
        for rank in self._ranks:
            _stacks_of(rank.region).unlink(missing_ok=True)
            recorder.forget(_record_of(rank.region))
            self._output.end(rank.output)
            rank.region.close(keep_file=keep_records)
            rank.own.close()
            with contextlib.suppress(ValueError):  # still running: it was left behind
                rank.process.close()
        self._ranks, self._ending = [], []
        self._oom.close()
        self._kernel_log.close()


def _raised(fields: Mapping[str, object]) -> Raised:
    """The exception of a worker, as text that can be sent: a message may hold halves of characters."""
    sound = {key: value.encode(errors="replace").decode() if isinstance(value, str) else value for key, value in fields.items()}
    return Raised(**sound)  # type: ignore[arg-type]


def _stacks_of(region: AgentRegion) -> Path:
    return region.path.with_suffix(".stacks")


def _record_of(region: AgentRegion) -> Path:
    return region.path.with_suffix(".record")


def _kill_tree(pid: int | None, *, leader: bool = True) -> None:
    """SIGKILL a worker's process group: its leader, and what it has started."""
    assert pid is not None
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        if leader:  # forked a moment ago, not yet in a group of its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
