"""The worker processes of one node in one generation: started warm, watched by their pages and sentinels, stopped for good.

Owns the processes and their pages. It knows nothing of the driver.
"""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path

from resilient import clock, worker
from resilient.agent import lastwords, looks, recorder
from resilient.agent.bootstrap import WorkerSpec
from resilient.agent.effort import OwnTime
from resilient.agent.forkserver import Forked
from resilient.agent.logs import NodeOutput, RankOutput
from resilient.agent.memory import page_name, pipe_name
from resilient.agent.oom import OomWatch
from resilient.agent.standby import Standbys
from resilient.faults import Raised, WorkerEnd
from resilient.page import RAISED, AgentPage, Pulse, Record

log = logging.getLogger(__name__)

# A killed process that is not gone after so long sits in the kernel (state D); it is left behind rather than waited for.
REAP_S = 10.0
SILENT_S = 1.0  # once a worker has given no sign for so long, the states of the processes are told
LAST_WORDS_S = 0.4  # for the output of the workers that have ended to be read, and as long again for it to be written


@dataclass(eq=False)
class Rank:
    """One worker: its process, its page, and what was found on the page so far."""

    rank: int
    process: Forked
    page: AgentPage
    output: RankOutput
    own: OwnTime
    records: list[Record] = field(default_factory=list)
    raised: Raised | None = None
    end: WorkerEnd | None = None

    def collect(self) -> None:
        """Move the page's records over here; an exception is kept apart."""
        for record in self.page.drain():
            if record.event == RAISED:
                self.raised = Raised(**record.fields)  # type: ignore[arg-type]
            else:
                self.records.append(record)


@dataclass(frozen=True)
class Sign:
    """The last sign of a worker.

    Attributes:
        beat_t: when it finished a step, unix seconds.
        mark: changes with every sign.
        silent_s: how long ago it was; 0 if there never was one.
        state: of its process, once a worker of the node has been silent for a while.
        phased: whether it ever told a phase.
        own_s: what it has spent without waiting for others, since it began, and for its samples; None where that is not known.
    """

    step: int
    phase: str
    beat_t: float
    mark: float
    silent_s: float
    state: str
    phased: bool
    own_s: float | None = None


