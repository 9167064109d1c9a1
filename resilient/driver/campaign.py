"""One job of a campaign in its run directory: what is done before the driver's event loop runs, and after it.

Here alone the driver's process itself touches the run directory: before the first agent is started there is nothing to be held up.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from checkpoint import descriptors, fence
from checkpoint.errors import CheckpointError, inodes_told_apart
from checkpoint.naming import steps
from resilient import access, storage
from resilient.config import Config, ConfigError, Layout, load, place, write
from resilient.config.timeouts import timeouts
from resilient.control import Coordinator
from resilient.driver import spill_file
from resilient.driver.agents import listening_addresses
from resilient.driver.display import Display
from resilient.driver.driver import Driver
from resilient.driver.ending import Ending
from resilient.driver.job import job_of
from resilient.driver.launch import AgentAhead
from resilient.driver.lease import RunLease
from resilient.driver.spill_file import SpillFile
from resilient.exits import EnvironmentUnusable, Exit, ForeseenError
from resilient.identity.resume import Resumption
from resilient.past.fold import Past
from resilient.past.record import Reader
from resilient.protocol.disk import DiskSettings, ScalarSettings
from resilient.slurm.allocation import Allocation, own_job
from resilient.slurm.chain import standing
from resilient.slurm.succession import LAST_S, Succession

log = logging.getLogger(__name__)

TAKE_IN_S = 60.0  # for what an earlier driver has spilled


def run_campaign(
    config: Config,
    layout: Layout,
    display: Display,
    explain: Callable[[ConfigError], str] = str,
    allocation: Allocation | None = None,
    ahead: AgentAhead | None = None,
    resumption: Resumption | None = None,
) -> Ending:
    """Run one job of the campaign in its run directory, which is made if need be; arguments as for `Driver`.

    Args:
        resumption: what has changed since the campaign began, to be recorded.

    Raises:
        EnvironmentUnusable: the run directory cannot be written, another run uses it, no container can be started, or nothing is
            where the ledger says that a checkpoint is.
        ConfigError: the durable tier has another path than before, and nothing is there; this host has no `slurm.interface`.
    """
    descriptors.raise_limit()
    durable = config.checkpoint.tiers[-1].path
    with _must_be_writable(config.run_dir):
        (config.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        access.close_to_others(config.run_dir, config.run_dir_mode, (durable, durable / storage.IDENTITY))
        past = Reader(config.run_dir)
        before = past.read()  # before the lease, which has to be renewed: where nothing was kept it takes its time
        lease = RunLease(config.run_dir)
    started = False
    hangup = signal.getsignal(signal.SIGHUP)
    try:
        with _must_be_writable(config.run_dir):
            kept = _storage(config, _committed(before, resumption), allocation)
            storage.write(config.run_dir, kept)
            memory = Path(kept.memory.roots[0]).parents[1]
            for spilled in spill_file.directories_of(config.run_dir, kept.identity, memory):
                _take_in(config.run_dir, spilled)
            known = past.read()
            with contextlib.suppress(OSError):
                past.keep()
            succession = Succession.of_job(config, os.environ) if allocation is not None else None
            if succession is not None and allocation is not None:
                reached = standing(steps(durable), known.metrics_step)
                over = succession.started(allocation.job_id, reached)
                if over is not None:
                    return Ending(over, f"the chain of {config.run_dir} is over; `resilient submit` begins it again")
            if resumption is not None:
                resumption.keep(config.run_dir)
            write(config, config.run_dir / "config.yaml")  # last: an earlier version's has no other identity than this
            changes = resumption.reported() if resumption is not None else ()
            in_job, chained = allocation is not None, succession is not None
            job = job_of(config, layout, kept, known, tiers_vanish=in_job, chained=chained, changes=changes)
            coordinator = Coordinator(job, last_generation=max(known.generation, _fenced_below(durable)))
        driver = Driver(
            config,
            layout,
            coordinator,
            display,
            explain,
            identity=kept.identity,
            nonce=storage.nonce_of(vars(kept)),
            allocation=allocation,
            chain=succession.name if succession is not None else None,
            settings=_settings(config, lease),
            spill=SpillFile(spill_file.new_directory(config.run_dir, kept.identity, memory)),
            drain_s=timeouts(config).drain_s,
            ahead=ahead,
        )
        started = True
        return asyncio.run(driver.run())
    finally:
        signal.signal(signal.SIGHUP, hangup)  # the event loop has set it to what ends the process
        if started:
            lease.leave()  # the disk process gives it up, or somebody else has it, or the file system does not let anybody
        else:
            lease.close()


def _storage(config: Config, committed: int | None, allocation: Allocation | None) -> storage.Storage:
    """The campaign's storage; raises as `storage_of` and `listening_addresses`."""
    access.must_be_files(config.checkpoint.tiers[-1].path, (storage.IDENTITY, fence.FENCE, fence.LOCK))
    found = storage.storage_of(config, config.cluster.slots, committed)
    listening_addresses(config, allocation)
    return found


def follow(chained: Succession, file: Path, settings: Sequence[str], code: Exit) -> None:
    """See to it that this job of a chain, whose environment is unusable, is followed by another one, and record its end.

    It may have lost too many nodes while it started, its node may have no durable tier or no network, or another driver may work in
    the run directory. As that may last, it counts as a job that makes no progress.

    Args:
        file, settings: the config and what overrides it; where they cannot be read, `slurm.max_jobs` has its default.
    """
    job_id = own_job(os.environ)
    try:
        max_jobs = load(file, settings).slurm.max_jobs
    except (ForeseenError, OSError):
        max_jobs = Config().slurm.max_jobs
    try:
        if chained.chain.jobs[-1:] != (job_id,):
            known = Reader(chained.run_dir).read()
            chained.started(job_id, standing(known.committed.steps, known.metrics_step) or 0)
        if chained.chain.over is None:
            asyncio.run(_followed(chained, job_id, max_jobs, code))
    except (EnvironmentUnusable, OSError) as error:
        log.warning("no job of the chain follows this one, for Slurm has not taken any: %s", error)


