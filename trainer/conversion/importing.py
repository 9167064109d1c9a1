"""`ckpt import`: weights of a Hugging Face model as a checkpoint of step 0, without an optimizer.

Reads one tensor of the source at a time and writes it before the next: memory stays at about two of the largest.
"""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

import checkpoint
from checkpoint import CheckpointMismatch, LocalShard
from resilient.worker import Config, ConfigError, load_config
from trainer.conversion.families import Described, ImportRefused, Piece, described, left_over, pieces
from trainer.conversion.source import Source
from trainer.data.errors import DataError
from trainer.shape import GPTShape, Weight, shape_of
from trainer.sources import vocabulary
from trainer.state import WEIGHTS_ONLY, array_of

MODEL_FILE = "model.yaml"

_FREE = ("vocab", "seq_len", "dropout", "attention_dropout", "init_std", "depth_scaled")
_KEYS = {"tied": "tie_embeddings", "mup_base": "mup_base_hidden"}


def import_checkpoint(source: Path, output: Path, *, config: Path | None = None) -> str:
    """Write the checkpoint of step 0 of a run directory; what was written, in a few words.

    The entry point `hf` of `resilient.importers`.

    Args:
        source: directory of config.json and safetensors.
        output: run directory; it must have no checkpoint.
        config: of the campaign that will begin there; without one, the model's keys are put into `output`/model.yaml.

    Raises:
        CheckpointError: the source cannot be read or expressed, the config has another model, or writing failed.
        OSError: `output` cannot be written.
    """
    try:
        opened = Source(source)
        found = described(opened.config, opened.names)
        settled = _config(found, output, config)
        shape = _shape(found, settled, given=config is not None)
        root = output / "checkpoints" if config is None else settled.checkpoint.tiers[-1].path
        if checkpoint.steps(root):
            raise ImportRefused(f"{root} has checkpoints already; choose another run directory")
        if shape.layers > len(opened.names):
            raise ImportRefused(f"{source}: config.json says {shape.layers} layers, and there are {len(opened.names)} tensors")
        made = pieces(found, shape)
        missing = [piece.source for piece in made.values() if piece is not None and piece.source not in opened.names]
        extra = left_over(opened.names, list(made.values()), shape)
        if missing or extra:
            raise ImportRefused(
                f"{source} is not what its config.json says: {len(missing)} tensors are missing {missing[:3]}, "
                f"{len(extra)} have no place {extra[:3]}"
            )
        output.mkdir(mode=0o700, parents=True, exist_ok=True)
        state: dict[str, Any] = {"step": 0, "consumed_samples": 0, WEIGHTS_ONLY: True, "config": settled.model_dump(mode="json")}
        shapes = [_local_shard(weight, torch.empty(weight.shape, device="meta"), shape) for weight in shape.weights()]
        saved = checkpoint.save_one_by_one(root, 0, shapes, _local_shards(opened, found, made, shape), state)
    except (ImportRefused, ConfigError, DataError) as error:
        raise CheckpointMismatch(str(error)) from error
    checkpoint.verify(saved.path)
    if config is None:
        (output / MODEL_FILE).write_text(yaml.safe_dump({"model": dict(found.model)}, sort_keys=False))
    return f"{found.family}, {shape.parameters:,} parameters, {saved.path}"


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
    if ours.vocab < theirs.vocab:
        wrong.append(f"model.vocab_size is {ours.vocab}, not at least {theirs.vocab}")
    if ours.seq_len > found.longest or (ours.position == "learned" and ours.seq_len != found.longest):
        wrong.append(f"model.seq_len is {ours.seq_len}, not {found.longest}")
    if wrong:
        raise ImportRefused(f"the config has another model than the source: {'; '.join(wrong)}")
    return ours


def _local_shards(opened: Source, found: Described, made: dict[str, Piece | None], shape: GPTShape) -> Iterator[LocalShard]:
    """The model's parameters, in an order in which each tensor of the source is read once."""
    heads = shape.heads
    known = {weight.name: weight for weight in shape.weights()}
    users: dict[str, list[tuple[Weight, Piece]]] = {}
    for name, piece in made.items():
        if piece is None:
            yield _local_shard(known[name], torch.zeros(known[name].shape), shape)
        else:
            users.setdefault(piece.source, []).append((known[name], piece))
    for name, weights in users.items():
        tensor = opened.read(name)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ImportRefused(f"{name} is of {tensor.dtype}; expected float32, bfloat16 or float16")
        for weight, piece in weights:
            try:
                part = _cut(tensor, piece, heads)
            except RuntimeError as error:
                raise ImportRefused(f"{name} has the shape {list(tensor.shape)}, which cannot be cut: {error}") from error
            wanted = weight.shape
            if weight.name in ("embedding.weight", "head.weight"):
                wanted = (found.model["vocab_size"], *wanted[1:])
            if tuple(part.shape) != wanted:
                raise ImportRefused(f"{name} gives {weight.name} the shape {list(part.shape)}; config.json says {list(wanted)}")
            # One copy, whatever was to be cut, turned, widened or filled up with rows of zeros.
            whole = torch.zeros(weight.shape)
            whole[: len(part)] = part
            yield _local_shard(weight, whole, shape)
            del part, whole
        del tensor


def _cut(tensor: Tensor, piece: Piece, heads: int) -> Tensor:
    if piece.part == "transposed":
        return tensor.T
    if piece.part == "columns":  # of (in, 3 out), or of (3 out)
        part = tensor.chunk(3, dim=-1)[piece.index]
        return part.T if part.dim() == 2 else part
    if piece.part == "heads":  # of (heads, 3, head_dim, in), or without the last one
        return tensor.reshape(heads, 3, -1, *tensor.shape[1:])[:, piece.index].flatten(0, 1)
    return tensor


def _local_shard(weight: Weight, tensor: Tensor, shape: GPTShape) -> LocalShard:
    array, stack = array_of(weight.name, shape.layers)
    return checkpoint.local_shard_of(f"model/{array}", tensor, stack=stack)
