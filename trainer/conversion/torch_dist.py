"""Megatron-LM's present checkpoints (`--ckpt-format torch_dist`): tensors by global name in a directory of DCP.

Layers are stacked (`decoder.layers.self_attention...`, the layer first) or by name (`decoder.layers.3.self_attention...`). The
gate of an MLP and its way up are one tensor, or two that end in `_w` and `_v`. Moments have the shape of the weights, or are
flattened in each tensor-parallel part.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.conversion.dcp_files import DCPFiles
from trainer.conversion.families import ImportRefused, SourceUnusable
from trainer.conversion.megatron_names import settled
from trainer.conversion.optimizer_state import MASTER, WEIGHT
from trainer.conversion.pickled import fields, load_saved
from trainer.moments import ADAMW

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(fp32_param|param|exp_avg|exp_avg_sq)\.(.+)")
_KINDS = {"fp32_param": MASTER, "param": MASTER, **{moment: moment for moment in ADAMW}}
_STACKED = re.compile(r"decoder\.layers\.(?!\d)(.+)")
_COMMON_STATE = "common_state/shard_0_1"
_MOST_BYTES = 1 << 20  # of metadata.json

Place = tuple[str, int | None]
"""A tensor of the directory, and the layer of it."""


class TorchDist:
    """A checkpoint of torch_dist; the attributes are those of `RankFiles`.

    Raises ImportRefused where the directory does not hold what it must, OSError.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        _check_backend(directory)
        self._files = DCPFiles(directory)
        common = self._common()
        self.args = fields(common.get("args"))
        self.iteration = common.get("iteration", 0)
        self._places: dict[tuple[str, str], list[Place]] = {}
        for stored in sorted(self._files.tensors, key=lambda name: not name.endswith("_w")):  # the gate is first
            self._locate(stored)
        self.names = tuple(name for kind, name in self._places if kind == WEIGHT)
        found = {kind for kind in (MASTER, *ADAMW) if any(each == kind for each, _ in self._places)}
        whole = {kind for kind in found if all((kind, name) in self._places for name in self.names)}
        self.without: str | None = None
        if not whole.issuperset(ADAMW):
            flat = any(".distributed." in name for name in (*self._files.tensors, *self._files.objects))
            self.without = (
                "its distributed optimizer's state lies in flat buffers (save with --dist-ckpt-optim-fully-reshardable)"
                if flat
                else "its optimizer's state is not there for all parameters"
                if found
                else "it has no state of an optimizer"
            )
        self.kinds: frozenset[str] = frozenset() if self.without else frozenset(whole)

    def read(self, name: str, kind: str = WEIGHT) -> Tensor:
        """A tensor: of a parameter, or of its size. Raises ImportRefused, OSError."""
        if (kind, name) not in self._places:
            raise ImportRefused(f"{self._directory} has no {kind} of {name}")
        parts = [
            self._part(place, weight) for place, weight in zip(self._places[kind, name], self._places[WEIGHT, name], strict=False)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, place: Place, weight: Place) -> Tensor:
        (stored, layer), (model, _) = place, weight
        found = self._files.read(stored, layer)
        shape = self._files.tensors[model].shape[0 if layer is None else 1 :]
        return found if tuple(found.shape) == shape else _unflattened(stored, found, shape)

    def _common(self) -> dict[str, Any]:
        path = self._directory / "common.pt"
        if path.is_file():
            found = load_saved(path)
        elif _COMMON_STATE in self._files.objects:
            found = self._files.object(_COMMON_STATE)
            found = found[0] if isinstance(found, list) and found else found
        else:
            raise SourceUnusable(f"{self._directory} has neither common.pt nor {_COMMON_STATE}, which have the model's arguments")
        if not isinstance(found, dict):
            raise ImportRefused(f"{path}: the common state is not a mapping")
        return found

    def _locate(self, stored: str) -> None:
        state = _STATE.fullmatch(stored)
        if state is None and stored.startswith(("optimizer.", "chained_")):
            return
        kind, named = (_KINDS[state[1]], state[2]) if state else (WEIGHT, stored)
        name = settled(named)
        if name is None:
            return
        name = re.sub(r"(\.linear_fc1\.(?:weight|bias))_[wv]$", r"\1", name)
        stacked = _STACKED.fullmatch(name)
        if stacked is None:
            self._places.setdefault((kind, name), []).append((stored, None))
            return
        layers = (self._files.tensors[stored].shape or (0,))[0]
        if layers > _MOST_BYTES:
            raise ImportRefused(f"{self._directory}: {stored} has {layers} layers")
        for layer in range(layers):
            self._places.setdefault((kind, f"decoder.layers.{layer}.{stacked[1]}"), []).append((stored, layer))


def _unflattened(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor that is held as (parts along each dimension…, numbers of a part), in the shape of its parameter."""
    grid = tuple(tensor.shape[:-1])
    if len(grid) != len(shape) or any(count < 1 or full % count for full, count in zip(shape, grid, strict=True)):
        raise ImportRefused(f"{name} has the shape {list(tensor.shape)}, which is not that of its parameter, {list(shape)}")
    inner = tuple(full // count for full, count in zip(shape, grid, strict=True))
    if math.prod(inner) != tensor.shape[-1]:
        raise ImportRefused(f"{name} has {tensor.shape[-1]} numbers in a part; its parameter has {math.prod(inner)}")
    order = [each for dim in range(len(shape)) for each in (dim, len(shape) + dim)]
    return tensor.reshape(*grid, *inner).permute(order).reshape(shape)


def _check_backend(directory: Path) -> None:
    path = directory / "metadata.json"
    try:
        found = json.loads(path.read_bytes()) if path.stat().st_size <= _MOST_BYTES else None
    except (ValueError, RecursionError) as error:
        raise SourceUnusable(f"{path} cannot be read: {error}") from error
    backend = found.get("sharded_backend") if isinstance(found, dict) else None
    if backend != "torch_dist":
        raise ImportRefused(f"{path} has sharded_backend {backend!r}; only 'torch_dist' is read")
