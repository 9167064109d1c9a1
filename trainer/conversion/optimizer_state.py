"""The state of Megatron-LM's optimizer in the files of a rank: which of its numbered tensors belongs to which parameter. Pure.

A file numbers the parameters group by group, and does not name them: those with weight decay and those without are a group each, in
the order in which the model has them. What is found in that way is compared, by shape, and the master weights with the weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from trainer.conversion.pickled import is_tensor
from trainer.moments import ADAMW

WEIGHT, MASTER = "weight", "master"
_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")


class NotReadable(Exception):
    """The state is not there, or not in a form that is known."""


def by_parameter(file: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> Mapping[str, Mapping[str, Tensor]]:
    """Moments, and master weights where there are any, by the parameters' names.

    Args:
        file: of one rank.
        parameters: of it, in their order.

    Raises NotReadable.
    """
    outer = file.get("optimizer")
    if not isinstance(outer, dict):
        raise NotReadable("it has no state of an optimizer")
    inner = outer.get("optimizer", outer)
    state = inner.get("state") if isinstance(inner, dict) else None
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(state, dict) or not isinstance(groups, list) or not state:
        raise NotReadable("its optimizer's state is not that of one Adam")
    numbers = [_numbers(group) for group in groups]
    masters = next((outer[key] for key in _MASTERS if key in outer), None)
    tensors: dict[int, dict[str, Tensor]] = {}
    for place, group in enumerate(numbers):
        for index, number in enumerate(group):
            each = state.get(number)
            known = {moment: each[moment] for moment in ADAMW if moment in each} if isinstance(each, dict) else {}
            if masters is not None:
                known[MASTER] = _at(masters, place, index)
            if len(known) != len(ADAMW) + (masters is not None) or not all(map(is_tensor, known.values())):
                raise NotReadable("its optimizer's state lacks tensors of Adam's")
            tensors[number] = known
    names = _named(numbers, tensors, parameters)
    if masters is not None and not all(_rounds_to(tensors[number][MASTER], parameters[name]) for name, number in names.items()):
        raise NotReadable("its optimizer's master weights are in another order than its weights")
    kinds = (*ADAMW, *((MASTER,) if masters is not None else ()))
    return {kind: {name: tensors[number][kind] for name, number in names.items()} for kind in kinds}


def _numbers(group: object) -> list[int]:
    found = group.get("params") if isinstance(group, dict) else None
    if not isinstance(found, list) or not all(isinstance(each, int) for each in found):
        raise NotReadable("its optimizer's groups do not number their parameters")
    return found


def _at(masters: object, group: int, index: int) -> object:
    found = masters[group] if isinstance(masters, list) and group < len(masters) else ()
    return found[index] if isinstance(found, list) and index < len(found) else None


def _named(
    groups: Sequence[Sequence[int]], tensors: Mapping[int, Mapping[str, Tensor]], parameters: Mapping[str, Tensor]
) -> Mapping[str, int]:
    """Of each parameter its number."""
    found: dict[str, int] = {}
    for matrices in (True, False):
        names = [name for name, tensor in parameters.items() if (tensor.dim() > 1) is matrices]
        parts = [[each for each in group if (tensors[each][ADAMW[0]].dim() > 1) is matrices] for group in groups]
        filled = [part for part in parts if part]
        if len(filled) > 1 or sum(map(len, filled)) != len(names):
            raise NotReadable("its optimizer has other groups of parameters than those with weight decay and those without")
        found |= dict(zip(names, filled[0] if filled else [], strict=True))
    for name, number in found.items():
        if any(tensor.shape != parameters[name].shape for tensor in tensors[number].values()):
            raise NotReadable("its optimizer has parameters of other shapes than the model")
    return found


def _rounds_to(master: Tensor, weight: Tensor) -> bool:
    """Whether the first row of a master weight, rounded, is that of the weight."""
    return bool((master[:1].to(weight.dtype) == weight[:1]).all())
