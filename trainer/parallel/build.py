"""From a config to this rank's part of the model, spread and on its device."""

import torch

from resilient.worker import Config
from trainer.attention import Kernel
from trainer.loss import CrossEntropy
from trainer.model import GPT, Block
from trainer.parallel import data, recompute, tensor
from trainer.parallel.ranks import Ranks
from trainer.shape import GPTShape
from trainer.stages import Stage, of_rank


def build_stages(config: Config, shape: GPTShape, kernel: Kernel, ranks: Ranks, device: torch.device) -> list[GPT]:
    """This rank's stages on `device`, their memory not yet written: fill it by `trainer.weights`, or from a checkpoint."""
    return [build(config, shape, kernel, ranks, device, stage) for stage in of_rank(config, ranks.layout, ranks.pp_rank)]


def build(config: Config, shape: GPTShape, kernel: Kernel, ranks: Ranks, device: torch.device, stage: Stage) -> GPT:
    """One stage. Made on the meta device, so that no rank ever holds more than its part."""
    parallel, train = config.parallel, config.train
    with torch.device("meta"):
        model = GPT(shape, kernel, stage)
    if parallel.tp > 1:
        tensor.apply(model, ranks.tensor, sequence_parallel=parallel.sequence_parallel, overlap=parallel.async_tp)
    recompute.apply(model, train.recompute, train.recompute_every)
    if train.compile is True:
        # A layer that breaks into several graphs loses what compiling gains, and only this tells of it; older releases of the
        # flash-attn package break it.
        for block in model.blocks.values():
            block.compile(fullgraph=kernel is not Kernel.FLASH_ATTN)
        if model.stage.last:
            model.head.loss = CrossEntropy(compiled=True)
    kind = {"precision": train.precision, "grad_dtype": train.grad_dtype}
    data.apply(model, ranks.shards, **kind, zero_stage=parallel.zero_stage)
    model.to_empty(device=device)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        block.attention.keep_rotations(device)
    return model
