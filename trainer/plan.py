"""What a config comes to: memory of a rank, size and files of a checkpoint. Pure arithmetic over the table of parameters."""

from collections.abc import Mapping

from checkpoint.rounds import STAGE_BYTES
from resilient.worker import Config, layout, reduces_every
from trainer import fit
from trainer.memory import MASTER, Memory, most, warming_bytes
from trainer.moments import all_moments
from trainer.shape import GPTShape, flops_per_token, shape_of
from trainer.stages import of_rank


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
    gpu_bytes = fit.gpu_bytes_of(config)
    config = fit.settled(config, shape, spread, gpu_bytes)
    pp_rank, memory = most(config, shape, spread)
    tokens = config.train.global_batch_size * shape.seq_len
    samples = config.train.batches.consumed(config.train.steps)
    arrays, files = checkpoint_files(config, shape)
    where = f" (pipeline rank {pp_rank} of {spread.pp}, which holds most)" if spread.pp > 1 else ""
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
            "parameters": f"{_size(memory.parameters)} of fp32 masters, {_size(memory.gathered)} to compute with",
            "gradients": _gradients(config, memory),
            "optimizer": _size(memory.optimizer),
            "activations": f"{_size(memory.activations)} (estimate)",
            "at one time, at the most": _size(memory.peak),
            **({"GPU": _verdict(config, shape, gpu_bytes)} if gpu_bytes is not None else {}),
            **({"snapshots": f"{_size(STAGE_BYTES)} of the GPU, in which copies are gathered"} if gpu_bytes is not None else {}),
            **({"standby on the GPU": _standby(config, shape, gpu_bytes)} if gpu_bytes is not None else {}),
        },
        "checkpoint": {
            "size": _size(checkpoint_bytes(config, shape)),
            "files": f"{files} in {arrays} arrays, on any layout",
        },
    }


def _gradients(config: Config, memory: Memory) -> str:
    """Args: config: with nothing left open of them."""
    kept = _size(memory.gradients)
    if memory.accumulated:
        kept += f", and {_size(memory.accumulated)} of {config.train.grad_dtype} that add up until the last backward pass"
    elif reduces_every(config):
        kept += ", to which every backward pass adds"
    return f"{kept}; {_size(memory.reducing)} while they are reduced"


def _verdict(config: Config, shape: GPTShape, gpu_bytes: int) -> str:
    spread = layout(config, cpu_count=1, gpu_count=1)
    problem = fit.too_much(config, shape, spread, gpu_bytes)
    left = f"of {_size(gpu_bytes)}, {_size(fit.budget(gpu_bytes))} are left to tensors"
    return f"fits: {left}" if problem is None else f"does not fit: {problem}"


def _standby(config: Config, shape: GPTShape, gpu_bytes: int) -> str:
    spread = layout(config, cpu_count=1, gpu_count=1)
    if fit.holds_standby(config, shape, spread, gpu_bytes):
        kernels = ""
        if fit.has_room_to_warm_kernels(config, shape, spread, gpu_bytes):
            warming = _size(warming_bytes(config, shape, spread))
            kernels = f", and {warming} more while it computes a layer, to have its kernels ready"
        elif spread.cp == spread.tp == 1:
            kernels = "; a layer's kernels are not made ready, for which there is no room"
        return f"{_size(fit.STANDBY)} beside the rank{kernels} (estimate)"
    why = "has no room" if config.resilience.gpu_standby == "auto" else "is not wanted"
    return f"{why} (resilience.gpu_standby): after a fault its context is made anew"


def _size(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
