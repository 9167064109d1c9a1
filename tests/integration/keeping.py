"""A small entry point with a state that a bit more or less would change for good: numbers on two ranks, kept by snapshots."""

import time
from typing import Any

import torch
import torch.distributed as dist
from holding import hold

import checkpoint
from resilient import worker

PRELOAD = ("checkpoint.loading", "checkpoint.restoring", "checkpoint.saving", "checkpoint.tiers.snapshots")
NUMBERS = 8192  # of each rank: 64 KiB


def train(config: worker.Config) -> None:
    """Iterate a chaotic map to `train.steps`, with a snapshot after each step.

    args: step_s: time of a step; late_s: by which the first rank takes its snapshot later than the others; holds: from this step on
    ranks stand still until the campaign may go on, see `holding`.
    """
    ctx = worker.init()
    assert ctx.session is not None
    dist.init_process_group("gloo")
    root, durable = config.checkpoint.tiers[-1].path, config.checkpoint.tiers[-1].name
    numbers = beginning(ctx.rank)
    shard = checkpoint.LocalShard("numbers", (ctx.world_size, NUMBERS), (ctx.rank, 0), numbers.unsqueeze(0), unit=(1, NUMBERS))
    snapshots = checkpoint.Snapshots(ctx.session)
    with worker.phase("load"):
        found = checkpoint.restore(root, lambda state: [shard], tier=durable, held=snapshots.session.candidates, on_reject=_tell)
    step = kept = found.step if found is not None else 0
    if ctx.rank == 0:
        worker.report({"step": step, "tier": found.tier if found is not None else durable}, event="resumed")
    snapshots_started = False

    def keep(tiers: frozenset[str], **how: Any) -> None:
        nonlocal kept
        with worker.phase("snapshot"):
            if snapshots.take(step, [shard], {"step": step}, tiers, **how).copied:
                kept = step

    while step < config.train.steps and worker.should_stop() is None:
        with worker.phase("step"):
            total = numbers.sum()
            dist.all_reduce(total)
            advance(numbers)
            time.sleep(config.args.get("step_s", 0.02))
        step += 1
        if ctx.rank == 0:
            worker.report({"step": step, "loss": total.item(), "step_s": 0.02})
        worker.beat(step)
        if not snapshots_started:
            snapshots_started = True
            with worker.phase("snapshot"):
                snapshots.start([shard])
                snapshots.ready()
        time.sleep(config.args.get("late_s", 0.0) * (ctx.rank == 0))
        if step < config.train.steps and (tiers := snapshots.due(step)):
            keep(tiers)
        hold(step, config.args.get("holds"))
    if snapshots_started and snapshots.left_out(kept == step):
        keep(frozenset([durable]), wait_s=20.0, again=1)
    dist.destroy_process_group()


def beginning(rank: int) -> torch.Tensor:
    """What a rank starts with."""
    return torch.linspace(0.1, 0.9, NUMBERS, dtype=torch.float64) + 0.01 * rank


def advance(numbers: torch.Tensor) -> None:
    """One step, in place."""
    numbers.copy_(3.9 * numbers * (1 - numbers))


def _tell(step: int, tier: str, reason: str) -> None:
    worker.report({"step": step, "tier": tier, "reason": reason}, event="checkpoint_rejected")
