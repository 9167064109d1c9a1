"""Which GPUs a process may use, and which of them each agent of one machine gets. No driver is loaded for it."""

import os
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from resilient.config.errors import ConfigError, Problem

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The NVIDIA GPUs that a process may use, as CUDA_VISIBLE_DEVICES names them: by number, UUID or MIG instance.

    Args:
        devices: the directory of device files, which count where the variable is not set.
    """
    chosen = environ.get(VARIABLE)
    if chosen is None:
        count = sum(entry.name.removeprefix("nvidia").isdigit() for entry in devices.glob("nvidia[0-9]*"))
        return tuple(map(str, range(count)))
    return tuple(takewhile(lambda name: name not in ("", "-1"), (entry.strip() for entry in chosen.split(","))))


def without(devices: Sequence[int], procs: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of ranks that compute on these devices of a node's `procs`; None where none is left out.

    A rank's number is then that among the others.
    """
    if tuple(devices) == tuple(range(procs)):
        return None
    names = visible()
    return ",".join(names[device] for device in devices if device < len(names))


def slices(names: Sequence[str], agents: int, procs: int) -> tuple[str, ...]:
    """CUDA_VISIBLE_DEVICES of each agent of one machine, spares included; empty where one agent has them all.

    Args:
        names: of the GPUs.
        procs: ranks of each agent, each of which needs a GPU of its own: NCCL refuses two ranks on one.

    Raises:
        ConfigError: there are too few.
    """
    if agents * procs > len(names):
        message = (
            f"{agents} agents on this machine (cluster.nodes and cluster.spares) × {procs} ranks need {agents * procs} GPUs, "
            f"and {len(names)} can be seen; allowed: fewer, or cluster.device: cpu"
        )
        raise ConfigError([Problem("cluster.procs_per_node", procs, message)])
    if agents == 1:
        return ()
    share = len(names) // agents
    return tuple(",".join(names[agent * share : (agent + 1) * share]) for agent in range(agents))
