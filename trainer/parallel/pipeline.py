"""A stage of a pipeline whose gradients are reduced over the replicas in every backward pass."""

from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward

from trainer.parallel.data import begin_backward, reduce_now


class ReducingStage(PipelineStage):
    """PyTorch's own stage adds whole gradients up until the schedule is through; this one keeps shards between passes.

    The reduction of a layer goes on while the layers before it compute. Where a schedule parts the backward pass in two, layers are
    reduced after the second part.
    """

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        if backward_type != "full":
            found = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            if backward_type == "weight":
                reduce_now(self.submod)
            return found
        assert isinstance(self.submod, FSDPModule)
        self.submod.set_is_last_backward(False)
        begin_backward(self.submod, reduce=True, reshard=False)
        return stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]), None
