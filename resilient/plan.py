"""`resilient plan`: what a config comes to, before a second of compute time is spent on it.

The runtime knows layout, timeouts and exit budget; what a rank holds is asked of the entry point's module: its function
`plan(config)`, where it has one, returns a mapping of titles to mappings of names to values.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from resilient import entry, network, storage, throughput
from resilient.campaign import binding_here
from resilient.config import Config, ConfigError, Layout, Problem, layouts, layouts_by_ranks, spans
from resilient.config.timeouts import STOPPED_S, timeouts
from resilient.control.learning import FACTOR
from resilient.decided import Decision
from resilient.health.quota import quotas, site_places
from resilient.health.report import size
from resilient.recovery.policy import ordinal
from resilient.slurm.allocation import JOB

TCP_RETRIES = Path("/proc/sys/net/ipv4/tcp_retries2")
DEFAULT_TCP_RETRIES = 15  # of Linux


def show(
    config: Config,
    layout: Layout,
    site: Mapping[str, object],
    decisions: Mapping[str, Decision] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Print the plan.

    Args:
        site: what the config has from its site's profile, by key.
        decisions: on what the config leaves to this machine, by key.
        notes: what came out otherwise than the config's file says.

    Raises:
        ConfigError: the entry point's module refuses the config.
    """
    sections: dict[str, Mapping[str, object]] = {"layout": runtime_layout(config, layout)}
    sections["nodes left, and the throughput of what goes on"] = nodes_left(config, layout)
    sections["training"] = training(config, decisions or {}, notes)
    if site:
        sections[f"from the site profile {config.slurm.profile}"] = site
    sections.update(_entry_plan(config, layout))
    sections["tiers"] = tiers(config, layout, checkpoint_size(config))
    sections["storage of the site"] = {name: f"{path}, {_free(path, 0, 0)}" for name, path in site_places(os.environ).items()}
    sections["timeouts, the shortest first"] = ladder(config)
    sections["patience"] = patience(config)
    console = Console(highlight=False)
    for title, rows in ((title, rows) for title, rows in sections.items() if rows):
        table = Table(title=Text(title, style="bold"), title_justify="left", show_header=False, box=None, pad_edge=False)
        for name, value in rows.items():
            table.add_row(Text(f"  {name}"), Text(str(value)))  # not markup
        console.print(table)


def runtime_layout(config: Config, layout: Layout) -> dict[str, object]:
    """Ranks and batches."""
    context = f"cp {layout.cp} × " if layout.cp > 1 else ""
    return {
        "world size": f"{layout.world_size} = tp {layout.tp} × {context}pp {layout.pp} × dp {layout.dp}{_hybrid(layout)}",
        "nodes": f"{layout.nodes} with {layout.procs_per_node} ranks each, {layout.threads_per_proc} threads a rank",
        "binding": f"{binding_here(config, layout, in_job=JOB in os.environ)} (of this machine)",
        "when nodes are lost": _fewer(config, layout),
        **({} if config.is_script else {"global batch": _global_batch(config, layout)}),
        **({"note": note} if (note := throughput.advice(config, layout)) is not None else {}),
        "run directory": config.run_dir,
    }


def _hybrid(layout: Layout) -> str:
    """Who holds the same of the state."""
    if layout.dp_replicate == 1:
        return ""
    where = f"on {layout.copies} nodes" if layout.copies > 1 else "on one node"
    return f" = {layout.dp_shard} that shard the state × {layout.dp_replicate} that hold the same, {where}"


def training(config: Config, decisions: Mapping[str, Decision], notes: Sequence[str]) -> dict[str, object]:
    """How long, in which precision, and whether compiled; of a script, which knows no config, what it is known to have to reach."""
    if config.is_script:
        return {} if config.target_step is None else {"steps": f"{config.target_step:,}"}
    warmup, decay = spans(config)
    schedule = f"{config.optimizer.schedule} over {decay:,} samples" if config.optimizer.schedule != "constant" else "constant"
    return {
        "steps": f"{config.train.steps:,}",
        "precision": config.train.precision + _here(decisions.get("train.precision")),
        "compiled": f"{'yes' if config.train.compile is True else 'no'}{_here(decisions.get('train.compile'))}",
        "learning rate": f"warm-up of {warmup:,} samples, then {schedule}",
        **({"note": "; ".join(notes)} if notes else {}),
    }


