"""Stops of a job of Slurm: signals, and the end of the job's time, for which Slurm is asked again and again, or a maintenance of
its nodes before that.

Owns what is known of the job's end. Decides nothing: `resilient.slurm.deadline` does. A run outside of Slurm has no use for it.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Protocol

from resilient import clock
from resilient.config import Config
from resilient.control import Coordinator
from resilient.slurm import queue
from resilient.slurm.allocation import Allocation
from resilient.slurm.deadline import JOBS_TIME, KILL_WAIT_S, Known, Stop, called_over, due, lead_s, needed_s, signalled
from resilient.slurm.queue import ALIVE, ENDED, QueuedJob, SlurmSilent

log = logging.getLogger(__name__)

ASK_EVERY_S = 60.0  # limits may be changed while a job runs
ASK_AGAIN_S = 5.0  # until Slurm has answered for the first time, and before a stop that follows from an older answer
POLL_S = 0.5
CALLED_OVER = 2  # answers in a row, after which Slurm is believed that a job is over whose processes run
SIGNAL_PATIENCE_S = 3.0  # for Slurm's answer when a signal has come or the end is near, before the worst is assumed


class Turn(Protocol):
    """Calls a method of the coordinator with news, a time and an outbox, and carries out what is in that afterwards.

    Args:
        at: unix seconds; None: the present time.
    """

    def __call__(self, handler: Callable[..., None], *news: object, at: float | None = None, **more: object) -> None: ...


class Stops:
    """Arguments:

    job_id: this job.
    asked_lead_s: `slurm.signal_lead_s`; None: auto.
    asked_drain_s: `resilience.drain_s`; None: auto.
    drain_s: what it comes to.
    end_t: of the job's time, unix seconds, where the environment tells it.
    turn: tells the coordinator of something, through one of its methods, and does what it wants done.
    note: tells a person.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        job_id: str,
        *,
        asked_lead_s: float | None,
        asked_drain_s: float | None,
        drain_s: float,
        end_t: float | None,
        turn: Turn,
        note: Callable[[str], None],
    ) -> None:
        self._coordinator = coordinator
        self._job_id = job_id
        self._asked_lead_s = asked_lead_s
        self._asked_drain_s = asked_drain_s
        self._drain_s = drain_s
        self._end_t = self._told_t = end_t  # told: to the coordinator
        self._turn = turn
        self._note = note
        self._began_t = time.time()
        self._kill_wait_s: float | None = None
        self._wanted: tuple[float, str] | None = None
        self._answered = False
        self._ends: list[str] = []  # states of a job that is over, as Slurm has told them last; empty: it does not know the job

    @property
    def answered(self) -> bool:
        """Whether Slurm has said when the job's time ends."""
        return self._answered

    @property
    def end_t(self) -> float | None:
        """Of the job's time, as it was told last; None: it has no limit, or it is not known."""
        return self._end_t

    def wanted_back(self, start_t: float | None, name: str = "") -> None:
        """From then on, unix seconds, a maintenance of this name wants the job's nodes; None: no more."""
        self._wanted = None if start_t is None else (start_t, name)
        self._tell()

    async def watch(self) -> None:
        """Stop the run in time before the job's end; never returns."""
        asked_t, heard = 0.0, False
        while True:
            if time.monotonic() - asked_t >= (ASK_EVERY_S if heard else ASK_AGAIN_S):
                asked_t = time.monotonic()
                heard = await self._ask(queue.ASK_S) is not None and not self._ends
            if len(self._ends) >= CALLED_OVER and not self._coordinator.draining:
                kill_wait_s = KILL_WAIT_S if self._kill_wait_s is None else self._kill_wait_s
                self._carry_out(called_over(self._ends[-1], kill_wait_s, time.time()), time.time())
            stop = self._due()
            if stop is not None and not self._coordinator.draining and time.monotonic() - asked_t >= ASK_AGAIN_S:
                asked_t = time.monotonic()  # the limit may have been extended since, or the job was suspended for a while
                await self._ask(SIGNAL_PATIENCE_S)
                stop = self._due()
            if stop is not None and not self._coordinator.draining:
                self._carry_out(stop, time.time())
            await asyncio.sleep(POLL_S)

    def _due(self) -> Stop | None:
        now = time.time()
        return due(self._known(None, now), now)

    async def signalled(self, name: str) -> None:
        """A signal has come, to this process or to an agent: what it means is asked of Slurm, for a moment."""
        # Slurm signals every process of the job: an squeue that has just been started may be among them.
        job = await self._ask(SIGNAL_PATIENCE_S) or await self._ask(SIGNAL_PATIENCE_S)
        now = time.time()
        known = self._known(job, now)
        stop = signalled(name, known, now)
        if stop is not None:
            self._carry_out(stop, now)
        elif known.end_t is not None:
            self._note(f"{name}: {known.end_t - now:.0f} s are left {known.until}, and a stop needs {known.needed_s:.0f} s")

    async def _ask(self, patience_s: float) -> QueuedJob | None:
        try:
            job = await queue.job(self._job_id, timeout_s=patience_s)
            if self._kill_wait_s is None and patience_s >= queue.ASK_S:
                self._kill_wait_s = await queue.kill_wait() or KILL_WAIT_S
        except SlurmSilent as error:
            log.warning("the end of the job's time: %s", error)
            return None
        if (job is None and self._answered) or (job is not None and job.state in ENDED):
            self._ends.append(job.state if job is not None else "")
        else:
            self._ends.clear()
        if job is not None and job.state in ALIVE and not job.preempted:
            self._end_t, self._answered = job.end_t, True
            self._tell()
        return job

    def _tell(self) -> None:
        """The coordinator weighs what is done about faults by the time that is left."""
        end_t, _ = self._ends_by()
        if end_t != self._told_t:
            self._told_t = end_t
            self._turn(self._coordinator.limit_is, None if end_t is None else clock.here(end_t))

    def _ends_by(self) -> tuple[float | None, str]:
        """By when the job is over, and what ends then, for a person: its time, or that until a maintenance wants its nodes."""
        if self._wanted is not None and (self._end_t is None or self._wanted[0] < self._end_t):
            start_t, name = self._wanted
            return start_t, f"until the maintenance {name}"
        return self._end_t, JOBS_TIME

    def _known(self, job: QueuedJob | None, now: float) -> Known:
        time_s = None if self._end_t is None else self._end_t - self._began_t
        lead = lead_s(self._asked_lead_s, drain_s=self._drain_s, time_s=time_s)
        needed = needed_s(self._coordinator.drain_estimate_s(), lead_s=lead, asked=self._asked_lead_s is not None)
        kill_wait_s = KILL_WAIT_S if self._kill_wait_s is None else self._kill_wait_s
        end_t, until = self._ends_by()
        return Known(end_t, job, needed, lead, kill_wait_s, until)

    def _carry_out(self, stop: Stop, now: float) -> None:
        ahead_s = clock.here(now) - now  # Slurm's times are the machine's
        if stop.kind is not None:
            assert stop.until_t is not None
            until_t = stop.until_t if self._asked_drain_s is None else min(stop.until_t, now + self._asked_drain_s)
            if not self._coordinator.draining:  # agents are told as well
                self._note(f"{stop.name.replace('_', ' ')}: {stop.detail}: stopping at the next step")
            self._turn(self._coordinator.run_out, stop.kind, stop.detail, at=now + ahead_s, until_t=until_t + ahead_s)
            return
        if self._coordinator.draining:  # agents were told as well, and Slurm says it more than once
            if stop.until_t is not None:
                self._coordinator.hurry(stop.until_t + ahead_s)
            return
        estimate_s = self._coordinator.drain_estimate_s()
        until_t = now + (self._asked_drain_s or max(self._drain_s, 2 * estimate_s if estimate_s is not None else 0.0))
        until_t = until_t if stop.until_t is None else min(until_t, stop.until_t)
        why = f"{stop.name}: {stop.detail}" if stop.detail else stop.name
        self._note(f"{why}: stopping at the next step, within {max(0.0, until_t - now):.0f} s")
        self._turn(self._coordinator.stop, stop.name, at=now + ahead_s, until_t=until_t + ahead_s)


def stops_of(
    config: Config,
    allocation: Allocation | None,
    coordinator: Coordinator,
    drain_s: float,
    turn: Turn,
    note: Callable[[str], None],
) -> Stops | None:
    """Those of a job of Slurm; None outside of one. Arguments as for `Stops`."""
    if allocation is None:
        return None
    lead, drain = config.slurm.signal_lead_s, config.resilience.drain_s
    end = os.environ.get("SLURM_JOB_END_TIME", "")  # since Slurm 23
    return Stops(
        coordinator,
        allocation.job_id,
        asked_lead_s=None if lead == "auto" else lead,
        asked_drain_s=None if drain == "auto" else drain,
        drain_s=drain_s,
        end_t=float(end) if end.isdigit() else None,
        turn=turn,
        note=note,
    )
