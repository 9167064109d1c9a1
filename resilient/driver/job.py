"""What the config comes to for the control core: its `Job`, with what earlier jobs have found out."""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

from checkpoint.naming import steps
from resilient import entry, storage
from resilient.campaign import places_in
from resilient.config import Config, Layout, layouts_by_ranks
from resilient.config.timeouts import timeouts
from resilient.control import JobSpec
from resilient.control.learning import Limits
from resilient.control.stragglers import Rules
from resilient.past.fold import Past
from resilient.recovery.policy import Budget
from resilient.recovery.rollback import InvalidationRule
from resilient.snapshots import StoragePlan, TierPlan
from resilient.version import commit


def job_of(
    config: Config,
    layout: Layout,
    kept: storage.Storage,
    past: Past,
    *,
    tiers_vanish: bool,
    chained: bool = False,
    changes: tuple[Mapping[str, object], ...] = (),
) -> JobSpec:
    """The job, with what earlier jobs found out. Raises OSError: the durable tier cannot be read.

    Args:
        past: of the campaign.
        chained: another job of a chain follows this one.
    """
    limits, told = timeouts(config), past.measuring.measured
    return JobSpec(
        layouts={ranks: _axes(each) for ranks, each in layouts_by_ranks(config, layout).items()},
        spares=config.cluster.spares,
        rejoin_s=limits.rejoin_s,
        procs_per_node=layout.procs_per_node,
        storage=storage_plan(kept, config.checkpoint.tiers[-1].path, tuple(past.invalidated)),
        budget=budget(config),
        drain_s=limits.drain_s,
        silence_s=limits.lost_s,
        silence_with_spare_s=limits.lost_with_spare_s,
        link_grace_s=limits.link_grace_s,
        hang=Limits(limits.soft_s, limits.hard_s),
        collective_timeout_s=limits.collective_s,
        stragglers=straggler_rules(config),
        replace_stragglers=config.resilience.straggler == "replace",
        skip=tuple(past.skip),
        tiers_vanish=tiers_vanish,
        run_dir_patience_s=limits.run_dir_patience_s,
        script=config.is_script,
        saved_step=past.saved.step if past.saved is not None else None,
        stage_nodes=max(1, layout.nodes // (layout.pp * layout.dp_replicate)),
        places=places_in(config.cluster.fabric),
        files=own_files(config),
        changes=changes,
        without_spare=config.resilience.without_spare,
        rates={} if config.is_script else _rates(config, layout),
        measured=told if chained else replace(told, queues_s=()),
        start_t=_time("SLURM_JOB_START_TIME"),
        end_t=_time("SLURM_JOB_END_TIME"),
        min_procs_per_node=config.cluster.min_procs_per_node,
        min_nodes=config.cluster.min_nodes,
    )


def _rates(config: Config, layout: Layout) -> dict[int, float]:
    """Training by number of ranks, as shares of the full one: the micro batches of a step follow each other on each replica."""
    count = config.train.global_batch_size // config.train.micro_batch_size

    def longest(each: Layout) -> int:
        return math.ceil(count / each.dp)

    return {ranks: longest(layout) / longest(each) for ranks, each in layouts_by_ranks(config, layout).items()}


def _time(name: str) -> float | None:
    """Unix seconds, as Slurm tells them from version 23 on."""
    value = os.environ.get(name, "")
    return float(value) if value.isdigit() else None


def description(config: Config, layout: Layout) -> dict[str, object]:
    """What the ledger says of a job when it starts."""
    return {
        "name": config.name,
        "run_dir": str(config.run_dir),
        "pid": os.getpid(),
        "version": version("resilient"),
        "commit": commit(),
        "target_step": config.target_step,
        "layout": asdict(layout),
    }


def budget(config: Config) -> Budget:
    """How much trouble the config puts up with."""
    resilience = config.resilience
    return Budget(
        resilience.max_restarts_per_hour,
        resilience.give_up_after_same_step,
        resilience.backoff_s,
        resilience.max_roll_backs,
        resilience.files_patience_s,
    )


def own_files(config: Config) -> tuple[str, ...]:
    """How the paths of the run's own data begin: those that the config names, and words for the entry point that are paths."""
    data, entry_point = config.data, entry.parse(config.entrypoint)
    texts = data.text if isinstance(data.text, list) else []
    weighted = data.path if isinstance(data.path, list) else []
    of_data = [data.path] if isinstance(data.path, Path) else [each.path for each in weighted]
    tokenizer = [data.tokenizer.vocab_file, data.tokenizer.merges_file]
    named = [*texts, *of_data, *tokenizer, config.run_dir, entry_point.script]
    words = [word.rpartition("=")[2] for word in [*entry_point.args, *_words(config.args)]]
    given = [Path(word) for word in words if os.sep in word or (word and Path(word).exists())]
    paths = [path for path in [*named, *given] if path is not None]
    return tuple(sorted({text for path in paths for text in (str(path), str(path.absolute())) if text not in (".", os.sep)}))


def _words(values: object) -> Iterator[str]:
    """All texts in what a config gives to its entry point."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _words(value)
    elif isinstance(values, list):
        for value in values:
            yield from _words(value)


def storage_plan(kept: storage.Storage, durable: Path, invalidated: tuple[InvalidationRule, ...] = ()) -> StoragePlan:
    """What the snapshot core must know of the tiers."""

    def plan(tier: storage.TierStorage) -> TierPlan:
        return TierPlan(tier.name, tier.keep_last, tier.replicas)

    first, *middle, last = kept.tiers
    found = steps(durable)
    return StoragePlan(
        memory=plan(first),
        others=tuple(map(plan, middle)),
        durable=plan(last),
        buffers=kept.buffers,
        domains=kept.domains,
        durable_step=max(found, default=0),
        durable_steps=tuple(found),
        invalidated=invalidated,
    )


def straggler_rules(config: Config) -> Rules | None:
    """What makes a straggler; None where they are not detected."""
    resilience = config.resilience
    if resilience.straggler == "off":
        return None
    return Rules(resilience.straggler_factor, resilience.straggler_steps)


def _axes(layout: Layout) -> dict[str, int]:
    hybrid = {"dp_replicate": layout.dp_replicate} if layout.dp_replicate > 1 else {}
    return {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp, **hybrid, "longer": layout.longer}
