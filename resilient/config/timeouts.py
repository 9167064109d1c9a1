"""The ladder of timeouts: how long things may take before something is done about them, and which must come before which.

Owns their defaults, what is derived from what, and the order. Whoever knows more must speak first: the watchdog has looked at all
ranks when it names one, a collective that times out knows only that somebody did not come.

    a daemon that does not answer at the end of a job < the job ends without it
    a stopped process < a silent rank, at the soonest < at the latest < a collective
                                      a wait for a link < a collective
                                      a wait for a link < an agent without its driver, where both may be the same link

When an agent without its driver kills its workers, and when the driver gives up an agent, have nothing to do with each other: what
a node that is cut off may do is bounded by the number of its generation and by the fence of the durable tier, not by haste. The
first is long, so that training goes on while the driver is away; the second is as short as a network allows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from resilient.config.errors import Problem
from resilient.config.schema import Config

STOPPED_S = 1.0  # a process in state T is suspected
WRITING_S = 10.0  # for ranks to finish a checkpoint of their script's own, before they are killed for the fault of another rank
SILENCE_REPORT_S = 1.5  # agents report how long a worker has been silent at least so often
PING_S = 1.0  # the driver says at least so often that it is there
INSPECTION_S = 20.0  # from a suspicion until ranks are killed, with room: all are inspected, perhaps again while a link is down
FENCE_S = 180.0  # a driver that is stopped for two minutes, or its machine, is back by then
LOST_S = 35.0
FENCE_RAISE_S = 30.0  # the durable tier is closed to older generations: for a commit that is under way
FENCE_HANG_S = 4.0  # the same where there are snapshots to go on from meanwhile
QUARANTINE_S = 60.0  # checkpoints that were rolled back are renamed
ANSWER_S = 10.0  # beyond the limits of these three, for the shell to say so; after that the control core does without an answer
SETTLE_S = 30.0  # a snapshot daemon has dealt with what workers left it at the end of a job; then another takes its place
DRAIN_S = 25.0
HEALTH_S = 30.0
HEALTH_ON_GPUS_S = 120.0  # drivers that no process keeps awake take up to half a minute, and contexts of eight GPUs come one by one
RUN_DIR_PATIENCE_S = 900.0
REJOIN_S = 30.0  # an agent that was killed is back long before
LOST_WITH_SPARE_S = 8.0  # TCP has resent after an outage of 5 s by then
LINK_GRACE_S = 60.0  # TCP and InfiniBand, as most sites set them, have gone on by then or given up


@dataclass(frozen=True)
class Timeouts:
    """Of a config, `auto` settled; seconds.

    Attributes:
        soft_s: a rank is never suspected for a shorter silence.
        hard_s: and always for a longer one, wherever it is.
        link_grace_s: ranks may be silent so long while a link is down or has just come back.
        collective_s: of a process group.
        fence_s: an agent without its driver kills its workers.
        lost_s: the driver calls an agent lost from which nothing has come.
        lost_with_spare_s: the same while a spare stands by, so that little is lost if the node was well. Its workers may live on
            until the fence, but belong to a generation that is over.
        run_dir_patience_s: training goes on while the run directory cannot be written; then the job drains.
        drain_s: of a stop on request; after that workers are killed, hung or not.
        rejoin_s: a lost node is waited for, where no spare is there and fewer nodes can go on.
        health_s: of the check of a node before it takes part; 0: there is none.
        health_on_gpus_s: the same where ranks compute on GPUs, which may be cold.
    """

    soft_s: float
    hard_s: float
    link_grace_s: float
    collective_s: float
    fence_s: float
    lost_s: float
    lost_with_spare_s: float
    drain_s: float
    rejoin_s: float
    health_s: float
    health_on_gpus_s: float
    run_dir_patience_s: float


def timeouts(config: Config) -> Timeouts:
    """What the config comes to."""
    resilience, asked_s = config.resilience, config.network.collective_timeout_s
    grace_s = LINK_GRACE_S if resilience.link_grace_s == "auto" else resilience.link_grace_s
    fence_s = FENCE_S if resilience.fence_s == "auto" else resilience.fence_s
    check = resilience.health_check
    return Timeouts(
        soft_s=resilience.hang_floor_s,
        hard_s=resilience.hang_ceiling_s,
        link_grace_s=grace_s,
        collective_s=_least_collective_s(config, grace_s) if asked_s == "auto" else asked_s,
        fence_s=fence_s,
        lost_s=LOST_S if resilience.lost_s == "auto" else resilience.lost_s,
        lost_with_spare_s=LOST_WITH_SPARE_S if resilience.lost_s == "auto" else resilience.lost_s,
        drain_s=DRAIN_S if resilience.drain_s == "auto" else resilience.drain_s,
        rejoin_s=REJOIN_S if resilience.rejoin_s == "auto" else resilience.rejoin_s,
        health_s=HEALTH_S * check if isinstance(check, bool) else check,
        health_on_gpus_s=HEALTH_ON_GPUS_S * check if isinstance(check, bool) else check,
        run_dir_patience_s=RUN_DIR_PATIENCE_S if resilience.run_dir_patience_s == "auto" else resilience.run_dir_patience_s,
    )


def _least_collective_s(config: Config, grace_s: float) -> float:
    """The watchdog has spoken, and its word has been acted on, before a collective gives up."""
    return max(config.resilience.hang_ceiling_s, grace_s) + INSPECTION_S


def nccl_heartbeat_s(config: Config) -> int:
    """After which torch ends a process whose NCCL watchdog is stuck (480 s by itself): never before a collective times out."""
    asked = config.network.heartbeat_s
    return math.ceil(timeouts(config).collective_s + INSPECTION_S) if asked is None else asked


def out_of_order(config: Config) -> Iterator[Problem]:
    """What stands on the wrong side of something else."""
    resilience, network, found = config.resilience, config.network, timeouts(config)
    if found.soft_s < SILENCE_REPORT_S:
        message = f"must be at least {SILENCE_REPORT_S:g}: agents report no more often how long a rank has been silent"
        yield Problem("resilience.hang_floor_s", found.soft_s, message)
    if found.soft_s > found.hard_s:
        message = f"must be at most resilience.hang_ceiling_s = {found.hard_s:g}"
        yield Problem("resilience.hang_floor_s", found.soft_s, message)
    least_s = _least_collective_s(config, found.link_grace_s)
    if found.collective_s < least_s:
        longer, key = max((found.hard_s, "hang_ceiling_s"), (found.link_grace_s, "link_grace_s"))
        message = (
            f"must be at least {least_s:g}, which is resilience.{key} = {longer:g} and {INSPECTION_S:g} s to inspect all ranks: a "
            "collective that gives up before the watchdog hides who is to blame; allowed: more, or auto"
        )
        yield Problem("network.collective_timeout_s", found.collective_s, message)
    if network.heartbeat_s is not None and network.heartbeat_s < found.collective_s:
        message = (
            f"must be at least network.collective_timeout_s = {found.collective_s:g}: torch would end a process whose NCCL hangs "
            "before the collective says which one it was"
        )
        yield Problem("network.heartbeat_s", network.heartbeat_s, message)
    if found.fence_s < PING_S:
        message = f"must be at least {PING_S:g}: the driver says no more often that it is there"
        yield Problem("resilience.fence_s", found.fence_s, message)
    if found.lost_s <= SILENCE_REPORT_S:
        message = f"must be above {SILENCE_REPORT_S:g}: agents report no more often that they are there"
        yield Problem("resilience.lost_s", found.lost_s, message)
    both_given = "auto" not in (resilience.link_grace_s, resilience.fence_s)
    if both_given and config.cluster.nodes != 1 and found.link_grace_s > found.fence_s:
        message = (
            f"must be at most resilience.fence_s = {found.fence_s:g}: the link that is waited for may carry the driver's word as "
            "well, and an agent that does not hear it for so long kills its workers"
        )
        yield Problem("resilience.link_grace_s", found.link_grace_s, message)
    if network.link_down_s is not None and network.link_down_s > found.link_grace_s:
        message = (
            f"must be at most resilience.link_grace_s = {found.link_grace_s:g}: ranks that NCCL would still let wait for a link "
            "would be restarted"
        )
        yield Problem("network.link_down_s", network.link_down_s, message)
