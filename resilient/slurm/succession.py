"""Carries out what `resilient.slurm.chain` decides: looks into the queue, submits, cancels, and records it.

Owns `chain.jsonl` and `chain.lock` of a run directory. One process at a time looks and acts, as far as the file system's locks
reach; beyond that the jobs' common name and `--dependency=singleton` keep two of them from running at once. A submission of which
the answer is lost is found in the queue by the name.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_delay,
    stop_any,
    stop_never,
    wait_random_exponential,
)
from tenacity.stop import stop_base

from checkpoint.locks import flock
from resilient.config import Config, ConfigError
from resilient.exits import EnvironmentUnusable, Exit
from resilient.ledger import JsonLines, read
from resilient.slurm import chain, clusters, queue
from resilient.slurm.badnodes import bad_nodes
from resilient.slurm.chain import Cancel, Chain, Plan, Submit
from resilient.slurm.options import in_script
from resilient.slurm.queue import NoSlurm, QueuedJob, SlurmRefused, SlurmSilent
from resilient.slurm.script import FILE as SCRIPT
from resilient.slurm.script import is_job_of, job_name, script

log = logging.getLogger(__name__)

LOCK = "chain.lock"
PERSON_PATIENCE_S = 60.0
LAST_S = 300.0  # for Slurm to take the next job, where a job has ended; a restart of slurmctld takes less
LAST_PAUSE_S = 10.0
END_PATIENCE_S = 20.0  # a successor that is not cancelled finds the chain over, and ends at once
LOCK_POLL_S = 0.1
LONGEST_PAUSE_S = 60.0  # between two questions to a Slurm that is silent


class Succession:
    """The chain of one run directory.

    Args:
        run_dir: an existing directory.
        name: of the jobs.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        self.run_dir = run_dir
        self.name = name

    @classmethod
    def of(cls, config: Config) -> "Succession":
        """The chain of a campaign's run directory, whose jobs keep the name that they had in the first one. Raises OSError."""
        run_dir = config.run_dir.resolve()
        begun = cls.found(config.run_dir)
        return begun if begun is not None and is_job_of(begun.name, run_dir) else cls(config.run_dir, job_name(config, run_dir))

    @classmethod
    def of_job(cls, config: Config, environ: Mapping[str, str]) -> "Succession | None":
        """The chain that this process's job belongs to; None where the job was submitted in another way."""
        name = environ.get("SLURM_JOB_NAME", "")
        return cls(config.run_dir, name) if is_job_of(name, config.run_dir.resolve()) else None

    @classmethod
    def found(cls, run_dir: Path) -> "Succession | None":
        """The chain that has been begun in a run directory, if there is one."""
        name = chain.name(chain.whole(read(run_dir / chain.FILE)))
        return cls(run_dir, name) if name is not None else None

    @property
    def chain(self) -> Chain:
        return chain.fold(chain.whole(read(self.run_dir / chain.FILE)))

    async def begin(self, script_text: str) -> tuple[str | None, list[QueuedJob]]:
        """Write the batch script and submit the first job, unless the chain has jobs; its id, and the jobs that were there.

        Of these, those that cannot begin without the nodes that they are to avoid may have them.

        Raises:
            EnvironmentUnusable: Slurm does not answer, or refuses; a run directory that was made for it is gone again then.
        """
        submitted: list[str] = []
        found: list[QueuedJob] = []
        made: list[Path] = []
        unanswered: list[SlurmSilent] = []

        async def work() -> None:
            found[:] = await queue.jobs(self.name)
            for job in found:
                if job.stuck:
                    await queue.exclude(job.job_id, in_script(script_text).get("exclude", []))
            before = self.chain
            plan = chain.on_submit(before, found)
            if plan.actions:
                fresh = self.run_dir / f"{SCRIPT}.new"
                fresh.write_text(script_text)
                fresh.replace(self.run_dir / SCRIPT)
                # Before the job can be there: it must not find the chain over.
                self._record("begun", name=self.name, **chain.earlier(before, found))
                try:
                    submitted[:] = await self._carry_out(plan)
                except SlurmRefused as error:
                    if not unanswered:
                        self._record("refused", reason=str(error))
                    raise
                except SlurmSilent as error:
                    unanswered.append(error)
                    raise

        async def look() -> None:
            await queue.jobs(self.name)

        patience = stop_any(stop_after_delay(PERSON_PATIENCE_S), WhenRefused())
        try:
            if not self.run_dir.exists():  # and is not made where there is no Slurm
                await self._retried(look, patience, alone=False)
            logs = self.run_dir / "logs"
            made += [] if self.run_dir.exists() else [path for path in (logs, *logs.parents) if not path.exists()]
            logs.mkdir(parents=True, exist_ok=True)
            await self._retried(work, patience)
        except SlurmSilent as error:
            if made and isinstance(error, SlurmRefused) and not unanswered:
                async with self._alone():
                    self._take_back(made)
            raise EnvironmentUnusable(str(error)) from error
        return (submitted[0] if submitted else None), found

    def _take_back(self, made: Sequence[Path]) -> None:
        """Remove the run directory of a refused submission, unless there is more in it than that has put there.

        Args:
            made: directories that it has made, the deepest first.
        """
        records = chain.whole(read(self.run_dir / chain.FILE))
        strange = {path.name for path in self.run_dir.iterdir()} - {"logs", SCRIPT, chain.FILE, LOCK}
        if strange or any(record["what"] == "submitted" for record in records):
            return  # somebody else has begun a campaign there meanwhile
        with contextlib.suppress(OSError):
            made[0].rmdir()
            for name in (SCRIPT, chain.FILE, LOCK):
                (self.run_dir / name).unlink(missing_ok=True)
            for path in made[1:]:
                path.rmdir()

    def started(self, job_id: str, step: int | None) -> Exit | None:
        """A job of the chain holds the run directory. Returns the code to end with where the chain is over.

        Args:
            step: where the campaign stands, if that is known.
        """
        over = self.chain.over
        if over is None:
            self._record("started", job=job_id, step=step)
        return over

    async def reached(self, job_id: str, step: int) -> None:
        """A job of the chain finds the target reached: the chain is over, and what waits behind it goes."""
        if self.started(job_id, step) is None:
            await self.ended(job_id, Exit.OK)

    async def ensure(self, job_id: str, max_jobs: int, patience_s: float | None = None) -> str:
        """See to it that one job waits behind this one; returns why there is none, or nothing.

        Args:
            patience_s: how long it is asked for at the end of a job, and while nobody stops the chain; None: however long Slurm
                is silent.

        Raises:
            EnvironmentUnusable, OSError: patience is over.
        """
        why: list[str] = []

        async def work() -> None:
            if patience_s is not None and self.chain.over is not None:
                why[:] = ["the chain is over"]  # what waits finds that, too
                return
            plan = chain.on_start(self.chain, job_id, await queue.jobs(self.name), max_jobs)
            await self._carry_out(plan)
            why[:] = [plan.why_none]

        stop = stop_never if patience_s is None else stop_after_delay(patience_s)
        errors = (SlurmSilent, OSError)  # the run directory's file system may be away as well
        try:
            await self._retried(work, stop, errors, longest_s=LONGEST_PAUSE_S if patience_s is None else LAST_PAUSE_S)
        except SlurmSilent as error:
            raise EnvironmentUnusable(str(error)) from error
        return why[0]

    async def ended(self, job_id: str, code: Exit) -> None:
        """A job of the chain ends with this code; what is not needed behind it goes."""
        self._record("ended", job=job_id, exit_code=int(code))

        async def work() -> None:
            if self.chain.over is not None:
                await self._carry_out(chain.on_end(self.chain, job_id, await queue.jobs(self.name)))

        try:
            await self._retried(work, stop_after_delay(END_PATIENCE_S))
        except SlurmSilent as error:
            log.warning("the next job of the chain could not be cancelled, and will end as soon as it starts: %s", error)

    async def avoid_bad_nodes(self) -> None:
        """The job that waits is not to get a node that has become bad since it was submitted, if Slurm can do without it."""

        async def work() -> None:
            hosts = self._bad_hosts()
            waiting = [job.job_id for job in await queue.jobs(self.name) if job.waits] if hosts else []
            for job_id in waiting:
                left_out = [*self._left_out(), *hosts]
                await queue.must_be_startable(self.run_dir / SCRIPT, left_out)
                await queue.exclude(job_id, left_out)

        try:
            await self._retried(work, stop_any(stop_after_delay(PERSON_PATIENCE_S), WhenRefused()))
        except SlurmSilent as error:
            log.warning("the next job may get a node that is to be avoided: %s", error)

    def _bad_hosts(self) -> list[str]:
        return [each.host for each in bad_nodes(self.run_dir)]

    def _left_out(self) -> list[str]:
        """What the job script itself excludes, as it stands there: an option of sbatch takes its place."""
        return self._in_script("exclude")

    def _in_script(self, option: str) -> list[str]:
        """Values that the job script gives for an option."""
        return in_script((self.run_dir / SCRIPT).read_text(errors="replace")).get(option, [])

    async def inspect(self, owner: int | None = None) -> list[QueuedJob] | None:
        """The jobs that wait or run; None if Slurm does not say, or may hide another owner's. Args: owner: None: this user."""
        also_of = None if owner == os.geteuid() else owner
        with contextlib.suppress(SlurmSilent):
            found = await queue.jobs(self.name, also_of)
            return found if found or also_of is None else None
        return None

    async def stop(self) -> list[QueuedJob]:
        """End the chain: what waits is cancelled; returns the jobs that run, which are left to be told.

        Raises:
            EnvironmentUnusable: Slurm does not answer. The chain is over all the same, as soon as its next job starts.
        """
        self._record("stopped")  # first, so that a job that begins or ends now submits nothing
        running: list[QueuedJob] = []

        async def work() -> None:
            found = await queue.jobs(self.name)
            await self._carry_out(Plan(tuple(Cancel(job.job_id) for job in found if job.waits)))
            running[:] = [job for job in found if not job.waits]

        try:
            await self._retried(work, stop_any(stop_after_delay(PERSON_PATIENCE_S), WhenRefused()))
        except SlurmSilent as error:
            raise EnvironmentUnusable(str(error)) from error
        return running

    async def _carry_out(self, plan: Plan) -> list[str]:
        submitted = []
        for action in plan.actions:
            match action:
                case Submit(after):
                    # The script's own are of the first job; an option of sbatch takes their place.
                    dependencies = [*([f"afterany:{after}"] if after is not None else self._in_script("dependency")), "singleton"]
                    submitted.append(await self._submit(dependencies))
                    self._record("submitted", job=submitted[-1], after=after)
                case Cancel(job_id):
                    await queue.cancel(job_id)
                    self._record("cancelled", job=job_id)
        return submitted

    async def _submit(self, dependencies: Sequence[str]) -> str:
        without = self._bad_hosts()
        try:
            return await queue.submit(self.run_dir / SCRIPT, dependencies, [*self._left_out(), *without] if without else ())
        except SlurmRefused as error:
            if not without:
                raise
            log.warning("no job is to be had without %s: %s", ", ".join(without), error)
            return await queue.submit(self.run_dir / SCRIPT, dependencies)

    def _record(self, what: str, **fields: object) -> None:
        lines = JsonLines(self.run_dir / chain.FILE)
        try:
            lines.append({"t": time.time(), "what": what, **fields})
        finally:
            lines.close()

    async def _retried(
        self,
        work: Callable[[], Awaitable[None]],
        stop: stop_base,
        errors: tuple[type[Exception], ...] = (SlurmSilent,),
        *,
        alone: bool = True,
        longest_s: float = LONGEST_PAUSE_S,
    ) -> None:
        """Args: alone: nobody else of the chain acts meanwhile; the run directory must be there."""
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(errors),
            wait=wait_random_exponential(multiplier=1, max=longest_s),
            stop=stop,
            before_sleep=_log_retry,
            reraise=True,
        ):
            with attempt:
                async with self._alone() if alone else contextlib.nullcontext():
                    await work()

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        fd = os.open(self.run_dir / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            while True:
                try:
                    flock(fd, self.run_dir / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(LOCK_POLL_S)
            yield
        finally:
            os.close(fd)


def _log_retry(state: RetryCallState) -> None:
    """That Slurm is asked again, and what it said."""
    error = state.outcome.exception() if state.outcome is not None else None
    log.warning("%s; asked again in %.1f s", error, state.upcoming_sleep)


class WhenRefused(stop_base):
    """A person can do something about a refusal; the driver waits until somebody has."""

    def __call__(self, retry_state: RetryCallState) -> bool:
        return retry_state.outcome is not None and isinstance(retry_state.outcome.exception(), SlurmRefused)


async def _must_be_of_this_cluster(script_text: str) -> None:
    """Raises ConfigError, EnvironmentUnusable."""
    asked = clusters.wanted(script_text, os.environ)
    if asked is None:
        return
    try:
        problem = clusters.elsewhere(asked, await queue.cluster())
    except SlurmSilent as error:
        raise EnvironmentUnusable(str(error)) from error
    if problem is not None:
        raise ConfigError([problem])


def submit(config: Config, arguments: Sequence[str], *, dry_run: bool) -> str:
    """What `resilient submit` does, and what it tells.

    Args:
        arguments: of `resilient run`.

    Raises:
        EnvironmentUnusable: Slurm does not answer, or refuses, or the run directory cannot be written.
        ConfigError: as `script`, or the job would be of another cluster than this machine.
    """
    run_dir = config.run_dir.resolve()
    try:
        chained = Succession.of(config)
        text = script(config, run_dir, arguments=arguments, python=sys.executable, directory=Path.cwd(), name=chained.name)
        if dry_run:
            return text.rstrip()
        asyncio.run(_must_be_of_this_cluster(text))
        job_id, there = asyncio.run(chained.begin(text))
    except EnvironmentUnusable as error:
        if not isinstance(error.__cause__, NoSlurm):
            raise
        here = f"run the campaign here without it: resilient run {shlex.join(arguments)}"
        raise EnvironmentUnusable(f"{error}; submit on a machine that has Slurm, such as a login node, or {here}") from error
    except OSError as error:
        raise EnvironmentUnusable(f"cannot write {error.filename}: {error.strerror}") from error
    if job_id is None:
        jobs = ", ".join(f"{job.job_id} ({'held' if job.held else job.state.lower()})" for job in there)
        held = [job.job_id for job in there if job.held]
        release = f"; `scontrol release {','.join(held)}` lets it begin" if held else ""
        stuck = [job.job_id for job in there if job.stuck]
        again = f"; Slurm tries job {', '.join(stuck)} again" if stuck else ""
        return f"{config.name} is in the queue already: {jobs}; nothing was submitted{release}{again}"
    running = [job.job_id for job in there if job.runs]
    behind = f", which begins once job {', '.join(running)} has ended" if running else ""
    return f"{config.name} is submitted as job {job_id}{behind}; `resilient status {config.run_dir}` says how it is doing"
