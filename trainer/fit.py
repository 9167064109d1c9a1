"""Whether a rank fits on its GPU, how gradients are kept so that it does, and what would help where it does not. Pure.

Left open by the config (`auto`), gradients add up whole in fp32, and are reduced once a step. Where that does not fit, they are
reduced in every backward pass into fp32 shards, which is as exact and costs an exchange for each micro batch; and only where that
does not fit either, whole gradients add up in bf16.
"""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from pydantic import ValidationError

from checkpoint.rounds import STAGE_BYTES
from resilient.worker import Config, ConfigError, Layout, against_compiling, reduces_every, settle
from trainer.memory import most, warming_bytes
from trainer.shape import GPTShape

GIB = 1 << 30
RESERVED = int(1.5 * GIB)  # the CUDA context, buffers of NCCL, workspaces of cuBLAS
FRAGMENTATION = 0.05  # of the memory, which the allocator cannot use
STANDBY = int(0.75 * GIB)  # of a process that stands by: the CUDA context, its modules, a workspace of cuBLAS (estimate)
SHOWN = 3

Change = Mapping[str, Any]
"""Values by key of the config."""


def budget(gpu_bytes: int) -> int:
    """What is left of a GPU's memory for tensors."""
    return int(gpu_bytes * (1 - FRAGMENTATION)) - RESERVED - STAGE_BYTES


def gpu_bytes_of(config: Config, device_bytes: int | None = None) -> int | None:
    """Memory of a GPU: what the config says, or its site's profile, else the device's own. None: nothing is compared with it."""
    said = config.cluster.gpu_memory_gib
    if said == "auto":
        return device_bytes
    return None if said == "none" else int(said * GIB)


def settled(config: Config, shape: GPTShape, spread: Layout, gpu_bytes: int | None) -> Config:
    """The config with `parallel.reduce_gradients` and `train.grad_dtype` decided, for the least memory where nothing fits.

    The same on every rank of the layout.
    """
    parallel, train = config.parallel, config.train
    reductions = ["last", "every"] if parallel.reduce_gradients == "auto" else [parallel.reduce_gradients]
    if parallel.reduce_gradients == "auto" and reduces_every(config):
        reductions = ["every"]
    ways = [(reduction, "fp32") for reduction in reductions] if train.grad_dtype != "bf16" else []
    if train.grad_dtype == "bf16" or (train.grad_dtype == "auto" and train.precision == "bf16" and reductions != ["every"]):
        ways += [(reduction, "bf16") for reduction in reductions[:1]]
    found = [changed(config, {"parallel.reduce_gradients": way, "train.grad_dtype": dtype}) for way, dtype in ways]
    if gpu_bytes is None:
        return found[0]
    peaks = [most(each, shape, spread)[1].peak for each in found]
    first = next((number for number, peak in enumerate(peaks) if peak <= budget(gpu_bytes)), peaks.index(min(peaks)))
    return found[first]


def holds_standby(config: Config, shape: GPTShape, spread: Layout, gpu_bytes: int | None) -> bool:
    """Whether a process that stands by for a rank holds its GPU ready: where that is left open, if there is room beside the rank.

    Args:
        config: with nothing left open of gradients.
        gpu_bytes: memory of the GPU; None: not known, and there is room for nothing.
    """
    wanted = config.resilience.gpu_standby
    if wanted != "auto":
        return wanted
    return gpu_bytes is not None and most(config, shape, spread)[1].peak + STANDBY <= budget(gpu_bytes)


def has_room_to_warm_kernels(config: Config, shape: GPTShape, spread: Layout, gpu_bytes: int | None) -> bool:
    """Whether such a process also has the kernels of a step ready, for which it computes a layer and the loss once: where there is
    room for that too.

    Args: as of `holds_standby`.
    """
    if spread.cp > 1 or spread.tp > 1 or not holds_standby(config, shape, spread, gpu_bytes):
        return False
    if config.resilience.gpu_standby is True:
        return True
    need = most(config, shape, spread)[1].peak + STANDBY + warming_bytes(config, shape, spread)
    return gpu_bytes is not None and need <= budget(gpu_bytes)


def too_much(config: Config, shape: GPTShape, spread: Layout, gpu_bytes: int) -> str | None:
    """What to say where a rank does not fit on its GPU, with what would help; None: it does. Args: config: as settled."""
    pp_rank, memory = most(config, shape, spread)
    if memory.peak <= budget(gpu_bytes):
        return None
    who = f"pipeline rank {pp_rank}" if spread.pp > 1 else "a rank"
    need = f"{who} holds {memory.peak / GIB:.1f} GiB of tensors at its most, and of a GPU of {gpu_bytes / GIB:.1f} GiB"
    known = cheapest_changes(config, shape, spread, gpu_bytes)
    changes = [" ".join(f"{key}={value}" for key, value in each.items()) for each in known]
    help_ = f"it fits with {', or with '.join(changes)}" if changes else "no change of the layout that is known makes it fit"
    return f"{need} {max(0.0, budget(gpu_bytes) / GIB):.1f} GiB are left to them; {help_}"


def changed(config: Config, change: Change) -> Config:
    """The config with other values of sections' keys. They are not checked."""
    for key, value in change.items():
        section, _, name = key.partition(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
    return config


def cheapest_changes(config: Config, shape: GPTShape, spread: Layout, gpu_bytes: int) -> list[Change]:
    """The first ways to make it fit, those first that cost least time; two changes at once only where one is not enough."""
    single = list(_changes(config))
    agree = [
        (one, other) for one, other in combinations(single, 2) if all(one[key] == other[key] for key in one.keys() & other.keys())
    ]
    pairs = [{**one, **other} for one, other in agree]
    for candidates in (single, pairs):
        found = [change for change in candidates if _fits(changed(config, change), shape, spread.world_size, gpu_bytes)]
        if found:
            return found[:SHOWN]
    return []


def _changes(config: Config) -> Iterator[Change]:
    train, parallel = config.train, config.parallel
    if not reduces_every(config):
        yield {"parallel.reduce_gradients": "every"}
    if train.recompute != "full":
        yield {"train.recompute": "full"}
    if train.micro_batch_size > 1 and train.micro_batch_size % 2 == 0:
        yield {"train.micro_batch_size": train.micro_batch_size // 2}
    for stage in range(parallel.zero_stage + 1, 4):
        yield {"parallel.zero_stage": stage}
    if parallel.dp_replicate not in ("auto", 1):
        yield {"parallel.dp_shard": "auto", "parallel.dp_replicate": 1}
    bound = "auto" not in (parallel.dp_shard, parallel.dp_replicate)  # dp is, by the two of them
    replicas: Change = {"parallel.dp": "auto", **({"parallel.dp_shard": "auto"} if bound else {})}
    layouts: tuple[Change, ...] = (
        {"parallel.tp": parallel.tp * 2, **replicas},
        {"parallel.pp": parallel.pp * 2, **replicas, "parallel.pp_layers": "auto"},
    )
    for change in layouts:
        refused = train.compile is True and against_compiling(changed(config, change)) is not None
        yield {**change, "train.compile": "auto"} if refused else change


def _fits(config: Config, shape: GPTShape, world_size: int, gpu_bytes: int) -> bool:
    try:
        config = Config.model_validate(config.model_dump())
        spread = settle(config, world_size)
    except (ConfigError, ValidationError):
        return False
    return most(settled(config, shape, spread, gpu_bytes), shape, spread)[1].peak <= budget(gpu_bytes)
