"""The real trainer, at a pace that a test can keep up with: before each step it waits `args.step_s` seconds.

args: dies: [rank, step]: a rank whose device dies once, before that step of the first generation, as its driver would tell it.
holds: [step, file]: that step of a generation waits until the file is there.
"""

import itertools
import os
import time
from pathlib import Path

import trainer.main
from resilient import worker
from trainer.main import PRELOAD, checkpoint_size, plan, prepare, warm_up

__all__ = ["PRELOAD", "checkpoint_size", "plan", "prepare", "train", "warm_up"]


def train(config: worker.Config) -> None:
    asked = worker.should_stop

    rank, at = config.args.get("dies", (-1, 0))
    held, until = config.args.get("holds", (-1, ""))
    steps = itertools.count()

    def after_a_while() -> str | None:
        time.sleep(config.args["step_s"])
        step = next(steps)
        while step == held and not Path(until).exists():
            time.sleep(0.01)
        if os.environ["RANK"] == str(rank) and os.environ[worker.GENERATION_VARIABLE] == "1" and step == at:
            print("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", flush=True)
            os._exit(3)
        return asked()

    worker.should_stop = after_a_while
    trainer.main.train(config)
