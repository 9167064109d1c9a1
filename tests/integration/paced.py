"""The real trainer, at a pace that a test can keep up with: before each step it waits `args.step_s` seconds, until it may go on.

args: dies: [rank, step]: a rank whose device dies once, before that step of the first generation, as its driver would tell it.
holds: from this step on ranks stand still. Both end when the campaign may go on, see `holding`.
"""

import itertools
import os
import time

from holding import GO_ON, hold

import trainer.main
from resilient import worker
from trainer.main import PRELOAD, checkpoint_size, plan, prepare, warm_up

__all__ = ["PRELOAD", "checkpoint_size", "plan", "prepare", "train", "warm_up"]


def train(config: worker.Config) -> None:
    asked, told = worker.should_stop, worker.beat

    rank, at = config.args.get("dies", (-1, 0))
    steps = itertools.count()
    reached = 0

    def beat(step: int) -> None:
        nonlocal reached
        reached = step
        told(step)

    def after_a_while() -> str | None:
        if not GO_ON.exists():
            time.sleep(config.args["step_s"])
        step = next(steps)
        hold(reached, config.args.get("holds"))
        if os.environ["RANK"] == str(rank) and os.environ[worker.GENERATION_VARIABLE] == "1" and step == at:
            print("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", flush=True)
            os._exit(3)
        return asked()

    worker.should_stop, worker.beat = after_a_while, beat
    trainer.main.train(config)
