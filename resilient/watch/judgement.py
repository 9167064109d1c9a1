"""How a campaign is, of what was seen of it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from resilient.driver.display import duration
from resilient.exits import Exit, Watched
from resilient.slurm.queue import QueuedJob

PATIENCE_S = 600.0  # without a step, at least
STEPS = 20  # or as long as so many steps usually take
SLOW_START = 3  # times the patience that a job has for its first step, and that one without a driver has

State = Literal["progressing", "waits", "reached", "stalled", "dead", "stopped", "gave up", "unknown"]

CODES: dict[State, int] = {
    "progressing": Exit.OK,
    "waits": Exit.OK,
    "reached": Exit.OK,
    "stopped": Exit.STOPPED,
    "unknown": Exit.UNUSABLE,
    "stalled": Watched.STALLED,
    "gave up": Exit.GAVE_UP,
    "dead": Watched.DEAD,
}
"""States with their exit codes; of several campaigns the last one of these counts that any of them is in."""

OVER: tuple[State, ...] = ("reached", "stopped", "gave up")  # and nothing more is to be expected


@dataclass(frozen=True)
class Seen:
    """What was seen; times in unix seconds.

    Attributes:
        steps_t: when the newest steps were finished, oldest first.
        started_t: of the newest job; None: none has started.
        exit_code: that it ended with; None: it has not said that it ended, or was submitted again since.
        driver: who works on it, in words; None: nobody.
        jobs: of its chain that wait or run; None: it is no chain, or Slurm does not say.
        chain: there is one, and it is not over.
        silent: Slurm was asked and does not say.
    """

    name: str
    now: float
    step: int = 0
    target_step: int | None = None
    loss: float | None = None
    steps_t: Sequence[float] = ()
    started_t: float | None = None
    exit_code: int | None = None
    driver: str | None = None
    jobs: Sequence[QueuedJob] | None = None
    chain: bool = False
    silent: bool = False


@dataclass(frozen=True)
class Judgement:
    """Attributes: text: why, in a sentence."""

    state: State
    text: str

    @property
    def code(self) -> int:
        return CODES[self.state]


def judge(seen: Seen, patience_s: float | None = None) -> Judgement:
    """How it is. Args: patience_s: without a step; None: by what steps usually take."""
    alive = [job for job in seen.jobs or () if job.runs]
    waiting = [job for job in seen.jobs or () if job.waits]
    if seen.driver is not None:
        return _running(seen, patience_s)
    if seen.exit_code == Exit.OK:
        return Judgement("reached", f"the target is reached, {progress(seen)}")
    if seen.exit_code in (Exit.GAVE_UP, Exit.CONFIG):
        return Judgement("gave up", f"ended with status {seen.exit_code}, {progress(seen)}")
    if alive:
        return _without_driver(alive[0], seen, patience_s)
    if waiting and all(job.stuck for job in waiting):
        why = f"job {waiting[0].job_id} cannot begin ({waiting[0].reason}): `resilient submit` lets it"
        return Judgement("dead", f"{why}, {progress(seen)}")
    if waiting:
        why = f" ({waiting[0].reason})" if waiting[0].reason else ""
        return Judgement("waits", f"job {waiting[0].job_id} waits{why}, {progress(seen)}")
    if seen.silent and seen.chain:
        return Judgement("unknown", f"nobody works on it, and Slurm does not say whether a job waits, {progress(seen)}")
    if seen.chain:
        return Judgement("dead", f"no job of its chain runs or waits, {progress(seen)}")
    if seen.exit_code is not None:
        state: State = "stopped" if seen.exit_code == Exit.STOPPED else "dead"
        return Judgement(state, f"ended with status {seen.exit_code}, {progress(seen)}")
    if seen.started_t is None:
        return Judgement("dead", "it has never started")
    return Judgement("dead", f"its driver is gone without a last word, {progress(seen)}")


def _without_driver(job: QueuedJob, seen: Seen, patience_s: float | None) -> Judgement:
    """Of a campaign whose job has its nodes, and that nobody works on: not yet, or not any more."""
    halted = f"job {job.job_id} is suspended ({job.state})"
    if job.start_t is not None:
        last_t = max([job.start_t, *seen.steps_t[-1:]])
        if seen.now - last_t > SLOW_START * (PATIENCE_S if patience_s is None else patience_s):
            why = halted if job.halted else f"job {job.job_id} runs, and nobody works on it"
            since = "since it was started" if last_t == job.start_t else "since its last step"
            return Judgement("stalled", f"{why}: {progress(seen)}, {duration(seen.now - last_t)} {since}")
    return Judgement("waits", f"{halted if job.halted else f'job {job.job_id} starts'}, {progress(seen)}")


def _running(seen: Seen, patience_s: float | None) -> Judgement:
    """Of a campaign that has a driver."""
    last_t = max([*seen.steps_t[-1:], *([seen.started_t] if seen.started_t is not None else [])], default=seen.now)
    first = not seen.steps_t or (seen.started_t is not None and seen.steps_t[-1] < seen.started_t)
    allowed_s = usual_s(seen.steps_t) if patience_s is None else patience_s
    allowed_s *= SLOW_START if first else 1
    silent_s = max(0.0, seen.now - last_t)
    since = "since it was started" if first else "since its last step"
    text = f"{progress(seen)}, {duration(silent_s)} {since}, {seen.driver}"
    if silent_s > allowed_s:
        return Judgement("stalled", f"no step for longer than {duration(allowed_s)}: {text}")
    return Judgement("progressing", text)


def usual_s(steps_t: Sequence[float]) -> float:
    """How long to wait for a step, by the time that the last ones took; pauses between them count little."""
    apart = sorted(later - earlier for earlier, later in pairwise(steps_t))
    return max(PATIENCE_S, STEPS * apart[len(apart) // 2]) if apart else PATIENCE_S


def progress(seen: Seen) -> str:
    """Where it stands."""
    of = f" of {seen.target_step:,}" if seen.target_step is not None else ""
    loss = f", loss {seen.loss:.4f}" if seen.loss is not None else ""
    return f"step {seen.step:,}{of}{loss}"


def worst(judgements: Sequence[Judgement]) -> int:
    """The exit code for all of them together."""
    order = list(CODES)
    return CODES[max((each.state for each in judgements), key=order.index, default="progressing")]
