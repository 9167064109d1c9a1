"""What a prediction needs of elsewhere: the work that the entry point's module counts, and the cores of this machine."""

import os
from collections.abc import Sequence

from resilient import entry
from resilient.campaign import gpu_count
from resilient.config import Config, Layout
from resilient.slurm.allocation import JOB
from resilient.steptime.work import RankWork


def asked(config: Config, layout: Layout) -> Sequence[RankWork]:
    """By pipeline rank, of the hook `rank_work`; empty where the module has none. Raises ConfigError as that does.

    Args:
        layout: on this machine, whose number of ranks the config may have left open.
    """
    named = entry.parse(config.entrypoint)
    entry.find_modules(named)
    module, problem = entry.find(named)
    hook = getattr(module, "rank_work", None) if problem is None else None
    cluster = config.cluster.model_copy(update={"procs_per_node": layout.procs_per_node})
    return hook(config.model_copy(update={"cluster": cluster})) if hook is not None else ()


def crowding(config: Config, layout: Layout) -> float:
    """Threads that want to compute, for each core of this machine; 1 where ranks compute on GPUs."""
    if config.cluster.device == "cuda" or (config.cluster.device == "auto" and gpu_count()):
        return 1.0
    nodes = 1 if JOB in os.environ else layout.nodes
    return nodes * layout.procs_per_node * layout.threads_per_proc / len(os.sched_getaffinity(0))
