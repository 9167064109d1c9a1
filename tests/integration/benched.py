"""An entry point to be measured: steps of a given time and number of tokens."""

import time

from resilient import worker


def train(config: worker.Config) -> None:
    """args: step_s; tokens: of a step; raises: at the third step; hangs: before the first one."""
    context = worker.init()
    args = {"step_s": 0.02, "tokens": 100, **config.args}
    while args.get("hangs"):
        time.sleep(1.0)
    for step in range(1, config.train.steps + 1):
        if args.get("raises") and step == 3:
            raise ValueError("this layout does not work")
        with worker.phase("step"):
            time.sleep(args["step_s"])
        worker.beat(step)
        if context.rank == 0:
            speed = args["tokens"] / args["step_s"]
            worker.report({"step": step, "loss": 1.0, "step_s": args["step_s"], "tokens_per_s": speed, "memory_bytes": 1 << 20})


def rank_work(config: worker.Config) -> list[worker.RankWork]:
    """What is predicted."""
    return [worker.RankWork(step=worker.Work(flops=1e9 * config.args.get("tokens", 100)), peak_bytes=1 << 19, state_bytes=1 << 18)]