async def _followed(succession: Succession, job_id: str, max_jobs: int, code: Exit) -> None:
    await succession.ensure(job_id, max_jobs, LAST_S)
    await succession.ended(job_id, code)


def end_chain_at_target(config: Config, allocation: Allocation, step: int) -> None:
    """The target is reached already: if this is the job of a chain, that is over. A chain whose end cannot be recorded has said no
    less than before."""
    chained = Succession.of_job(config, os.environ)
    if chained is None:
        return
    try:
        if chained.chain.begun_t is not None:
            asyncio.run(chained.reached(allocation.job_id, step))
    except OSError as error:
        log.warning("the chain's end is not recorded: %s", error)


def end_chain(file: Path, settings: Sequence[str], run_dir: Path | None) -> Succession | None:
    """A config is at fault: if this is the job of a chain, that is over. It is recorded, and no job is to wait behind this one.

    Returns the chain, if it was ended.

    Args:
        file, settings: the config, of which nothing but the run directory has to be right, and what overrides it.
        run_dir: by the batch script of a chain, for a config of which not even that can be read.
    """
    try:
        chained = _chain_of(file, settings, run_dir)
        if chained is None:
            return None
        asyncio.run(chained.ended(own_job(os.environ), Exit.CONFIG))
        return chained
    except (ForeseenError, OSError) as error:
        log.debug("the chain's end is not recorded: %s", error)
        return None


def chain_of_job(file: Path, settings: Sequence[str], run_dir: Path | None) -> Succession | None:
    """The chain that this process's job belongs to, also where the config is wrong. Arguments as for `end_chain`."""
    try:
        return _chain_of(file, settings, run_dir)
    except (ForeseenError, OSError) as error:
        log.debug("whether this is the job of a chain is not known: %s", error)
        return None


def _chain_of(file: Path, settings: Sequence[str], run_dir: Path | None) -> Succession | None:
    """The chain that was begun in a run directory and has this process's job, of whose tasks this is the first.

    Arguments as for `end_chain`. Raises ForeseenError, OSError.
    """
    try:
        config = place(file, settings)
    except ConfigError:
        if run_dir is None:
            raise
        mode: access.Mode = "private"
    else:
        run_dir, mode = config.run_dir, config.run_dir_mode
    access.must_be_ours(None, run_dir, mode)
    begun = Succession.found(run_dir)
    if begun is None or begun.name != os.environ.get("SLURM_JOB_NAME"):
        return None
    return begun if Allocation.of(os.environ, socket.gethostname()).task == 0 else None


def _committed(past: Past, resumption: Resumption | None) -> int | None:
    """The newest step that is durable by what the run directory tells; a fork begins with one."""
    lineage = resumption.fingerprint.lineage if resumption is not None else None
    return max(past.committed.steps, default=lineage.step if lineage is not None else None)


def _fenced_below(durable: Path) -> int:
    """The generation that the durable tier's fence names.

    The ledger may not tell of it yet: its lines lie in a spill file of another host, or its driver died while it started.
    """
    try:
        return fence.newest_generation(durable) or 0
    except CheckpointError as error:
        raise EnvironmentUnusable(str(error)) from error


@contextlib.contextmanager
def _must_be_writable(run_dir: Path) -> Iterator[None]:
    try:
        with inodes_told_apart():
            yield
    except OSError as error:
        place = Path(error.filename or run_dir)
        why = f"it is a symbolic link to {place.readlink()}, which is not there" if _leads_nowhere(place) else error.strerror
        raise EnvironmentUnusable(f"cannot write {place}: {why}") from error


def _leads_nowhere(path: Path) -> bool:
    """Whether it is a symbolic link to what is not there, as to a file system that is not mounted."""
    return path.is_symlink() and not path.exists()


def _settings(config: Config, lease: RunLease) -> DiskSettings:
    switches = config.logging
    return DiskSettings(
        run_dir=str(config.run_dir),
        token=lease.owner.token,
        lock_fd=lease.lock_fd,
        scalars=ScalarSettings(queue_size=switches.tensorboard_queue_size, interval=switches.log_interval)
        if switches.tensorboard
        else None,
    )


def _take_in(run_dir: Path, spilled: Path) -> None:
    """Have what an earlier driver of this machine has spilled in the run directory, before the ledger is read.

    Raises:
        OSError: it cannot be written there.
        EnvironmentUnusable: the run directory does not answer.
    """
    outcome: list[int | OSError] = []

    def work() -> None:
        try:
            outcome.append(spill_file.take_in(run_dir, spilled))
        except OSError as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="take-in", daemon=True)
    thread.start()
    thread.join(TAKE_IN_S)
    if not outcome:
        raise EnvironmentUnusable(f"{run_dir} has not answered for {TAKE_IN_S:.0f} s; records of an earlier run wait in {spilled}")
    if isinstance(outcome[0], OSError):
        raise outcome[0]
    if outcome[0]:
        log.warning("%d records of an earlier run, which could not be written then, were taken in from %s", outcome[0], spilled)
