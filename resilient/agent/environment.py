"""The environment of a rank: torchrun's variables, and ours. Pure but for the environment that it adds to."""

import json
import os
from pathlib import Path

from resilient import visible_gpus
from resilient.agent.groups import AGENT_VARIABLE, PREFIX_VARIABLE
from resilient.agent.settings import AgentSettings
from resilient.network import dump_files
from resilient.placement.applied import variables_of
from resilient.protocol.messages import Start
from resilient.worker import (
    COLLECTIVE_TIMEOUT_VARIABLE,
    GENERATION_VARIABLE,
    GUARD_VARIABLE,
    RUN_DIR_VARIABLE,
    SESSION_VARIABLE,
)


def environment_of(
    start: Start,
    local_rank: int,
    settings: AgentSettings,
    *,
    session: Path,
    interface: str | None,
    store_prefix: str,
    log_dir: Path,
) -> dict[str, str]:
    """What a rank of a generation gets on top of what the agent has.

    Args:
        session: see `checkpoint.tiers.session`.
        interface: the network interface that has the node's address, where one has.
        store_prefix: of the keys of process groups that find each other by the environment.
    """
    procs, device = len(start.devices), start.devices[local_rank]
    place = settings.binding.ranks[device] if settings.binding.bound else None
    rank, world = start.first_rank + local_rank, start.world_size
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(procs),
        "GROUP_RANK": str(start.node_rank),
        "GROUP_WORLD_SIZE": str(start.nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "ROLE_NAME": "worker",
        "MASTER_ADDR": start.master_addr,
        "MASTER_PORT": str(start.master_port),
        "TORCHELASTIC_RUN_ID": settings.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(start.generation - 1),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        AGENT_VARIABLE: "True",
        GENERATION_VARIABLE: str(start.generation),
        RUN_DIR_VARIABLE: str(settings.run_dir),
        SESSION_VARIABLE: str(session),
        PREFIX_VARIABLE: store_prefix,
        **({"GLOO_SOCKET_IFNAME": interface} if interface and "GLOO_SOCKET_IFNAME" not in os.environ else {}),
        GUARD_VARIABLE: json.dumps({"go_back_to": start.go_back_to, "skip": start.skip, "saved_step": start.saved_step}),
        COLLECTIVE_TIMEOUT_VARIABLE: str(start.collective_timeout_s),
        **variables_of(place),
        **_without_the_dead(start, settings),
        **dump_files(os.environ, log_dir),
    }


def _without_the_dead(start: Start, settings: AgentSettings) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of ranks where devices of the node are left out."""
    names = visible_gpus.without(start.devices, settings.procs) if settings.device == "cuda" else None
    return {} if names is None else {visible_gpus.VARIABLE: names}


def token_of(text: str) -> tuple[str, int]:
    """Token and incarnation from an agent's environment: `token.incarnation`. Raises ValueError."""
    token, _, incarnation = text.rpartition(".")
    return token, int(incarnation)
