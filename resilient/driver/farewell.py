"""What `resilient run` says of a campaign before its first generation and after its last: of a script, what was seen of it."""

import asyncio
import logging
import math
from collections.abc import Sequence
from pathlib import Path

from checkpoint.asking import answers
from resilient import storage
from resilient.config import Config, Layout
from resilient.driver.display import harmless
from resilient.exits import Exit
from resilient.past import record as past
from resilient.past.fold import Past
from resilient.slurm.chain import GOES_ON
from resilient.slurm.queue import QueuedJob
from resilient.slurm.succession import Succession

log = logging.getLogger(__name__)

LOOK_S = 5.0  # for the run directory, whose past is not needed for an end
ASK_S = 3.0  # at the very end of a job, whose time may be nearly over


def greeting(config: Config, layout: Layout) -> str:
    """Who runs what, where."""
    ranks = f"{layout.world_size} rank{'s' * (layout.world_size > 1)} on {layout.nodes} node{'s' * (layout.nodes > 1)}"
    if config.is_script:
        return f"{config.name}: {harmless(config.entrypoint)}: {ranks}, in {config.run_dir}"
    hybrid = f" = {layout.dp_replicate} × {layout.dp_shard}" if layout.dp_replicate > 1 else ""
    axes = f"tp {layout.tp}, pp {layout.pp}, dp {layout.dp}{hybrid}"
    return f"{config.name}: {ranks} ({axes}), {config.train.steps} steps, in {config.run_dir}"


def cost_of_a_kill(config: Config) -> str:
    """What a worker that dies will cost."""
    in_ram = {tier.path: storage.lies_in_ram(tier.path) for tier in config.checkpoint.tiers}
    return storage.cost_of_a_kill(storage.arrange(config, config.cluster.slots, "", in_ram))


def looked_back(run_dir: Path) -> Past | None:
    """What has become of a campaign; None where its run directory does not say so in time."""
    found = answers(past.read, [run_dir], LOOK_S).get(run_dir)
    if isinstance(found, Past):
        return found
    log.warning("%s cannot be read: %s", run_dir, f"no answer within {LOOK_S:g} s" if found is None else found.strerror)
    return None


def farewell(config: Config, seen: Past | None) -> str:
    """That it is done. Args: seen: see `looked_back`."""
    if not config.is_script:
        doubts = " and ".join(doubts_of(seen)) if seen is not None else ""
        but = f", but {doubts}" if doubts else ""
        return f"{config.name} is done: {config.train.steps} steps{but}; results are in {config.run_dir}"
    steps = f" after optimizer step {seen.ended_step}" if seen is not None and seen.ended_step else ""
    saved = last_saved(seen)
    return f"{config.name} is done: all ranks ended well{steps}; {f'{saved}; ' if saved else ''}logs are in {config.run_dir}"


def sequel(code: Exit, waiting: Sequence[QueuedJob] | None) -> str | None:
    """Who goes on from here, if anybody is to or might be expected to.

    Args:
        waiting: jobs that wait behind this one; None where it is of no chain, or Slurm does not say.
    """
    if waiting is None:
        return "The same command goes on from here." if code is Exit.STOPPED else None
    if code not in GOES_ON:
        return None if waiting else "No job waits behind this one."
    if not waiting:
        return "No job waits behind this one: `resilient submit` goes on from here."
    job = waiting[0]
    if job.held:
        return f"Job {job.job_id} is held: it goes on from here after `scontrol release {job.job_id}`."
    if job.stuck:
        return f"Job {job.job_id} cannot begin ({job.reason}): `resilient submit` lets it, and it goes on from here."
    return f"Job {job.job_id} goes on from here."


def waiting_behind(chained: Succession | None) -> list[QueuedJob] | None:
    """Jobs that wait behind the one that this process runs in; None where it is of no chain, or Slurm does not say."""
    if chained is None:
        return None
    try:
        found = asyncio.run(asyncio.wait_for(chained.inspect(), ASK_S))
    except TimeoutError:
        return None
    return [job for job in found if job.waits] if found is not None else None


def doubts_of(found: Past) -> list[str]:
    """What speaks against the weights of a campaign that has taken all of its steps."""
    told = []
    if found.skipped_last:
        batches = "the last batch was" if found.skipped_last == 1 else f"the last {found.skipped_last} batches were"
        told.append(f"{batches} bad and skipped")
    if found.validation_loss is not None and not math.isfinite(found.validation_loss):
        told.append("the last validation loss is not finite")
    return told


def last_saved(seen: Past | None) -> str | None:
    """The newest checkpoint that the script has written by itself; None where none was seen. Args: seen: see `looked_back`."""
    last = seen.saved if seen is not None else None
    if last is None:
        return None
    return f"the newest checkpoint that the script wrote is {last.path}, after step {last.step}, by rank {last.rank}"
