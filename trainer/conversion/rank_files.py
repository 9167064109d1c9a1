"""Megatron-LM's older checkpoints: a file of `torch.save` for each tensor- and pipeline-parallel rank.

    iter_0001000/mp_rank_TT/model_optim_rng.pt            one pipeline stage
    iter_0001000/mp_rank_TT_PPP/model_optim_rng.pt        several

Owns putting the parts of ranks together. Files are mapped: what is not read takes no memory.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.conversion.families import ImportRefused, SourceUnusable
from trainer.conversion.megatron_names import layer_of, merge_of, settled
from trainer.conversion.optimizer_state import WEIGHT, NotReadable, by_parameter
from trainer.conversion.pickled import fields, is_tensor, load_saved

_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(_\d{3})?")
_FILE = "model_optim_rng.pt"

Tensors = Mapping[str, Tensor]


class RankFiles:
    """A checkpoint of one file a rank.

    Attributes:
        args: with which Megatron-LM was started.
        iteration: steps that were taken.
        names: of all parameters, with the global number of their layer.
        kinds: of tensors that there are for each parameter.
        without: why the optimizer's state is not among them; None if it is.

    Raises ImportRefused where the directory does not hold what it must, OSError.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ranks = _ranks(directory)
        self._files: dict[tuple[int, int], Mapping[str, Any]] = {}
        first = self._file(0, 0)
        self.args = fields(first.get("args"))
        self.iteration = first.get("iteration", 0)
        _check_version(directory, first.get("checkpoint_version", 0))
        self._stages = self._located()
        self.names = tuple(self._stages)
        self._kinds: dict[tuple[int, int], Mapping[str, Tensors]] = {}
        self.without: str | None = None
        try:
            for rank in self._files:
                self._kinds[rank] = by_parameter(self._files[rank], self._parameters(*rank))
        except NotReadable as reason:
            self._kinds, self.without = {}, str(reason)
        if (directory / _folder(directory, 0, 0) / "distrib_optim.pt").is_file():
            self.without = "its distributed optimizer's flat buffers (distrib_optim.pt) are not read"
        kinds = {frozenset(each) for each in self._kinds.values()}
        if self.without is None and len(kinds) > 1:
            self.without = "its ranks have other tensors of their optimizer than one another"
        self.kinds: frozenset[str] = frozenset() if self.without else next(iter(kinds))

    def read(self, name: str, kind: str = WEIGHT) -> Tensor:
        """A tensor of all ranks: of a parameter, or of its size. Raises ImportRefused."""
        if name not in self._stages:
            raise ImportRefused(f"{self._directory} has no tensor {name}")
        stage, local = self._stages[name]
        parts = []
        for tp_rank in range(self._ranks[0]):
            known = self._parameters(tp_rank, stage) if kind == WEIGHT else self._kinds[tp_rank, stage][kind]
            if local not in known:
                raise ImportRefused(f"{self._directory}: rank {tp_rank}, {stage} has no {kind} of {name}")
            parts.append(known[local])
        return _merged(name, parts, gated=bool(self.args.get("swiglu")))

    def _file(self, tp_rank: int, pp_rank: int) -> Mapping[str, Any]:
        if (tp_rank, pp_rank) not in self._files:
            path = self._directory / _folder(self._directory, tp_rank, pp_rank) / _FILE
            found = load_saved(path)
            if not isinstance(found, dict):
                raise ImportRefused(f"{path} is not a mapping")
            self._files[tp_rank, pp_rank] = found
        return self._files[tp_rank, pp_rank]

    def _parameters(self, tp_rank: int, pp_rank: int) -> Tensors:
        """Of one rank, by its own names, which begin with the number of the chunk of a virtual pipeline; in their order."""
        return {
            f"{chunk}:{name}": tensor for chunk, model in _chunks(self._file(tp_rank, pp_rank)) for name, tensor in _flat("", model)
        }

    def _located(self) -> dict[str, tuple[int, str]]:
        """Of each parameter its pipeline rank, and its name there; layers are dealt chunk by chunk to the stages in turn."""
        tp, pp = self._ranks
        held: dict[tuple[int, int], list[str]] = {}
        for pp_rank in range(pp):
            names = list(self._parameters(0, pp_rank))
            for tp_rank in range(1, tp):
                if list(self._parameters(tp_rank, pp_rank)) != names:
                    raise ImportRefused(f"{self._directory}: ranks {tp_rank} and 0 of stage {pp_rank} have other parameters")
            for name in names:
                held.setdefault((int(name.partition(":")[0]), pp_rank), []).append(name)
        found: dict[str, tuple[int, str]] = {}
        before = 0
        for (_, pp_rank), names in sorted(held.items()):
            layers = set()
            for local in names:
                name = local.partition(":")[2]
                layer = layer_of(name)
                if layer is not None:
                    layers.add(layer[0])
                    name = f"decoder.layers.{before + layer[0]}.{layer[1]}"
                found.setdefault(name, (pp_rank, local))  # the embedding before the copy of it that is a head
            if layers != set(range(len(layers))):
                raise ImportRefused(f"{self._directory}: stage {pp_rank} has the layers {sorted(layers)}, which have gaps")
            before += len(layers)
        return found


