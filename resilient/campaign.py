"""What can be known of a campaign before anything is started: the layout on this machine, whether the target is reached."""

import os
from pathlib import Path

from resilient import network
from resilient.config import Config, Layout, layout


def machine_layout(config: Config) -> Layout:
    """The layout with every `auto` settled for this machine.

    Raises:
        ConfigError: it does not come out even, or the environment has a value for communication that is out of range.
    """
    network.environment(config.network, os.environ, one_machine=True)
    return layout(config, cpu_count=len(os.sched_getaffinity(0)), gpu_count=gpu_count())


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
