"""The checkpoint that a campaign begins from, made of the tensors of another house.

Reads one tensor of the source at a time and writes it before the next: memory stays at about two of the largest.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

import checkpoint
from checkpoint import CheckpointError, CheckpointMismatch, LocalShard
from checkpoint.errors import naming
from resilient.worker import Config, ConfigError, load_config
from trainer.conversion.families import Described, ImportRefused, Piece, SourceUnusable
from trainer.data.errors import DataError
from trainer.shape import GPTShape, Weight, shape_of
from trainer.sources import vocabulary
from trainer.state import WEIGHTS_ONLY, array_of

MODEL_FILE = "model.yaml"

_FREE = ("vocab", "seq_len", "dropout", "attention_dropout", "init_std", "depth_scaled")
_KEYS = {"tied": "tie_embeddings", "mup_base": "mup_base_hidden"}


@dataclass(frozen=True)
class Place:
    """Where the checkpoint will be, and of which model.

    Attributes:
        config: of the campaign, or of the source's model with all else as it is by default.
        given: the config is the campaign's.
    """

    output: Path
    root: Path
    config: Config
    shape: GPTShape
    given: bool


@dataclass(frozen=True)
class Arrays:
    """Tensors of the size of the parameters.

    Attributes:
        prefix: of the arrays' names.
        read: a tensor by the source's name of its parameter.
    """

    prefix: str
    read: Callable[[str], Tensor]


def place(found: Described, output: Path, config: Path | None) -> Place:
    """Raises ImportRefused, ConfigError, DataError: the config has another model, or there are checkpoints already."""
    settled = _config(found, output, config)
    shape = _shape(found, settled, given=config is not None)
    root = output / "checkpoints" if config is None else settled.checkpoint.tiers[-1].path
    if checkpoint.steps(root):
        raise ImportRefused(f"{root} has checkpoints already; choose another run directory")
    return Place(output, root, settled, shape, config is not None)


def write(
    where: Place,
    found: Described,
    made: Mapping[str, Piece | None],
    arrays: Sequence[Arrays],
    *,
    step: int = 0,
    consumed_samples: int = 0,
) -> Path:
    """Write and verify the checkpoint, and the model's keys where no config has them; its path.

    Args:
        made: where each parameter comes from.
        arrays: the model's; those of the optimizer behind it, without which training begins with a new one.

    Raises ImportRefused where a tensor is not as it should be; CheckpointError, OSError.
    """
    where.output.mkdir(mode=0o700, parents=True, exist_ok=True)
    state: dict[str, Any] = {"step": step, "consumed_samples": consumed_samples, "config": where.config.model_dump(mode="json")}
    if len(arrays) == 1:
        state[WEIGHTS_ONLY] = True
    shapes = [
        _local_shard(each.prefix, weight, torch.empty(weight.shape, device="meta"), where.shape)
        for each in arrays
        for weight in where.shape.weights()
    ]
    shards = chain.from_iterable(_local_shards(each, found, made, where.shape) for each in arrays)
    saved = checkpoint.save_one_by_one(where.root, step, shapes, shards, state)
    checkpoint.verify(saved.path)
    if not where.given:
        with naming(where.output / MODEL_FILE):
            (where.output / MODEL_FILE).write_text(yaml.safe_dump({"model": dict(found.model)}, sort_keys=False))
    return saved.path


def refused_as_mismatch(work: Callable[[], str]) -> str:
    """What `work` says; what it refuses becomes what the entry points of `resilient.importers` promise.

    Raises:
        CheckpointError: the source is not there, or is damaged.
        CheckpointMismatch: it, or the config, is not what can be gone on from.
    """
    try:
        return work()
    except SourceUnusable as error:
        raise CheckpointError(str(error)) from error
    except (ImportRefused, ConfigError, DataError) as error:
        raise CheckpointMismatch(str(error)) from error


def _config(found: Described, output: Path, config: Path | None) -> Config:
    if config is not None:
        return load_config(config, [f"run_dir={output.absolute()}"])
    try:
        return Config.model_validate({"run_dir": str(output.absolute()), "model": dict(found.model)})
    except ValueError as error:
        raise ImportRefused(f"the source's model is not one of this trainer: {error}") from error


def _shape(found: Described, settled: Config, *, given: bool) -> GPTShape:
    """The shape that both the source and the config have."""
    theirs = shape_of(Config.model_validate({"model": dict(found.model)}), found.model["vocab_size"])
    if not given:
        return theirs
    ours = shape_of(settled, vocabulary(settled))
    free = (*_FREE, "rope_theta") if ours.position != "rope" else _FREE
    wrong = [
        f"model.{_KEYS.get(each.name, each.name)} is {getattr(ours, each.name)}, not {getattr(theirs, each.name)}"
        for each in fields(GPTShape)
        if each.name not in free and getattr(ours, each.name) != getattr(theirs, each.name)
    ]
    if ours.vocab < found.model["vocab_size"]:
        wrong.append(f"model.vocab_size is {ours.vocab}, not at least {found.model['vocab_size']}")
    if ours.seq_len > found.longest or (ours.position == "learned" and ours.seq_len != found.longest):
        wrong.append(f"model.seq_len is {ours.seq_len}, not {found.longest}")
    if wrong:
        raise ImportRefused(f"the config has another model than the source: {'; '.join(wrong)}")
    return ours


def _local_shards(arrays: Arrays, found: Described, made: Mapping[str, Piece | None], shape: GPTShape) -> Iterator[LocalShard]:
    """One array for each parameter, in an order in which each tensor of the source is read once."""
    known = {weight.name: weight for weight in shape.weights()}
    users: dict[str, list[tuple[Weight, Piece]]] = {}
    for name, piece in made.items():
        if piece is None:
            yield _local_shard(arrays.prefix, known[name], torch.zeros(known[name].shape), shape)
        else:
            users.setdefault(piece.source, []).append((known[name], piece))
    for name, weights in users.items():
        tensor = arrays.read(name)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ImportRefused(f"{name} is of {tensor.dtype}; expected float32, bfloat16 or float16")
        for weight, piece in weights:
            try:
                part = _cut(tensor, piece, shape)
            except RuntimeError as error:
                raise ImportRefused(f"{name} has the shape {list(tensor.shape)}, which cannot be cut: {error}") from error
            wanted = weight.shape
            if weight.name in ("embedding.weight", "head.weight"):
                wanted = (found.rows or found.model["vocab_size"], *wanted[1:])
            if tuple(part.shape) != wanted:
                raise ImportRefused(f"{name} gives {weight.name} the shape {list(part.shape)}; the source says {list(wanted)}")
            # One copy, whatever was to be cut, turned, widened or filled up with rows of zeros.
            whole = torch.zeros(weight.shape)
            whole[: len(part)] = part[: len(whole)]
            yield _local_shard(arrays.prefix, weight, whole, shape)
            del part, whole
        del tensor


def _cut(tensor: Tensor, piece: Piece, shape: GPTShape) -> Tensor:
    """The rows and columns that a piece says; a view where that can be."""
    if piece.part == "transposed":
        return tensor.T
    if piece.part == "columns":  # of (in, 3 out), or of (3 out)
        part = tensor.chunk(3, dim=-1)[piece.index]
        return part.T if part.dim() == 2 else part
    if piece.part == "heads":  # of (heads, 3, head_dim, in), or without the last one
        return tensor.reshape(shape.heads, 3, -1, *tensor.shape[1:])[:, piece.index].flatten(0, 1)
    if piece.part == "groups":  # of (kv_heads, queries + 2, head_dim, in), or without the last one
        queries = shape.heads // shape.kv_heads
        grouped = tensor.reshape(shape.kv_heads, queries + 2, -1, *tensor.shape[1:])
        return (grouped[:, :queries].flatten(0, 2), grouped[:, queries].flatten(0, 1), grouped[:, queries + 1].flatten(0, 1))[
            piece.index
        ]
    if piece.part == "halves":
        return tensor.reshape(2, -1, *tensor.shape[1:])[piece.index]
    return tensor


def _local_shard(prefix: str, weight: Weight, tensor: Tensor, shape: GPTShape) -> LocalShard:
    array, stack = array_of(weight.name, shape.layers)
    return checkpoint.local_shard_of(f"{prefix}/{array}", tensor, stack=stack)