def _ranks(directory: Path) -> tuple[int, int]:
    """Tensor- and pipeline-parallel size, from the names of the directories."""
    found = [match for match in (_RANK.fullmatch(path.name) for path in directory.iterdir()) if match]
    if any(match[3] for match in found):
        raise ImportRefused(f"{directory} has directories of expert-parallel ranks; mixtures of experts are not read")
    ranks = {(int(match[1]), int(match[2] or 0)) for match in found}
    tp, pp = (1 + max((rank[which] for rank in ranks), default=-1) for which in (0, 1))
    if not ranks or len(ranks) != tp * pp or len(found) != len(ranks):
        raise SourceUnusable(
            f"{directory} has {len(found)} directories mp_rank_TT or mp_rank_TT_PPP, which are not those of all ranks"
        )
    return tp, pp


def _folder(directory: Path, tp_rank: int, pp_rank: int) -> str:
    alone = f"mp_rank_{tp_rank:02d}"
    return alone if (directory / alone).is_dir() else f"{alone}_{pp_rank:03d}"


def _check_version(directory: Path, version: object) -> None:
    """In files of version 2 and above queries, keys and values lie group by group."""
    if not isinstance(version, int | float) or version < 2:
        raise ImportRefused(f"{directory} has checkpoint_version {version}; expected 2.0 or more: save it anew by Megatron-LM")


def _chunks(file: Mapping[str, Any]) -> Iterator[tuple[int, object]]:
    """The models of a rank: one, or those of its virtual pipeline stages."""
    if "model" in file:
        yield 0, file["model"]
    number = 0
    while f"model{number}" in file:
        yield number, file[f"model{number}"]
        number += 1


def _flat(prefix: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested mappings, by the names that Megatron-core would give them."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(f"{prefix}{key}.", each)
    elif isinstance(value, Tensor):
        name = settled(prefix[:-1])
        if name is not None:
            if not is_tensor(value):
                raise ImportRefused(f"{prefix[:-1]} is a tensor of {value.dtype} that is not read: it must be dense, and of floats")
            yield name, value


def _merged(name: str, parts: list[Tensor], *, gated: bool) -> Tensor:
    how = merge_of(name, gated=gated)
    if len(parts) == 1 or how == "same":
        return parts[0]
    try:
        if how == "halves":
            halves = [part.chunk(2) for part in parts]
            return torch.cat([half[which] for which in (0, 1) for half in halves])
        return torch.cat(parts, dim=1 if how == "columns" else 0)
    except (RuntimeError, IndexError) as error:
        raise ImportRefused(f"{name}: the parts of the ranks do not fit together: {error}") from error
