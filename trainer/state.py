"""Everything that training goes on from, to and from a checkpoint.

Weights and the optimizer's moments are global arrays, layers stacked along a first dimension; random number generators are one
array over the ranks; the rest is a small mapping in the checkpoint's attributes.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import checkpoint
from resilient import worker
from trainer.model import GPT
from trainer.optimizer import MOMENTS

_LAYER = re.compile(r"blocks\.(\d+)\.(.+)")


@dataclass
class Progress:
    """How far training has come. The consumed samples are the whole state of the data loader."""

    step: int = 0
    consumed_samples: int = 0


class TrainingState:
    """Model, optimizer and progress of one rank, saved and loaded as one."""

    def __init__(self, config: worker.Config, model: GPT, optimizer: torch.optim.Optimizer, context: worker.Context) -> None:
        self._config = config
        self._model = model
        self._optimizer = optimizer
        self._context = context
        self._root = config.checkpoint.tiers[-1].path
        self.progress = Progress()

    def save(self) -> None:
        """Save to the durable tier, together with all ranks; tells the ledger."""
        tier = self._config.checkpoint.tiers[-1]
        with worker.phase("snapshot"):
            saved = checkpoint.save(
                self._root,
                self.progress.step,
                [*self._arrays(), self._random_numbers(_random_state())],
                self._small(),
                generation=self._context.generation,
                keep_last=tier.keep_last,
            )
        if self._context.rank == 0:
            where = {"step": saved.step, "tier": tier.name, "bytes": saved.bytes}
            worker.report({**where, "stall_s": saved.write_s, "write_s": saved.write_s}, event="snapshot")
            worker.report({**where, "files": saved.files}, event="committed")

    def resume(self, initialize: Callable[[], None]) -> None:
        """Load the newest good checkpoint, or where there is none call `initialize`.

        Raises:
            checkpoint.NoUsableCheckpoint: there are checkpoints, and all are damaged.
            checkpoint.CheckpointMismatch: they are of another model.
        """
        tier = self._config.checkpoint.tiers[-1].name

        def rejected(step: int, reason: str) -> None:
            worker.report({"step": step, "tier": tier, "reason": reason}, event="checkpoint_rejected")

        path = checkpoint.newest_good(self._root, on_reject=rejected)
        if path is None:
            initialize()
        else:
            self._load(path)
        if self._context.rank == 0:
            worker.report({"step": self.progress.step, "tier": tier}, event="resumed")

    def _load(self, path: Path) -> None:
        state = checkpoint.read_state(path)
        same_ranks = state.get("world_size") == self._context.world_size
        numbers = torch.empty_like(_random_state())
        pieces = self._arrays()
        # Generators belong to ranks: on another number of ranks they start anew from the seed.
        checkpoint.load(path, [*pieces, self._random_numbers(numbers)] if same_ranks else pieces)
        if same_ranks:
            torch.set_rng_state(numbers)
        self.progress = Progress(_number(state, "step"), _number(state, "consumed_samples"))
        for moments in self._optimizer.state.values():
            moments["step"].fill_(float(self.progress.step))

    def _arrays(self) -> list[checkpoint.Piece]:
        pieces = []
        layers = self._model.shape.layers
        for name, parameter in self._model.named_parameters():
            layer = _LAYER.fullmatch(name)
            array = f"blocks.{layer[2]}" if layer else name
            stack = (int(layer[1]), layers) if layer else None
            state = self._optimizer.state[parameter]
            pieces.append(checkpoint.pieces_of(f"model/{array}", parameter, stack=stack))
            pieces += [checkpoint.pieces_of(f"optimizer/{moment}/{array}", state[moment], stack=stack) for moment in MOMENTS]
        return pieces

    def _random_numbers(self, numbers: torch.Tensor) -> checkpoint.Piece:
        world, rank = self._context.world_size, self._context.rank
        return checkpoint.Piece("random/torch", (world, len(numbers)), (rank, 0), numbers.unsqueeze(0), unit=(1, len(numbers)))

    def _small(self) -> Mapping[str, Any]:
        return {
            "step": self.progress.step,
            "consumed_samples": self.progress.consumed_samples,
            "world_size": self._context.world_size,
            "generation": self._context.generation,
            "config": self._config.model_dump(mode="json"),
            "versions": {name: version(name) for name in ("resilient", "torch", "zarr", "numpy")},
        }


def _number(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if not isinstance(value, int):
        raise checkpoint.CheckpointMismatch(f"the checkpoint's state has no number {name!r}: it is not this trainer's")
    return value


def _random_state() -> torch.Tensor:
    return torch.get_rng_state()