def _here(decision: Decision | None) -> str:
    return "" if decision is None else f" here: {decision.why}"


def _global_batch(config: Config, layout: Layout) -> str:
    """Who computes it."""
    size, micro, dp = config.train.global_batch_size, layout.micro_batch_size, layout.dp
    if layout.fuller == dp:
        return f"{size} samples = micro batch {micro} × dp {dp} × {layout.accumulation} accumulated"
    groups = ((layout.fuller, layout.accumulation), (dp - layout.fuller, layout.accumulation - 1))
    shares = " and ".join(_computing(count, share) for count, share in groups)
    return f"{size} samples = {size // micro} micro batches of {micro}: of {dp} replicas, {shares}"


def _computing(count: int, share: int) -> str:
    """How many replicas compute how many micro batches."""
    if not share:
        return f"{count} none"
    what = "one" if share == 1 else str(share)
    return f"1 computes {what}" if count == 1 else f"{count} compute {what} each"


def nodes_left(config: Config, layout: Layout) -> dict[str, object]:
    """How fast the run goes on once nodes are lost and no spare is there; nothing where it does not."""
    if config.is_script:
        return {}
    rows: dict[str, object] = {}
    part = throughput.of_a_device_lost(config, layouts_by_ranks(config, layout))
    if part is not None:
        words = f"dp {part.layout.dp}, {part.layout.world_size} of {layout.world_size} ranks"
        rows[f"{part.nodes:,}, one without a device"] = f"{part.throughput:4.0%}: {words}"
    for left in throughput.of_nodes_left(config, layouts(config, layout)):
        found = left.layout
        idle = f" on {found.nodes} of them" if found.nodes < left.nodes else ""
        hybrid = f" = {found.dp_replicate} × {found.dp_shard}" if layout.dp_replicate > 1 else ""
        words = f"dp {found.dp}{hybrid}{idle}, at most {found.accumulation} micro batch{'es' * (found.accumulation > 1)} a replica"
        rows[f"{left.nodes:,}"] = f"{left.throughput:4.0%} with {left.nodes / layout.nodes:.0%} of the nodes: {words}"
    return rows


def _fewer(config: Config, layout: Layout) -> str:
    """What takes the place of nodes that are gone."""
    spares = config.cluster.spares
    words = [f"{spares} spare{'s' * (spares > 1)} stand{'s' * (spares == 1)} by"] if spares else []
    smaller = sorted(layouts(config, layout), reverse=True)[1:]
    if not smaller:
        words.append("the run waits for them to return")
    else:
        words.append(f"then the run goes on with {_numbers(smaller)} node{'s' * (smaller[0] > 1)}")
    return ", ".join(words)


def _numbers(falling: Sequence[int]) -> str:
    """Numbers in words: what follows without a gap as a range."""
    if len(falling) > 2 and falling[0] - falling[-1] == len(falling) - 1:
        return f"{falling[0]} down to {falling[-1]}"
    return " or ".join(map(str, falling))


def tiers(config: Config, layout: Layout, one: tuple[int, int] | None) -> dict[str, object]:
    """Each tier with its cadence, what it must hold, and what is free there.

    Args:
        one: bytes and files of one checkpoint, where the entry point knows them.
    """
    in_ram = {tier.path: storage.lies_in_ram(tier.path) for tier in config.checkpoint.tiers}
    found = storage.arrange(config, config.cluster.slots, "", in_ram)
    rows: dict[str, object] = {}
    for tier in found.tiers:
        of = "each node" if tier.kind != "durable" else "all nodes"
        words = [_cadence(tier), f"keeps {tier.keep_last}"]
        if tier.kind == "memory" and layout.copies > 1:
            words.append(f"the same on {layout.copies} nodes, so that no other copies are made")
        elif tier.replicas:
            words.append("and as many of a buddy" if layout.nodes > 1 else "no replicas: there is one node")
        if one is not None:
            needed, files = storage.needed(found, tier, layout.nodes, one, layout.copies)
            words.append(f"needs {size(needed)} and {files:,} files of {of}")
            words.append(_free(Path(tier.roots[0]), needed, files))
        rows[f"{tier.name} ({tier.kind})"] = ", ".join(words)
    return {**rows, "a worker that dies costs": storage.cost_of_a_kill(found)}


