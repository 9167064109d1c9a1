"""What one rank holds at its most, by arithmetic. Nothing is built, no GPU is asked. Pure."""

import math
from dataclasses import dataclass

from resilient.worker import Config, Layout, dealing, reduces_every
from trainer.chunks import loss_bytes
from trainer.moments import moments
from trainer.shape import GPTShape, Weight
from trainer.stages import Stage, of_rank

MASTER = 4  # bytes of a number in fp32: weights, reduced gradients, moments


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        parameters: this rank's shards of the fp32 weights.
        gathered: weights put together to compute with, at their most.
        gradients: this rank's shards of the reduced gradients.
        accumulated: whole gradients that wait for the last backward pass.
        reducing: of the layer whose gradients are being reduced: what was computed, and the buffer that is sent, in fp32.
        optimizer: this rank's shards of the moments.
        activations: kept for backward passes, at their most; an estimate.
        every: gradients are reduced in every backward pass, so that their shards are there in the next one.
    """

    parameters: int
    gathered: int
    gradients: int
    accumulated: int
    reducing: int
    optimizer: int
    activations: int
    every: bool = False

    @property
    def peak(self) -> int:
        """The most at one time: in the last but one backward pass, or at the end of the last one, which reduces gradients."""
        always = self.parameters + self.gathered + self.optimizer + self.accumulated
        backward = self.activations + ((self.gradients + self.reducing) if self.every else 0)
        return always + max(backward, self.gradients + self.reducing)


def memory(config: Config, shape: GPTShape, spread: Layout, pp_rank: int) -> Memory:
    """Of the first rank of a pipeline stage, whose shards are the largest."""
    parts = of_rank(config, spread, pp_rank)
    weights = [weight for stage in parts for weight in stage_weights(shape, stage)]
    local = [_cut(weight, shape, spread) for weight in weights]
    shards = [-(-sizes[0] // (spread.dp_shard * spread.cp)) * math.prod(sizes[1:]) for sizes in local]
    shard = sum(shards)
    kept = sum(size * len(moments(config.optimizer.name, weight)) for weight, size in zip(weights, shards, strict=True))
    whole = sum(map(math.prod, local))
    compute = 2 if config.train.precision == "bf16" else MASTER
    layer = sum(math.prod(_cut(weight, shape, spread)) for weight in shape.layer(0))
    outside = whole - layer * sum(len(stage.layers) for stage in parts)
    gathered = min(whole, 2 * layer + outside) if config.parallel.zero_stage == 3 else whole
    every = reduces_every(config)
    adds_up = not every and (spread.pp > 1 or spread.accumulation > 1)
    added_in = compute if config.train.grad_dtype == "bf16" else MASTER
    return Memory(
        parameters=shard * MASTER,
        gathered=gathered * compute,
        gradients=shard * MASTER,
        accumulated=whole * added_in if adds_up else 0,
        reducing=max(layer, outside) * ((0 if adds_up else compute) + MASTER),
        optimizer=kept * MASTER,
        activations=_activations(config, shape, spread, parts, pp_rank, compute),
        every=every,
    )


def most(config: Config, shape: GPTShape, spread: Layout) -> tuple[int, Memory]:
    """The pipeline rank that holds most, and what it holds."""
    found = [memory(config, shape, spread, pp_rank) for pp_rank in range(spread.pp)]
    pp_rank = max(range(spread.pp), key=lambda each: found[each].peak)
    return pp_rank, found[pp_rank]


def warming_bytes(config: Config, shape: GPTShape, spread: Layout) -> int:
    """Bytes that a standby needs to warm its kernels: a step of one layer of each kind, or of the loss, whichever is more.

    Of the layers: weights and moments, what they keep, as much of gradients. The loss is counted for every stage: which one the
    standby will be is not known yet. An estimate, as that of activations is.
    """
    compute = 2 if config.train.precision == "bf16" else MASTER
    tokens = config.train.micro_batch_size * shape.seq_len // spread.cp
    weights = sum(math.prod(_cut(weight, shape, spread)) for weight in shape.layer(0))
    kinds = min(2, config.train.recompute_every)
    layer = kinds * (weights * (2 * compute + 5 * MASTER) + round(2 * tokens * layer_bytes(config, shape, spread, compute)))
    loss = loss_bytes(tokens, shape.vocab, compute, cpu=False) + 2 * (shape.vocab + tokens) * shape.hidden * compute
    return max(layer, loss)


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
    """What the micro batches in flight keep, and what a layer that is computed again has for its backward pass beside it.

    On the last stage, also what its loss holds (`trainer.chunks`), and until the backward pass has come to the head, the gradients
    that the loss leaves behind.
    """
    layer, less = layer_bytes(config, shape, spread, compute), recomputed_bytes(config, shape, spread, compute)
    again = [number % config.train.recompute_every == 0 for stage in parts for number in stage.layers]
    kept = sum(less if each else layer for each in again)
    tokens = config.train.micro_batch_size * shape.seq_len // spread.cp
    held = kept * in_flight(config, spread, pp_rank)
    halves = halfway(config, spread, pp_rank)
    if halves:
        # Both halves compute again, and what the first one has, the second one does not find.
        apart = sum(2 * (layer - less) * each for each in again) + len(again) * between_bytes(config, shape, spread, compute)
        held += apart * halves / spread.virtual_stages
    elif any(again):
        held += layer - less
    if not parts[-1].last:
        return round(tokens * held)
    vocab = -(-shape.vocab // spread.tp)
    left = (vocab + tokens) * shape.hidden * compute
    waiting = in_flight(config, spread, pp_rank) if config.parallel.schedule == "gpipe" else max(1, halves)
    loss = loss_bytes(tokens, vocab, compute, cpu=config.cluster.device == "cpu")
    return round(tokens * held + loss + left * waiting)


def layer_bytes(config: Config, shape: GPTShape, spread: Layout, compute: int) -> float:
    """Bytes that a layer keeps of a token for its backward pass where nothing is computed again.

    Both residuals, what the norms hand to the matrices, queries, keys, values, attention's output, the MLP's inner values (cf.
    Korthikanti et al., 2022). Flash attention keeps its output beside what the next matrix is given; the explicit formula keeps its
    scores, and works in fp32. On CPUs an RMS norm is several operations, which keep values in fp32.
    """
    kv = shape.kv_heads * shape.head_dim
    stream = _stream(config, shape, spread)
    heads = (2 * shape.hidden + 2 * kv + (4 if shape.gated else 2) * shape.ffn_hidden) / spread.tp
    found = (2 * stream + 2 * shape.hidden + heads) * compute
    if config.model.norm == "rmsnorm" and config.cluster.device == "cpu":
        found += 2 * stream * (MASTER if compute == MASTER else MASTER + compute)
    if config.model.attention == "math":
        return found + (shape.heads * shape.seq_len * MASTER + (shape.hidden + 2 * kv) * (MASTER - compute)) / spread.tp
    return found + shape.hidden / spread.tp * compute


def recomputed_bytes(config: Config, shape: GPTShape, spread: Layout, compute: int) -> float:
    """Bytes that a layer to which `train.recompute` applies keeps of a token.

    `full`: what the layer is given. `selective`: that, and the results of products, but the last one's, which only a dropout after
    it would ask for; flash attention's, where it drops nothing; with tensor parallelism what ranks send each other, before and
    after it is summed.
    """
    stream = _stream(config, shape, spread)
    if config.train.recompute == "none":
        return layer_bytes(config, shape, spread, compute)
    if config.train.recompute == "full":
        return stream * compute
    heads = shape.hidden + 2 * shape.kv_heads * shape.head_dim + (2 if shape.gated else 1) * shape.ffn_hidden
    if config.model.attention != "math" and not shape.attention_dropout:
        heads += shape.hidden
    exchanged = (shape.hidden * (3 if config.parallel.sequence_parallel else 1)) if spread.tp > 1 else 0
    last = stream if shape.dropout else 0
    return (2 * stream + exchanged + last + heads / spread.tp) * compute


def between_bytes(config: Config, shape: GPTShape, spread: Layout, compute: int) -> float:
    """Bytes of a token that a layer has beside that between the halves of a backward pass: gradients of its products and norms."""
    heads = shape.hidden + 2 * shape.kv_heads * shape.head_dim + (2 if shape.gated else 1) * shape.ffn_hidden
    return (4 * _stream(config, shape, spread) + heads / spread.tp) * compute


def _stream(config: Config, shape: GPTShape, spread: Layout) -> float:
    """Values of a token between layers on a rank."""
    return shape.hidden / (spread.tp if config.parallel.sequence_parallel else 1)


def in_flight(config: Config, spread: Layout, pp_rank: int) -> float:
    """Micro batches whose activations a pipeline rank keeps at the same time, in units of all its stages."""
    pp, virtual, schedule = spread.pp, spread.virtual_stages, config.parallel.schedule
    count = _passes(config, spread)
    if pp == 1:
        return 1
    if schedule == "gpipe":
        return count
    if schedule == "1f1b":
        return min(count, pp - pp_rank)
    rounds = (virtual - 1) * (count // max(1, count // pp))  # before the first backward pass can come
    return min(count, (rounds + (pp if schedule == "zero_bubble" else 2 * (pp - 1 - pp_rank) + 1)) / virtual)


def halfway(config: Config, spread: Layout, pp_rank: int) -> int:
    """Micro batches, each on one stage, that are between the halves of a backward pass at the same time.

    Zero bubble puts the second half, for the weights, off by one pass for each rank before. The first stage, which nothing before
    waits for, has it whole.
    """
    if config.parallel.schedule != "zero_bubble" or spread.pp == 1 or (pp_rank == 0 and spread.virtual_stages == 1):
        return 0
    return min(_passes(config, spread), pp_rank + 1)


def _passes(config: Config, spread: Layout) -> int:
    """Of the replica that has most."""
    return dealing(config, spread.dp).passes(config.train.global_batch_size // config.train.micro_batch_size, 0)
