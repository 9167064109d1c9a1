"""Ranks of the trainer with a batch that is bad, or left out, and what they report of their steps."""

import math
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from trainer_ranks import train

from resilient.worker import GUARD_VARIABLE


def broken(config: Path, bad: dict[int, int], stop_at: int | None = None) -> list[dict[str, Any]]:
    """Train on this rank; at step s, the first bad[s] times that it is computed, one gradient of the last rank is no number."""
    import torch.distributed as dist

    from trainer.loop import Trainer

    whole = Trainer._gradients
    left = dict(bad)

    def spoilt(self: Trainer, size: int) -> Any:
        step = self.state.progress.step + 1
        spoil = left.get(step, 0) > 0
        left[step] = left.get(step, 0) - 1
        train_pass = self.engine.train

        def passes(*args: Any) -> torch.Tensor:
            loss = train_pass(*args)
            if spoil and dist.get_rank() == dist.get_world_size() - 1:
                gradient = next(self.stages[-1].parameters()).grad
                gradient.to_local().view(-1)[0] = math.nan
            return loss

        with mock.patch.object(self.engine, "train", passes):
            return whole(self, size)

    with mock.patch.object(Trainer, "_gradients", spoilt):
        return train(config, stop_at=stop_at)


def leaving_out(config: Path, first: int, last: int) -> list[dict[str, Any]]:
    """Train on this rank as after a roll-back."""
    with mock.patch.dict("os.environ", {GUARD_VARIABLE: f'{{"skip": [[{first}, {last}]], "go_back_to": null}}'}):
        return train(config)


def outcomes(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Of every step: its number, its loss, and why it was skipped, if it was."""
    return [(line["step"], line["loss"], line.get("skipped")) for line in records if line["event"] == "step"]
