"""What `lost_nodes.py` runs: the real trainer, whose model takes a fixed time more for each micro batch that a rank computes.

All hosts of a lab share the processors of one machine, so that fewer of them would be as fast as all. The time that passes while
nothing is computed is each rank's own, and how often it passes in a step is up to the trainer, which deals out the micro batches.

args: micro_s: the time for each micro batch, in seconds.
"""

import time
from typing import Any

from resilient import worker
from trainer.main import PRELOAD, checkpoint_size, plan, prepare, warm_up
from trainer.main import train as train_at_once

__all__ = ["PRELOAD", "checkpoint_size", "plan", "prepare", "train", "warm_up"]


def train(config: worker.Config) -> None:
    """As one rank."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    from trainer.model import GPT

    def take_time(module: Any, _: object) -> None:
        if isinstance(module, GPT):
            time.sleep(config.args["micro_s"])  # computes as long as a micro batch would

    register_module_forward_pre_hook(take_time)
    train_at_once(config)
