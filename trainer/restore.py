"""The whole model of a checkpoint, in one process: to write text with it, to evaluate it, or to hand it on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError

import checkpoint
from checkpoint.loading import contents_of
from checkpoint.naming import step_of
from resilient.worker import Config, ConfigError, load_config
from trainer.attention import Kernel
from trainer.kernels import choose
from trainer.model import GPT
from trainer.shape import shape_of
from trainer.sources import PREPARED
from trainer.state import array_of


class RestoreError(Exception):
    """There is no model to be had from there."""


def find(path: Path) -> Path:
    """The checkpoint that a path means: itself, or of a run directory (or a tier in it) the newest one.

    Raises:
        RestoreError: there is none.
    """
    if step_of(path) is not None:
        if path.is_dir():
            return path
        raise RestoreError(f"{path} is not there")
    root = root_of(path)
    if root is not None:
        return checkpoint.step_path(root, max(checkpoint.steps(root)))
    raise RestoreError(f"{path} has no checkpoint; name a run directory, or a directory step-<8 digits>")


def root_of(path: Path) -> Path | None:
    """The directory with the checkpoints of a run directory, or of a tier; None where there is no checkpoint."""
    return next((root for root in _roots(path) if root.is_dir() and checkpoint.steps(root)), None)


def _roots(path: Path) -> Iterator[Path]:
    yield path
    yield path / "checkpoints"
    written = path / "config.yaml"
    if written.is_file():
        try:
            config = load_config(written)
        except ConfigError as error:
            raise RestoreError(str(error)) from error
        durable = config.checkpoint.tiers[-1].path
        if not durable.is_relative_to(config.run_dir) or path.resolve() == config.run_dir.resolve():  # else that of the run copied
            yield durable


def restore(
    path: Path,
    device: torch.device | None = None,
    precision: Literal["trained", "bf16", "fp32"] = "fp32",
    *,
    named: Path | None = None,
) -> tuple[GPT, Config]:
    """The model of a checkpoint, and the config that trained it.

    Where the run directory was copied or moved since, the config has the paths of what lies in it now.

    Args:
        device: where it will compute, with the fastest attention there; None: on the CPU, with the plainest.
        precision: of the weights, in which it computes; `trained`: that of the campaign.
        named: the path that the checkpoint was found by: it may be a run directory, of which a tier lies elsewhere.

    Raises:
        RestoreError: the checkpoint is damaged, or not this trainer's.
    """
    try:
        contents, _ = contents_of(path)
        config = _where_it_is(Config.model_validate(contents.state["config"]), path, named)
        vocab = contents.arrays["model/embedding.weight"].shape[0]
        shape, dtype = shape_of(config, vocab), _dtype(config, precision)
        masked = config.data.mask_documents
        kernel = Kernel.MATH if device is None else choose("auto", shape, device, dtype, documents=masked)
        with torch.device("meta"):
            model = GPT(shape, kernel)
        model.to_empty(device="cpu")
        if model.shape.tied:  # which moving to a device forgets
            model.head.weight = model.embedding.weight
        local_shards = []
        for name, parameter in model.named_parameters():
            array, stack = array_of(name, model.shape.layers)
            local_shards.append(checkpoint.local_shard_of(f"model/{array}", parameter, stack=stack))
        checkpoint.load(path, local_shards)
    except (checkpoint.CheckpointError, LookupError, ValidationError) as error:
        raise RestoreError(f"{path} holds no model of this trainer: {error}") from error
    return model.to(device, dtype).eval(), config


def _where_it_is(config: Config, path: Path, named: Path | None) -> Config:
    """The config with paths in its run directory as they are now. Args: path: of the checkpoint."""
    durable, root = config.checkpoint.tiers[-1].path, path.absolute().parent
    possible = [] if named is None or named.absolute() == root else [named.absolute()]
    if durable.is_relative_to(config.run_dir):
        inside = durable.relative_to(config.run_dir)
        possible += [above for above in root.parents if above / inside == root]
    run_dir = next(filter(_holds_a_run, possible), config.run_dir)
    return Config.model_validate(_moved(config.model_dump(), config.run_dir, run_dir))


def _holds_a_run(path: Path) -> bool:
    """Whether it is a run directory with data of its own, or one that was moved. One that was branched off may have none yet."""
    if (path / PREPARED).is_dir():
        return True
    try:
        return load_config(path / "config.yaml").run_dir.resolve() != path.resolve()
    except ConfigError:
        return False


def _moved(value: Any, before: Path, now: Path) -> Any:
    """A part of a config, with the paths in the directory `before` in the directory `now`."""
    if isinstance(value, Path):
        return now / value.relative_to(before) if value.is_relative_to(before) else value
    if isinstance(value, dict):
        return {name: _moved(each, before, now) for name, each in value.items()}
    return [_moved(each, before, now) for each in value] if isinstance(value, list) else value


def _dtype(config: Config, precision: str) -> torch.dtype:
    wanted = config.train.precision if precision == "trained" else precision
    return torch.bfloat16 if wanted == "bf16" else torch.float32
