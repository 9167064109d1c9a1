"""A stage of a pipeline whose gradients are reduced over the replicas within backward passes: in the last of a step, or in each.

PyTorch's own stage adds whole gradients up and reduces them when its last backward pass has ended, and its rank then waits for
that before it computes another stage. Here the reduction of a layer goes on while the layers before it compute, and the
stages of a rank do not wait for one another.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc, stage_backward, stage_backward_weight

from trainer.model import GPT
from trainer.parallel.data import begin_backward, reduce_now, sharded_groups

Result = tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]


class ReducingStage(PipelineStage):
    """A stage for PyTorch's schedules. After one, `finish` is called.

    Args:
        every: gradients are reduced in every backward pass, and shards add up; else in the last one.
    """

    def __init__(self, model: GPT, device: torch.device, group: dist.ProcessGroup, *, every: bool) -> None:
        super().__init__(model, model.stage.index, model.stage.count, device, group=group)
        self._every = every

    def _prepare_forward_infra(self, *args: Any, **options: Any) -> Any:
        """Random numbers are as before: torch 2.11 computes the stage here, once more in a rank that has started again."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            return super()._prepare_forward_infra(*args, **options)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Result:
        reduce = last_backward or self._every
        if backward_type == "input" or not reduce:
            found: Result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            return found
        assert isinstance(self.submod, FSDPModule)
        self.submod.set_is_last_backward(False)  # FSDP would have this rank wait for its reductions
        full = backward_type == "full"
        begin_backward(self.submod, reduce=full, reshard=False)
        if full:
            return stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]), None
        self._weights(bwd_kwargs["param_groups"])
        return (), None

    def _weights(self, parts: list[dict[str, Any]]) -> None:
        """The second part of a backward pass that a schedule has parted in two, layer by layer.

        FSDP's hooks, of which few run in it, and those at any time, leave the reductions to this.

        Args:
            parts: of the first part, each for some parameters.
        """
        parameters = {_get_grad_fn_or_grad_acc(each): each for each in self.submod.parameters()}
        for group in reversed(sharded_groups(self.submod)):
            nodes = {_get_grad_fn_or_grad_acc(each.unsharded_param) for each in group.fsdp_params}
            mine = [part for part in parts if nodes & part["params"]]
            parts = [part for part in parts if not nodes & part["params"]]
            stage_backward_weight(iter([parameters[node] for part in mine for node in part["params"]]), mine)
            reduce_now(group)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: it is done."""

    def finish(self) -> None:
        """After the last backward pass of all stages of this rank: go back to the shards, and wait for the reductions."""
        super().perform_reduce_grad(1)
