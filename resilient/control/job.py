"""What the control core must know of the campaign."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from resilient.control.learning import Limits
from resilient.control.shares import Rules
from resilient.control.stragglers import Rules as StragglerRules
from resilient.recovery.policy import Budget
from resilient.recovery.rollback import Stretch
from resilient.recovery.without_spare import Choice, Measured
from resilient.snapshots import StoragePlan


@dataclass(frozen=True)
class JobSpec:
    """One job of a campaign.

    Attributes:
        layouts: by number of ranks, those that a generation may be of; the largest is what is asked for. Each is tp, cp, pp, dp and
            `longer`: replicas, the first ones, that have a micro batch more to compute than the others.
        procs_per_node: ranks of a node whose devices all work.
        min_procs_per_node: with so many a node still takes part, without the devices that do not work; None: with all or none.
        min_nodes: that take part.
        spares: nodes that stand by.
        rejoin_s: how long a node that is gone is waited for, where no spare is there and fewer nodes would do.
        drain_s: for a stop on request, until workers are killed.
        silence_s: a node that has not been heard of for so long is lost.
        silence_with_spare_s: the same while a spare stands by.
        hang: between which bounds the watchdog's timeouts are.
        link_grace_s: how long ranks may wait for each other while a link is down, or has just come back.
        collective_timeout_s: of process groups: longer than the watchdog bears.
        stragglers: None: they are not detected.
        skip: steps that earlier jobs found to be bad whatever the weights.
        tiers_vanish: what is on the nodes is gone with the job: only the durable tier is there for the next one.
        run_dir_patience_s: for so long training goes on while the run directory cannot be written.
        script: the entry point is a script, which may say nothing of what it does.
        saved_step: after which it wrote its newest checkpoint by itself, in earlier jobs.
        stage_nodes: nodes that shard the state of a pipeline stage among them, which are to lie below one switch.
        places: in the fabric by host, where a file tells; else agents do.
        files: how the paths of the run's own data begin.
        changes: of the config since the job before, as `config_changed` tells them.
        without_spare: what becomes of a node that is gone, where fewer could go on.
        rates: of training by number of ranks, as shares of the full one; where it is not said, that of the ranks.
        measured: in earlier jobs; `queues_s` only in a chain.
        start_t, end_t: of the job's time, as it was when the job began, unix seconds; None: it has no limit, or it is not known.
    """

    layouts: Mapping[int, Mapping[str, int]]
    spares: int
    rejoin_s: float
    procs_per_node: int
    storage: StoragePlan
    budget: Budget
    drain_s: float
    silence_s: float
    silence_with_spare_s: float
    hang: Limits
    link_grace_s: float
    collective_timeout_s: float
    stragglers: StragglerRules | None = None
    replace_stragglers: bool = False
    skip: tuple[Stretch, ...] = ()
    tiers_vanish: bool = False
    run_dir_patience_s: float = 900.0
    script: bool = False
    saved_step: int | None = None
    stage_nodes: int = 1
    places: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    changes: tuple[Mapping[str, object], ...] = ()
    without_spare: Choice | Literal["auto"] = "shrink"
    rates: Mapping[int, float] = field(default_factory=dict)
    measured: Measured = field(default_factory=Measured)
    start_t: float | None = None
    end_t: float | None = None
    min_procs_per_node: int | None = None
    min_nodes: int = 1

    def rate(self, ranks: int) -> float:
        """Of training with so many ranks, as a share of the full one."""
        return min(1.0, self.rates.get(ranks, ranks / max(self.layouts)))

    @property
    def shares(self) -> Rules:
        """How many ranks nodes may have."""
        procs, tp = self.procs_per_node, max(layout.get("tp", 1) for layout in self.layouts.values())
        least = min(self.min_procs_per_node or procs, procs)
        return Rules(procs, least, tp if procs % tp == 0 else procs, tuple(sorted(self.layouts)), self.min_nodes)
