"""What a config comes to: memory of a rank, size and files of a checkpoint. Pure arithmetic over the table of parameters."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from resilient.worker import Config, Layout, dealing, layout
from trainer.moments import all_moments, moments
from trainer.shape import GPTShape, Weight, flops_per_token, shape_of
from trainer.stages import Stage, of_rank

MASTER = 4  # bytes of a number in fp32: weights, reduced gradients, moments


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        parameters: this rank's shards of the fp32 weights.
        gathered: weights put together to compute with, at their most.
        gradients: this rank's shards of the reduced gradients.
        accumulated: whole gradients that wait for the last micro batch.
        optimizer: this rank's shards of the moments.
        activations: kept for backward passes, at their most; an estimate.
    """

    parameters: int
    gathered: int
    gradients: int
    accumulated: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gathered + self.gradients + self.accumulated + self.optimizer + self.activations


def memory(config: Config, shape: GPTShape, spread: Layout, pp_rank: int) -> Memory:
    """Of the first rank of a pipeline stage, whose shards are the largest."""
    parts = of_rank(config, spread, pp_rank)
    weights = [weight for stage in parts for weight in stage_weights(shape, stage)]
    local = [_cut(weight, shape, spread) for weight in weights]
    shards = [-(-sizes[0] // (spread.dp * spread.cp)) * math.prod(sizes[1:]) for sizes in local]
    shard = sum(shards)
    kept = sum(size * len(moments(config.optimizer.name, weight)) for weight, size in zip(weights, shards, strict=True))
    whole = sum(map(math.prod, local))
    compute = 2 if config.train.precision == "bf16" else 4
    gathered = whole
    if config.parallel.zero_stage == 3:
        layer = sum(math.prod(_cut(weight, shape, spread)) for weight in shape.layer(0))
        outside = whole - layer * sum(len(stage.layers) for stage in parts)
        gathered = min(whole, 2 * layer + outside)
    adds_up = spread.pp > 1 or (config.parallel.zero_stage == 1 and spread.accumulation > 1)
    return Memory(
        parameters=shard * MASTER,
        gathered=gathered * compute,
        gradients=shard * MASTER,
        accumulated=whole * MASTER if adds_up else 0,
        optimizer=kept * MASTER,
        activations=_activations(config, shape, spread, parts, pp_rank, compute),
    )


def stage_weights(shape: GPTShape, stage: Stage) -> list[Weight]:
    """The parameters that a stage holds; a tied embedding that the pipeline parts is on both ends."""
    found = [each for number in stage.layers for each in shape.layer(number)]
    if stage.first:
        found = [*shape.first(), *found]
    if stage.last:
        found += shape.last()
        if shape.tied and not stage.first:
            found.append(shape.first()[0])
    return found


def _cut(weight: Weight, shape: GPTShape, spread: Layout) -> list[int]:
    """Sizes of a parameter on the first tensor-parallel rank."""
    sizes = list(weight.shape)
    repeated = ".attention.key." in weight.name or ".attention.value." in weight.name
    if weight.cut is not None and not (repeated and shape.kv_heads % spread.tp):
        sizes[weight.cut] = -(-sizes[weight.cut] // spread.tp)
    return sizes


def _activations(config: Config, shape: GPTShape, spread: Layout, parts: list[Stage], pp_rank: int, compute: int) -> int:
    """What the micro batches in flight keep, with flash attention.

    Per token and layer: both norms' inputs and the two residuals, the matrices' inputs, queries, keys, values and attention's
    output, the MLP's inner values (cf. Korthikanti et al., 2022); with full recomputation, the layer's input. On the last stage,
    logits with their fp32 copy and gradient, of one micro batch at a time.
    """
    kv = shape.kv_heads * shape.head_dim
    stream = shape.hidden / (spread.tp if config.parallel.sequence_parallel else 1)
    inside = (2 * shape.hidden + 2 * kv + (4 if shape.gated else 2) * shape.ffn_hidden) / spread.tp
    layer = 4 * stream + 2 * shape.hidden + inside
    kept = 0.0
    for stage in parts:
        again = [config.train.recompute == "full" and number % config.train.recompute_every == 0 for number in stage.layers]
        kept += sum(stream if each else layer for each in again)
    tokens = config.train.micro_batch_size * shape.seq_len // spread.cp
    held = kept * in_flight(config, spread, pp_rank) + (layer if config.train.recompute == "full" else 0)
    logits = shape.vocab / spread.tp * (compute + 8) if parts[-1].last else 0
    return round(tokens * (held * compute + logits))


def in_flight(config: Config, spread: Layout, pp_rank: int) -> float:
    """Micro batches whose activations a pipeline rank keeps at the same time, in units of all its stages."""
    pp, virtual, train = spread.pp, spread.virtual_stages, config.train
    count = dealing(config, spread.dp).passes(train.global_batch_size // train.micro_batch_size, 0)
    if pp == 1:
        return 1
    if config.parallel.schedule == "gpipe":
        return count
    if virtual == 1:
        return min(count, pp - pp_rank)
    warm_up = (virtual - 1) * pp + 2 * (pp - 1 - pp_rank) + 1
    return min(count, warm_up / virtual)


def checkpoint_files(config: Config, shape: GPTShape) -> tuple[int, int]:
    """Arrays of a checkpoint, and its files: of each array metadata and data, the groups around them, the manifest."""
    _, kept, kinds = all_moments(config.optimizer.name, shape)
    arrays = shape.arrays + kept + 1
    return arrays, 2 * arrays + 5 + kinds


def checkpoint_bytes(config: Config, shape: GPTShape) -> int:
    """Of the weights and the moments."""
    return (shape.parameters + all_moments(config.optimizer.name, shape)[0]) * MASTER


def sections(config: Config, vocab: int, *, known: bool) -> Mapping[str, Mapping[str, object]]:
    """The plan by title and name.

    Args:
        vocab: tokens that the data may hold.
        known: whether that is so, or what will be asked of a tokenizer that is not trained yet.
    """
    shape, spread = shape_of(config, vocab), layout(config, cpu_count=1, gpu_count=1)
    ranks = [memory(config, shape, spread, pp_rank) for pp_rank in range(spread.pp)]
    most = max(ranks, key=lambda each: each.total)
    tokens = config.train.global_batch_size * shape.seq_len
    samples = config.train.batches.consumed(config.train.steps)
    arrays, files = checkpoint_files(config, shape)
    where = f" (pipeline rank {ranks.index(most)} of {spread.pp}, which holds most)" if spread.pp > 1 else ""
    stages = [stage for pp_rank in range(spread.pp) for stage in of_rank(config, spread, pp_rank)]
    stages.sort(key=lambda stage: stage.index)
    pipeline = {"layers of each stage": ", ".join(str(len(stage.layers)) for stage in stages)} if spread.pp > 1 else {}
    return {
        "model": {
            "parameters": f"{shape.parameters:,}",
            "vocabulary": f"{shape.vocab:,}" + ("" if known else " (once the tokenizer is trained)"),
            "FLOPs per token": f"{flops_per_token(shape):,}",
            "tokens": f"{tokens:,} a step, {samples * shape.seq_len:,} in all",
            **pipeline,
        },
        f"memory per rank{where}": {
            "parameters": f"{_size(most.parameters)} of fp32 masters, {_size(most.gathered)} to compute with",
            "gradients": _size(most.gradients) + (f", and {_size(most.accumulated)} that add up" if most.accumulated else ""),
            "optimizer": _size(most.optimizer),
            "activations": f"{_size(most.activations)} (estimate)",
            "in all": _size(most.total),
        },
        "checkpoint": {
            "size": _size(checkpoint_bytes(config, shape)),
            "files": f"{files} in {arrays} arrays, on any layout",
        },
    }


def _size(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
