"""All that has state in the control core, put together. Each owns its own; no other changes it but through its methods."""

from dataclasses import dataclass

from resilient.control.ends import WorkerEnds
from resilient.control.evacuation import Evacuation
from resilient.control.evidence import Inquiries
from resilient.control.first_step import FirstStep
from resilient.control.generations import Generations
from resilient.control.incidents import Incidents
from resilient.control.inspection import Inspector
from resilient.control.job import JobSpec
from resilient.control.links import Links
from resilient.control.liveness import Watchdog
from resilient.control.membership import Membership
from resilient.control.presence import Presence
from resilient.control.roll_back import RollBacks
from resilient.control.run_dir import RunDir
from resilient.control.shutdown import Shutdown
from resilient.control.stragglers import Stragglers
from resilient.snapshots import Snapshots


@dataclass(frozen=True)
class Core:
    """One job's. `stragglers`: None where they are not detected."""

    job: JobSpec
    membership: Membership
    presence: Presence
    inquiries: Inquiries
    links: Links
    snapshots: Snapshots
    incidents: Incidents
    roll_backs: RollBacks
    generations: Generations
    ends: WorkerEnds
    watchdog: Watchdog
    inspector: Inspector
    first_step: FirstStep
    stragglers: Stragglers | None
    run_dir: RunDir
    shutdown: Shutdown
    evacuation: Evacuation


def core_of(job: JobSpec, last_generation: int) -> Core:
    """That of a job that is about to begin."""
    membership = Membership(job.shares, job.spares, job.rejoin_s, job.stage_nodes)
    snapshots, incidents = Snapshots(job.storage), Incidents()
    roll_backs = RollBacks(snapshots, job.skip)
    generations = Generations(job, membership, snapshots, incidents, roll_backs, last_generation)
    shutdown = Shutdown(job, membership, snapshots, generations)

    def node_rank_of(rank: int) -> int:
        return membership.assignment.node_rank_of(rank)

    return Core(
        job=job,
        membership=membership,
        presence=Presence(),
        inquiries=Inquiries(),
        links=Links(),
        snapshots=snapshots,
        incidents=incidents,
        roll_backs=roll_backs,
        generations=generations,
        ends=WorkerEnds(job.files),
        watchdog=Watchdog(job.hang),
        inspector=Inspector(node_rank_of),
        first_step=FirstStep(node_rank_of),
        stragglers=Stragglers(job.stragglers) if job.stragglers is not None else None,
        run_dir=RunDir(),
        shutdown=shutdown,
        evacuation=Evacuation(job, membership, snapshots, incidents, generations, shutdown),
    )
