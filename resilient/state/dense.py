"""Which tensors can be saved: dense ones whose elements lie in memory as they are, as plain tensors and DTensors have them."""

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy


def reason_against(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be saved, to follow its name and "is"; None where it can."""
    if tensor.layout != torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        return (
            f"a {kind} tensor, and only dense ones are saved: register its indices and values, or make it anew (persistent=False)"
        )
    if is_lazy(tensor):
        return "not initialized, and has no shape: call the model once before resilient.attach"
    if tensor.is_meta:
        return "on the meta device, and has no values: give it some (to_empty, or load its weights) before resilient.attach"
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # as quantized tensors, which hold others
        return (
            f"a {type(local).__module__}.{type(local).__qualname__}, and only plain tensors and DTensors are saved; where it is a "
            "weight that is never trained, give those that are: model=torch.nn.ParameterList(...)"
        )
    if local.is_conj() or local.is_neg():
        return "a view of conjugates, whose memory has other values: save what its resolve_conj().resolve_neg() returns"
    return None
