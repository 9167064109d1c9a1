"""The whole model of a checkpoint, in one process: to write text with it, or to hand it on. fp32, on the CPU."""

from pathlib import Path

import torch
from pydantic import ValidationError

import checkpoint
from resilient.worker import Config
from trainer.model import GPT
from trainer.shape import shape_of
from trainer.state import array_of


class RestoreError(Exception):
    """There is no model to be had from there."""


def find(path: Path) -> Path:
    """The checkpoint that a path means: itself, or of a run directory (or a tier in it) the newest one.

    Raises:
        RestoreError: there is none.
    """
    if path.name.startswith("step-"):
        if path.is_dir():
            return path
        raise RestoreError(f"{path} is not there")
    for root in (path, path / "checkpoints"):
        found = checkpoint.steps(root) if root.is_dir() else []
        if found:
            return checkpoint.step_path(root, max(found))
    raise RestoreError(f"{path} has no checkpoint; name a run directory, or a directory step-<8 digits>")


def restore(path: Path) -> tuple[GPT, Config]:
    """The model of a checkpoint, and the config that trained it.

    Raises:
        RestoreError: the checkpoint is damaged, or not this trainer's.
    """
    import zarr

    try:
        config = Config.model_validate(checkpoint.read_state(path)["config"])
        vocab = zarr.open_group(path, mode="r")["model/embedding.weight"].shape[0]  # type: ignore[union-attr]
        with torch.device("meta"):
            model = GPT(shape_of(config, vocab))
        model.to_empty(device="cpu")
        if model.shape.tied:  # which moving to a device forgets
            model.head.weight = model.embedding.weight
        local_shards = []
        for name, parameter in model.named_parameters():
            array, stack = array_of(name, model.shape.layers)
            local_shards.append(checkpoint.local_shard_of(f"model/{array}", parameter, stack=stack))
        checkpoint.load(path, local_shards)
    except (checkpoint.CheckpointError, KeyError, ValidationError) as error:
        raise RestoreError(f"{path} holds no model of this trainer: {error}") from error
    return model.eval(), config
