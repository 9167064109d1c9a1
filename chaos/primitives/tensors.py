"""Numbers that go wrong in any training script: torch's global hooks, which see every module and every optimizer of the process.

Runs in the workers. What is local to the rank is changed: of a DTensor its own shard. torch is imported where it is needed.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from chaos.injectors.context import Follower
from resilient.config.sections.training import Guard

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

MAX_SKIPS: int = Guard().max_skips
"""So many bad batches are left out one after the other, unless the config says otherwise; one more, and the run is rolled back."""

TOP_EXPONENT_BIT = {2: 14, 4: 30, 8: 62}  # by bytes of an element; of bfloat16 and of float16 alike


def spoil_gradients(*, once: bool) -> Callable[[], None]:
    """From now on the gradients that flow back into a module are no numbers; returns what ends that.

    Args:
        once: only the next ones.
    """
    import torch
    from torch.nn.modules.module import register_module_forward_hook

    def spoil(module: object, given: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: gradient * math.nan)  # type: ignore[no-untyped-call]
            if once:
                handle.remove()

    handle = register_module_forward_hook(spoil)
    return handle.remove


def scale_outputs(factor: float, *, once: bool) -> Callable[[], None]:
    """From now on what the outermost module returns is so many times as large; returns what ends that.

    Args:
        once: only the next time.
    """
    import torch
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    depth = 0

    def enter(module: object, given: object) -> None:
        nonlocal depth
        depth += 1

    def leave(module: object, given: object, output: object) -> object:
        nonlocal depth
        depth -= 1
        if depth:
            return None
        if once:
            stop()
        return scaled(output)

    def scaled(output: object) -> object:
        if isinstance(output, torch.Tensor):
            return output * factor if output.is_floating_point() else output
        if isinstance(output, tuple | list):
            return type(output)(map(scaled, output))
        return output

    def stop() -> None:
        for handle in handles:
            handle.remove()

    handles: list[RemovableHandle] = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]  # type: ignore[arg-type]
    return stop


def flip_after_next_update(report: Callable[[dict[str, object]], object]) -> None:
    """Flip the top exponent bit of one weight after the optimizer's next step; `report` gets the weight before and after."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def flip(optimizer: "torch.optim.Optimizer", *_: object) -> None:
        matrices = [
            local
            for group in optimizer.param_groups
            for parameter in group["params"]
            if (local := _local(parameter)).dim() > 1 and local.numel() and local.is_floating_point()
        ]
        if not matrices:
            return
        handle.remove()
        with torch.no_grad():
            weight = matrices[-1][(0,) * matrices[-1].dim()]
            before = weight.item()
            bits = weight.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()])
            bits ^= 1 << TOP_EXPONENT_BIT[weight.element_size()]
        report({"before": repr(before), "after": repr(weight.item()), "matrices": len(matrices)})

    handle = register_optimizer_step_post_hook(flip)


def until_finished(step: int, stop: Callable[[], None]) -> Follower:
    """For `RankContext.follow`: stop it when this step is finished."""

    def follow(phase: str | None, at: int) -> bool:
        over = phase is None and at >= step
        if over:
            stop()
        return not over

    return follow


def _local(tensor: Any) -> "torch.Tensor":
    """This rank's part of a parameter, in the same memory."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return cast("torch.Tensor", local.detach())