def _cadence(tier: storage.TierStorage) -> str:
    if tier.every_s is not None:
        return f"every {tier.every_s:g} s"
    if tier.every_cost is not None:
        return f"as often as it takes at most {100 * tier.every_cost:g} % of the time"
    if tier.every_steps == "auto":
        return "at the interval of Young and Daly"
    return "on the way to slower tiers" if tier.every_steps is None else f"every {tier.every_steps} steps"


def _free(path: Path, needed: int, files: int) -> str:
    """What is free where a directory is or will be, and what quotas leave."""
    there = next(each for each in (path, *path.parents) if each.exists())
    free = os.statvfs(there)
    available = free.f_bavail * free.f_frsize
    short = available < needed or (free.f_files and free.f_favail < files)
    inodes = f" and {free.f_favail:,} files" if free.f_files else ""
    words = [f"{size(available)}{inodes} are free here" + (": NOT ENOUGH" if short else "")]
    words += [f"{quota}" + (": NOT ENOUGH" if quota.short(needed, files) else "") for quota in quotas(there)]
    return ", ".join(words)


def checkpoint_size(config: Config) -> tuple[int, int] | None:
    """Bytes and files of one checkpoint, where the entry point's module can tell."""
    hook = getattr(entry.find(entry.parse(config.entrypoint))[0], "checkpoint_size", None)
    return hook(config) if hook is not None else None


def ladder(config: Config) -> dict[str, object]:
    """How long things may take before something is done about them, in the order of time."""
    found = timeouts(config)
    rungs = [
        (STOPPED_S, "stopped process", "is suspected, unless all are"),
        (found.soft_s, "silent rank, soft", f"at the soonest suspected: after {FACTOR:g} times the usual silence of its phase"),
        (found.hard_s, "silent rank, hard", "suspected at the latest, and in phases of which nothing is known yet"),
        (found.link_grace_s, "ranks that wait for a link", "are restarted"),
        (found.collective_s, "collective", "times out in its process group: the watchdog has spoken by then"),
        (found.fence_s, "agent without its driver", "kills its workers"),
        (found.lost_s, "node that is not heard of", "is lost"),
        (found.run_dir_patience_s, "run directory that cannot be written", "is no longer borne: the job drains"),
        *([(found.lost_with_spare_s, "with a spare at hand", "it is lost already")] if config.cluster.spares else []),
        (found.rejoin_s, "node that is gone", "is waited for no longer, where fewer can go on and no spare takes over"),
        *([(found.health_s, "health check of a node", "has failed")] if found.health_s else []),
        *([(found.health_on_gpus_s, "health check, on GPUs", "has failed")] if found.health_on_gpus_s > found.health_s else []),
        (found.drain_s, "drain on SIGTERM, Ctrl-C", "workers are killed, hung or not; what agents hold is saved before"),
    ]
    return {name: f"{seconds:8.1f} s  {what}" for seconds, name, what in sorted(rungs)}


def patience(config: Config) -> dict[str, object]:
    """How much trouble is put up with."""
    resilience = config.resilience
    return {
        "restarts": f"at most {resilience.max_restarts_per_hour} an hour",
        "same failure at the same step": f"gives up the {ordinal(resilience.give_up_after_same_step)} time",
        "missing or unreadable files": f"waited for, up to {resilience.files_patience_s:g} s",
        "link that is down": _links(config),
    }


def _links(config: Config) -> str:
    """How long a link may be down before a transport gives up; a collective's own timeout may come before."""
    environ = {**os.environ, **network.environment(config.network, os.environ, one_machine=True)}
    try:
        retries = int(TCP_RETRIES.read_text())
    except OSError:
        retries = DEFAULT_TCP_RETRIES
    return network.covered(environ, retries)


def _entry_plan(config: Config, layout: Layout) -> Mapping[str, Mapping[str, object]]:
    """What the entry point's module says. Args: layout: on this machine, whose number of ranks the config may have left open."""
    named = entry.parse(config.entrypoint)
    entry.find_modules(named)
    module, problem = entry.find(named)
    if problem is not None:
        raise ConfigError([Problem(key="entrypoint", value=config.entrypoint, message=problem)])
    hook = getattr(module, "plan", None)
    cluster = config.cluster.model_copy(update={"procs_per_node": layout.procs_per_node})
    return hook(config.model_copy(update={"cluster": cluster})) if hook is not None else {}
