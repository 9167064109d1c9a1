"""What can be known of a campaign before anything is started: the layout on this machine, whether the target is reached."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path

from checkpoint import tls
from resilient import network, visible_gpus
from resilient.config import Config, ConfigError, Layout, Problem, layout, with_fewer_replicas, with_shards
from resilient.exits import EnvironmentUnusable
from resilient.placement.applied import of_this_node
from resilient.placement.binding import Binding, Share
from resilient.placement.fabric import addresses_in
from resilient.slurm import queue
from resilient.slurm.allocation import JOB, Allocation
from resilient.slurm.hosts import expand
from resilient.slurm.queue import SlurmSilent

ASK_S = 3.0  # for the nodes that a job still has


def allocation_of(config: Config) -> Allocation | None:
    """The allocation of Slurm to run in, if the config asks for it or there is one.

    Raises:
        EnvironmentUnusable: there is none, or it has too few nodes.
    """
    cluster = config.cluster
    if cluster.launcher == "local" or (cluster.launcher == "auto" and JOB not in os.environ):
        return None
    if JOB not in os.environ:
        raise EnvironmentUnusable(
            "cluster.launcher is slurm, but this is no job of Slurm; use sbatch or salloc, or launcher: local"
        )
    found = Allocation.of(os.environ, socket.gethostname())
    if found.task > 0:
        return found  # the first one asks Slurm
    found = _as_it_is_now(found)
    least = cluster.min_nodes if found.gone or cluster.nodes == "auto" else cluster.nodes
    if len(found.hosts) < least:
        wanted = f"{'cluster.min_nodes' if least == cluster.min_nodes else 'cluster.nodes'} is {least}"
        gone = f"; it has lost {', '.join(found.gone)}" if found.gone else ""
        raise EnvironmentUnusable(f"the job has {len(found.hosts)} nodes ({', '.join(found.hosts)}), and {wanted}{gone}")
    return found


def _as_it_is_now(allocation: Allocation) -> Allocation:
    """Without the nodes that the job has lost, or given back, since it began; the environment does not tell."""
    with contextlib.suppress(SlurmSilent):
        left = asyncio.run(queue.nodes(allocation.job_id, timeout_s=ASK_S))
        if allocation.hosts[0] in left:  # else this is not about the job in which this process runs
            return allocation.within(left)
    return allocation


def fitted(config: Config, allocation: Allocation | None) -> Config:
    """The config with as many nodes as there are: fewer spares than asked for if need be, and where the job has lost nodes, as many
    as still make a layout."""
    cluster = config.cluster
    if allocation is None:
        return _with_nodes(config, 1, cluster.spares) if cluster.nodes == "auto" else config
    there = len(allocation.hosts)
    nodes = max(there - cluster.spares, cluster.min_nodes) if cluster.nodes == "auto" else cluster.nodes
    if allocation.gone and cluster.nodes != "auto":
        with contextlib.suppress(ConfigError):  # of all nodes; those that are left shard the state as these did
            config = with_shards(config, machine_layout(config, allocation))
    for fewer in range(min(there, nodes), cluster.min_nodes - 1, -1) if allocation.gone else ():
        smaller = _with_nodes(config, fewer, min(cluster.spares, there - fewer))
        with contextlib.suppress(ConfigError):
            machine_layout(smaller, allocation)
            return smaller
    return _with_nodes(config, nodes, min(cluster.spares, there - nodes))


def _with_nodes(config: Config, nodes: int, spares: int) -> Config:
    cluster = config.cluster
    domains = cluster.domains[: nodes + spares] if cluster.domains is not None else None
    update = {"nodes": nodes, "spares": spares, "domains": domains, "min_nodes": min(cluster.min_nodes, nodes)}
    fewer = cluster.nodes != "auto" and nodes < cluster.nodes
    return (with_fewer_replicas(config) if fewer else config).model_copy(update={"cluster": cluster.model_copy(update=update)})


def machine_layout(config: Config, allocation: Allocation | None = None) -> Layout:
    """The layout with every `auto` settled for this machine, or for the nodes of the job, which are like this one.

    Raises:
        ConfigError: it does not come out even, the environment has a value for communication that is out of range,
            `cluster.fabric` is no file of switches, or this Python has no TLS with pre-shared keys and the config asks for it.
    """
    if config.cluster.tls == "psk" and (why := tls.why_not()) is not None:
        raise ConfigError([Problem("cluster.tls", "psk", f"{why}; allowed: off")])
    communication(config, allocation)
    places_in(config.cluster.fabric)
    cpus = len(os.sched_getaffinity(0)) if allocation is None else min(allocation.cpus)
    return layout(config, cpu_count=cpus, gpu_count=gpu_count(), apart=allocation is not None)


def communication(config: Config, allocation: Allocation | None) -> dict[str, str]:
    """The variables that agents get on top of this process's own: those of the site, and those for communication.

    Raises:
        ConfigError: one is out of range.
    """
    if allocation is None:
        return network.environment(config.network, os.environ, one_machine=True)
    site = config.slurm.environment
    found = {**site, **network.environment(config.network, {**os.environ, **site}, one_machine=False)}
    if config.slurm.interface is not None:
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            if name not in os.environ:
                found.setdefault(name, config.slurm.interface)
    return found


def places_in(path: Path | None) -> dict[str, str]:
    """Addresses of hosts in the fabric, from a file of switches; none without one. Raises ConfigError."""
    if path is None:
        return {}
    try:
        return addresses_in(path.read_text(encoding="utf-8", errors="replace"), expand)
    except (OSError, ValueError) as error:
        raise ConfigError([Problem("cluster.fabric", str(path), f"cannot be read as a file of switches: {error}")]) from None


def gpu_count() -> int:
    """NVIDIA GPUs that this process may use, counted without loading a driver."""
    return len(visible_gpus.visible())


def shares_of_gpus(config: Config, layout: Layout) -> tuple[str, ...]:
    """CUDA_VISIBLE_DEVICES of each agent of this machine; empty where they need none, or one has all. Raises ConfigError."""
    names = visible_gpus.visible()
    if not names or config.cluster.device == "cpu":
        return ()
    return visible_gpus.slices(names, layout.nodes + config.cluster.spares, layout.procs_per_node)


def binding_here(config: Config, layout: Layout, *, in_job: bool) -> Binding:
    """Where ranks of one node run, if that is this machine."""
    device = "cuda" if gpu_count() > 0 and config.cluster.device != "cpu" else "cpu"
    agents = 1 if in_job else config.cluster.slots
    return of_this_node(config.cluster.binding, device, Share(0, layout.procs_per_node, agents * layout.procs_per_node))


def doubt_of_durable(config: Config) -> Problem | None:
    """Why checkpoints cannot be written where the durable tier is to be, as seen from this machine; nothing is left there.

    One below the run directory is not looked at: whoever submits a campaign writes there.
    """
    from resilient.health import disk

    last = len(config.checkpoint.tiers) - 1
    tier = config.checkpoint.tiers[last]
    if tier.path.is_relative_to(config.run_dir):
        return None
    found = disk.inspect(disk.TierSpec(tier.name, tier.path, measured=False))
    if not found.trouble:
        return None
    why = f"cannot write {found.place} on this machine: {found.trouble}; a job ends with 69 if its nodes cannot either"
    return Problem(f"checkpoint.tiers.{last}.path", tier.path, why)


def already_reached(config: Config) -> int | None:
    """The target step if a good checkpoint of it, or of a later one, is there; else None."""
    from checkpoint import CheckpointError, steps, verify

    if config.target_step is None:
        return None
    root = config.checkpoint.tiers[-1].path
    for step in reversed(steps(root) if root.is_dir() else []):
        if step < config.train.steps:
            return None
        try:
            verify(root / f"step-{step:08}")
        except CheckpointError:
            continue
        return step
    return None
