"""What the ranks of a layout do in a step, counted: products, bytes, messages, operators. Nothing is built. Pure.

Bytes and messages are those of ring algorithms. Operators are counted roughly, as an eager framework calls them; a distributed
tensor's count for several, since finding out how to split them is what takes their time.
"""

from resilient.worker import Config, Layout, RankWork, Work, reduces_every
from trainer import fit
from trainer.memory import MASTER, memory, stage_weights
from trainer.shape import GPTShape
from trainer.stages import Stage, of_rank

LAYER, ENDS, GROUP, TRANSFER = 150.0, 60.0, 40.0, 30.0  # operators of a layer, embedding or head, a sharded group, a transfer
DISTRIBUTED = 5.0  # times as many, where a matrix is shared by tensor-parallel ranks
COMPILED = 0.2  # as many of a layer, once it is compiled


def rank_work(config: Config, shape: GPTShape, spread: Layout) -> list[RankWork]:
    """By pipeline rank."""
    gpu_bytes = fit.gpu_bytes_of(config)
    config = fit.settled(config, shape, spread, gpu_bytes)
    return [_of_rank(config, shape, spread, pp_rank, gpu_bytes) for pp_rank in range(spread.pp)]


def _of_rank(config: Config, shape: GPTShape, spread: Layout, pp_rank: int, gpu_bytes: int | None) -> RankWork:
    parts = of_rank(config, spread, pp_rank)
    held = memory(config, shape, spread, pp_rank)
    once, again = Work(), Work()  # a step, a micro batch
    for stage in parts:
        again += _passes(config, shape, spread, stage)
        gathering, reducing = _sharding(config, shape, spread, stage)
        (every_gather, every_reduce) = config.parallel.zero_stage == 3, reduces_every(config)
        again += gathering * (2.0 * every_gather) + reducing * (1.0 * every_reduce)
        once += gathering * (1.0 * (not every_gather)) + reducing * (1.0 * (not every_reduce))
    everyone = Work(messages=2.0 * (spread.world_size - 1), operations=LAYER)  # the loss and the norm; the optimizer
    return RankWork(
        again,
        once + everyone,
        state_bytes=held.parameters + held.gradients + held.optimizer,
        peak_bytes=held.peak,
        fits=gpu_bytes is None or held.peak <= fit.budget(gpu_bytes),
    )


def _passes(config: Config, shape: GPTShape, spread: Layout, stage: Stage) -> Work:
    """Both passes over a micro batch through one stage."""
    train, tp = config.train, spread.tp
    tokens = train.micro_batch_size * shape.seq_len // spread.cp
    matrices = 6.0 * sum(weight.size for weight in shape.layer(0) if weight.kind == "matrix")
    scores = 12.0 * shape.hidden * shape.seq_len
    flops = 0.0
    for number in stage.layers:
        recomputed = train.recompute if number % train.recompute_every == 0 else "none"
        flops += matrices + scores + (matrices * (recomputed == "full") + scores * (recomputed != "none")) / 3
    flops += 6.0 * shape.vocab * shape.hidden * stage.last
    ends = stage.first + stage.last
    operators = LAYER * len(stage.layers) * (COMPILED if train.compile else 1.0) + ENDS * ends
    found = Work(flops=tokens * flops / tp, operations=operators * (DISTRIBUTED if tp > 1 else 1.0))
    found += Work(operations=GROUP * (len(stage.layers) + 1))
    stream = float(tokens * shape.hidden * _compute_bytes(config))
    if tp > 1:  # four exchanges a layer, each gathered and scattered; one at each end
        exchanges = 4.0 * len(stage.layers) + ends
        sent = 2.0 * exchanges * stream * (tp - 1) / tp
        found += Work(messages=2.0 * exchanges * (tp - 1)) + _sent(sent, spread, stride=1, size=tp)
    if spread.cp > 1:  # keys and values go around forward, with their gradients backward
        kv = float(tokens * 2 * shape.kv_heads * shape.head_dim * _compute_bytes(config)) / tp
        rounds = (spread.cp - 1.0) * len(stage.layers)
        found += Work(messages=3.0 * rounds) + _sent(3.0 * kv * rounds, spread, stride=tp, size=spread.cp)
    neighbours = (not stage.first) + (not stage.last)
    if neighbours:
        cut = stream / tp if config.parallel.sequence_parallel else stream
        stride = tp * spread.cp * spread.dp
        found += Work(messages=2.0 * neighbours, operations=2.0 * TRANSFER * neighbours)
        found += _sent(cut * neighbours, spread, stride=stride, size=spread.pp)
    return found


def _sharding(config: Config, shape: GPTShape, spread: Layout, stage: Stage) -> tuple[Work, Work]:
    """Putting the weights of a stage together once, and reducing its gradients once, among the ranks that share them; between those
    that hold the same, the shards of gradients are summed up."""
    size, copies, groups = spread.dp_shard * spread.cp, spread.dp_replicate, len(stage.layers) + 1.0
    values = sum(weight.size / (spread.tp if weight.cut is not None else 1) for weight in stage_weights(shape, stage))
    gathering = reducing = Work(operations=GROUP * groups)
    if size > 1:
        share, messages = values * (size - 1) / size, Work(messages=groups * (size - 1))
        gathering += messages + _sent(share * _compute_bytes(config), spread, stride=spread.tp, size=size)
        reducing += messages + _sent(share * MASTER, spread, stride=spread.tp, size=size)
    if copies > 1:
        summed = 2.0 * values / size * (copies - 1) / copies
        reducing += Work(messages=2.0 * groups * (copies - 1))
        reducing += _sent(summed * MASTER, spread, stride=spread.tp * size, size=copies)
    return gathering, reducing


def _sent(count: float, spread: Layout, *, stride: int, size: int) -> Work:
    """Bytes among ranks that are so far apart: to another node where not all of them are on one."""
    return Work(near_bytes=count) if stride * size <= spread.procs_per_node else Work(far_bytes=count)


def _compute_bytes(config: Config) -> int:
    return 2 if config.train.precision == "bf16" else MASTER
