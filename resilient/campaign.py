"""What can be known of a campaign before anything is started: the layout on this machine, whether the target is reached."""

import os
import socket
from pathlib import Path

from resilient import network
from resilient.config import Config, Layout, layout
from resilient.exits import EnvironmentUnusable
from resilient.slurm.allocation import JOB, Allocation


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
    if len(found.hosts) < cluster.nodes:
        names = ", ".join(found.hosts)
        raise EnvironmentUnusable(f"the job has {len(found.hosts)} nodes ({names}), and cluster.nodes is {cluster.nodes}")
    return found


def fitted(config: Config, allocation: Allocation | None) -> Config:
    """The config with as many spares as the allocation has left beside the nodes that compute."""
    if allocation is None or len(allocation.hosts) >= config.cluster.slots:
        return config
    left = len(allocation.hosts) - config.cluster.nodes
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"spares": left})})


def machine_layout(config: Config, allocation: Allocation | None = None) -> Layout:
    """The layout with every `auto` settled for this machine, or for the nodes of the job, which are like this one.

    Raises:
        ConfigError: it does not come out even, or the environment has a value for communication that is out of range.
    """
    communication(config, allocation)
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


def gpu_count() -> int:
    """NVIDIA GPUs that this process may use, counted without loading a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() and entry.strip() != "-1"])
    return sum(entry.name.removeprefix("nvidia").isdigit() for entry in Path("/dev").glob("nvidia[0-9]*"))


def already_reached(config: Config) -> int | None:
    """The target step if a good checkpoint of it, or of a later one, is there; else None."""
    from checkpoint import CheckpointError, steps, verify

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