class Workers:
    """The ranks of one node in one generation.

    Args:
        node: index of the node, for the reports.
        environs: environment of each local rank; RANK names the global one.
        pages: existing directory in RAM for the pages.
        output: reads what the ranks print.
        log_file: where their lines are written.
        config: the resolved config's file.
        entrypoint: see `resilient.entry`.
        standbys: that become these ranks, as far as there are any.
    """

    def __init__(
        self,
        node: int,
        environs: Sequence[Mapping[str, str]],
        *,
        pages: Path,
        output: NodeOutput,
        log_file: Path,
        config: Path,
        entrypoint: str,
        standbys: Standbys,
    ) -> None:
        self._node = node
        self._world = int(environs[0]["WORLD_SIZE"])
        self._watched_t = 0.0
        self._underway = False
        self._output = output
        self._oom = OomWatch()
        self._told_stacks: set[int] = set()  # by the last look
        self._ranks: list[Rank] = []
        for environ in environs:
            number = int(environ["RANK"])
            generation = int(environ[worker.GENERATION_VARIABLE])
            page = AgentPage(pages / page_name(generation, number))
            printed = output.open(number, pages / pipe_name(generation, number), log_file)
            spec = WorkerSpec(
                environ={**environ, worker.PAGE_VARIABLE: str(page.path)},
                output=printed.pipe,
                stacks=_stacks_of(page),
                record=_record_of(page),
                config=config,
                entrypoint=entrypoint,
            )
            process = standbys.start(spec)
            assert process.pid is not None
            self._ranks.append(Rank(number, process, page, printed, OwnTime(process.pid)))

    @property
    def pids(self) -> dict[int, int]:
        """Process id by global rank."""
        return {rank.rank: rank.process.pid or 0 for rank in self._ranks}

    @property
    def underway(self) -> bool:
        """Whether every rank has finished a step; one that has ended does not count."""
        self._underway = self._underway or all(rank.page.pulse().beat_t for rank in self._ranks if rank.end is None)
        return self._underway

    def sentinels(self) -> list[int]:
        """File descriptors that become readable when a worker that still runs ends."""
        return [rank.process.sentinel for rank in self._ranks if rank.end is None]

    def reap(self) -> list[WorkerEnd]:
        """The workers that have ended since the last call, their pages read to the end."""
        now = clock.now()
        ready = set(wait(self.sentinels(), timeout=0))
        ended = [rank for rank in self._ranks if rank.end is None and rank.process.sentinel in ready]
        deadline = time.monotonic() + LAST_WORDS_S
        found = [self._finish(rank, now, deadline) for rank in ended]
        if any(end.failed for end in found):
            self._output.flush(LAST_WORDS_S)
        return found

    def _finish(self, rank: Rank, now: float, deadline: float) -> WorkerEnd:
        rank.process.join()
        _kill_tree(rank.process.pid, leader=False)
        self._output.end(rank.output)
        rank.collect()
        pulse = rank.page.pulse()
        rank.end = WorkerEnd(
            rank=rank.rank,
            node=self._node,
            pid=rank.process.pid or 0,
            exitcode=rank.process.exitcode if rank.process.exitcode is not None else -signal.SIGKILL,
            noticed_t=now,
            step=pulse.step,
            phase=pulse.phase,
            raised=rank.raised,
            log=rank.output.last_words(max(0.0, deadline - time.monotonic())) if rank.process.exitcode != 0 else "",
            oom=self._oom.ended(rank.process.pid or 0) if rank.process.exitcode == -signal.SIGKILL else None,
        )
        return rank.end

    def pulses(self) -> dict[int, Pulse]:
        """What the pages say now, by global rank."""
        return {rank.rank: rank.page.pulse() for rank in self._ranks}

    def signs(self) -> dict[int, Sign]:
        """When each worker that runs gave its last sign, and where; by global rank."""
        now = clock.now()
        self._oom.poll(pid for rank in self._ranks if rank.end is None and (pid := rank.process.pid) is not None)
        pulses = {rank: rank.page.pulse() for rank in self._ranks if rank.end is None}
        marks = {rank: max(pulse.beat_t, pulse.phase_t) for rank, pulse in pulses.items()}
        silent = {rank: max(0.0, now - max(mark, self._watched_t)) if mark else 0.0 for rank, mark in marks.items()}
        worth_it = any(seconds > SILENT_S for seconds in silent.values())
        return {
            rank.rank: Sign(
                step=pulse.step,
                phase=pulse.phase,
                beat_t=pulse.beat_t,
                mark=marks[rank],
                silent_s=silent[rank],
                state=looks.state_of(rank.process.pid or 0) if worth_it else "",
                phased=pulse.phase_t > 0,
                own_s=own_s + pulse.data_s if (own_s := rank.own.seconds()) is not None else None,
            )
            for rank, pulse in pulses.items()
        }

    def watch_from_now(self) -> None:
        """Nobody has watched for a while: silence from before is not to be counted."""
        self._watched_t = clock.now()

    def look(self) -> dict[int, looks.Look]:
        """What the workers that run are doing, by global rank; takes a moment."""
        running = [rank for rank in self._ranks if rank.end is None and max(rank.page.pulse().beat_t, rank.page.pulse().phase_t)]
        awake = [rank for rank in running if looks.state_of(rank.process.pid or 0) != "T"]
        for rank in awake:
            recorder.ask(rank.process.pid or 0, _record_of(rank.page))
        found = looks.look({rank.rank: (rank.process.pid or 0, _stacks_of(rank.page)) for rank in running})
        self._told_stacks = {rank for rank, each in found.items() if each.stacks}
        standings = {rank.rank: recorder.standing_of(_record_of(rank.page)) for rank in awake}
        return {rank: replace(each, standing=standings.get(rank)) for rank, each in found.items()}

    def last_words(self, folder: Path) -> None:
        """Have the workers that run say what they can before they are killed; see `resilient.agent.lastwords`. Takes a moment."""
        witnesses = {
            rank.rank: lastwords.Witness(
                rank.process.pid or 0, _record_of(rank.page), None if rank.rank in self._told_stacks else _stacks_of(rank.page)
            )
            for rank in self._ranks
            if rank.end is None
        }
        try:
            lastwords.take(witnesses, folder, self._node, world=self._world)
        except OSError as error:
            log.warning("the last words of the workers could not be left in %s: %s", folder, error)

    def take_records(self) -> Iterator[tuple[int, Record, AgentPage]]:
        """The records that came since the last call, with their rank and the page to tell once they are kept."""
        for rank in self._ranks:
            rank.collect()
            records, rank.records = rank.records, []
            for record in records:
                yield rank.rank, record, rank.page

    def propose(self, target: int, reason: str) -> int:
        """Propose a stop to all ranks; returns the furthest boundary that any of them has checked."""
        return max(rank.page.propose(target, reason) for rank in self._ranks)

    def arm(self, target: int) -> None:
        for rank in self._ranks:
            rank.page.arm(target)

    def kill(self) -> bool:
        """End all workers and what they have started, now; returns when they are gone: False if one does not go."""
        alive = [rank for rank in self._ranks if rank.end is None]
        for rank in alive:
            _kill_tree(rank.process.pid)
        deadline = time.monotonic() + REAP_S
        for rank in alive:
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if rank.process.exitcode is None:
                log.error("rank %d (process %s) does not die; leaving it behind", rank.rank, rank.process.pid)
            self._output.end(rank.output)
            rank.collect()
        return all(rank.process.exitcode is not None for rank in alive)

    def close(self) -> None:
        """Kill what still runs and give the pages back."""
        self.kill()
        for rank in self._ranks:
            _stacks_of(rank.page).unlink(missing_ok=True)
            recorder.forget(_record_of(rank.page))
            rank.page.close()
            rank.own.close()
            with contextlib.suppress(ValueError):  # still running: see kill
                rank.process.close()
        self._ranks = []
        self._oom.close()


def _stacks_of(page: AgentPage) -> Path:
    return page.path.with_suffix(".stacks")


def _record_of(page: AgentPage) -> Path:
    return page.path.with_suffix(".record")


def _kill_tree(pid: int | None, *, leader: bool = True) -> None:
    """SIGKILL a worker's process group: its leader, and what it has started."""
    assert pid is not None
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        if leader:  # forked a moment ago, not yet in a group of its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
