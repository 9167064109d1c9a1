"""The real trainer, at a pace that a test can keep up with: before each step it waits `args.step_s` seconds."""

import time

import trainer.main
from resilient import worker
from trainer.main import PRELOAD, checkpoint_size, plan, prepare, warm_up

__all__ = ["PRELOAD", "checkpoint_size", "plan", "prepare", "train", "warm_up"]


def train(config: worker.Config) -> None:
    asked = worker.should_stop

    def after_a_while() -> str | None:
        time.sleep(config.args["step_s"])
        return asked()

    worker.should_stop = after_a_while
    trainer.main.train(config)
