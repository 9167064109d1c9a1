"""The trainer, with numbers that go bad when a test says so: an entry point of its own."""

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from resilient import ledger, worker
from trainer.main import PRELOAD, prepare

__all__ = ["PRELOAD", "prepare", "train"]


def train(config: worker.Config) -> None:
    """Train. What happens, happens on the last rank.

    args: bad: steps whose gradients are no numbers, whenever they are computed; corrupt: after this step some weights are no
    numbers, in the first `times` generations that finish it; poison: at this step the rank ends by a signal, whenever it comes
    there; die_at: after a roll-back it is killed at that step, once. step_s: how long it waits before each step, so that snapshots
    keep up; committed: behind this step it waits until the ledger has told of its durable checkpoint.
    """
    from trainer.loop import Trainer, run

    args = {"bad": [], "corrupt": 0, "times": 1, "poison": 0, "die_at": 0, "step_s": 0.0, "committed": 0, **config.args}
    ctx = worker.init()
    assert ctx.run_dir is not None
    last = ctx.rank == ctx.world_size - 1
    whole_step, whole_gradients = Trainer._step, Trainer._gradients

    def step(self: Trainer) -> None:
        number = self.state.progress.step + 1
        if last:
            time.sleep(args["step_s"])
        if last and number == args["committed"] + 1 > 1:
            _await_commit(ctx, args["committed"])
        if last and number == args["poison"]:
            os.kill(os.getpid(), signal.SIGSEGV)
        if last and number == args["die_at"] and ctx.go_back_to is not None and _marks(ctx.run_dir / "died", ctx) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        whole_step(self)
        if last and number == args["corrupt"] and _marks(ctx.run_dir / "corrupted", ctx) <= args["times"]:
            with torch.no_grad():
                for parameter in self.stages[-1].parameters():
                    _local(parameter).view(-1)[:1] = math.nan

    def gradients(self: Trainer, size: int) -> Any:
        train_pass = self.engine.train

        def passes(*given: Any) -> torch.Tensor:
            loss = train_pass(*given)
            if last and self.state.progress.step + 1 in args["bad"]:
                _local(next(self.stages[-1].parameters()).grad).view(-1)[0] = math.nan
            return loss

        self.engine.train = passes  # type: ignore[method-assign]
        try:
            return whole_gradients(self, size)
        finally:
            self.engine.train = train_pass  # type: ignore[method-assign]

    Trainer._step, Trainer._gradients = step, gradients  # type: ignore[method-assign]
    run(config)


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _await_commit(ctx: worker.Context, step: int) -> None:
    """As long as a busy disk may take; tests that ask for it bear a rank that is silent for so long."""
    assert ctx.run_dir is not None
    deadline = time.monotonic() + 100.0
    while time.monotonic() < deadline:
        if any(line["event"] == "committed" and line["step"] == step for line in ledger.read(ctx.run_dir / ledger.EVENTS)):
            return
        time.sleep(0.05)


def _marks(path: Path, ctx: worker.Context) -> int:
    """The number of generations that have come here, this one included."""
    with path.open("a") as file:
        file.write(f"{ctx.generation}\n")
    return len(set(path.read_text().split()))
