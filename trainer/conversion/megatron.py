"""`ckpt import --format megatron`: a checkpoint of Megatron-LM as one of this trainer.

With the state of its optimizer training goes on at its iteration; without, the weights are those of step 0.
"""

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from trainer.conversion import beginning
from trainer.conversion.beginning import Arrays
from trainer.conversion.families import Described, ImportRefused
from trainer.conversion.megatron_args import model_of
from trainer.conversion.megatron_names import layer_of, left_over, pieces
from trainer.conversion.optimizer_state import MASTER, WEIGHT
from trainer.conversion.rank_files import RankFiles
from trainer.conversion.torch_dist import TorchDist
from trainer.moments import ADAMW

_TRACKER = "latest_checkpointed_iteration.txt"


class _Opened(Protocol):
    """A checkpoint of either format; see `RankFiles`."""

    names: tuple[str, ...]
    kinds: frozenset[str]
    without: str | None

    def read(self, name: str, kind: str = WEIGHT) -> Tensor: ...


def import_megatron(source: Path, output: Path, *, config: Path | None = None) -> str:
    """Write a checkpoint of a run directory from one of Megatron-LM; what was written, in a few words.

    The entry point `megatron` of `resilient.importers`.

    Args:
        source: what was given to --save, or one iteration in it.
        output: run directory; it must have no checkpoint.
        config: of the campaign that will go on there; without one, the model's keys are put into `output`/model.yaml.

    Raises:
        CheckpointError: the source cannot be read or expressed, the config has another model, or writing failed.
        OSError: a file cannot be read or written.
    """
    return beginning.refused_as_mismatch(lambda: _imported(source, output, config))


def _imported(source: Path, output: Path, config: Path | None) -> str:
    directory = _iteration(source)
    opened = TorchDist(directory) if (directory / "metadata.json").is_file() else RankFiles(directory)
    found = model_of(opened.args)
    where = beginning.place(found, output, config)
    layers = {layer[0] for layer in map(layer_of, opened.names) if layer is not None}
    if len(layers) != where.shape.layers or max(layers) >= len(layers):
        raise ImportRefused(f"{directory}: its arguments say {where.shape.layers} layers, and its tensors are of {len(layers)}")
    made = pieces(found, where.shape)
    missing = sorted({piece.source for piece in made.values() if piece is not None} - set(opened.names))
    extra = left_over(opened.names, made.values(), tied=where.shape.tied)
    if missing or extra:
        raise ImportRefused(
            f"{directory} is not what its arguments say: {len(missing)} tensors are missing {missing[:3]}, "
            f"{len(extra)} have no place {extra[:3]}"
        )
    without = opened.without
    if without is None and where.config.optimizer.name != "adamw":
        without = f"the config's optimizer is {where.config.optimizer.name}, not adamw"
    step = _count("iteration", opened.iteration, 10**8)
    consumed = _count("consumed_train_samples", opened.args.get("consumed_train_samples", 0), 1 << 62)
    if without is None and step == 0:
        without = "it is of no iteration"
    if without is not None:
        path = beginning.write(where, found, made, [Arrays("model", opened.read)])
        return f"{_summary(found, where.shape.parameters)}, {path}; the weights alone, from step 0: {without}"
    path = beginning.write(where, found, made, _arrays(opened), step=step, consumed_samples=consumed)
    return f"{_summary(found, where.shape.parameters)} with their optimizer, step {step}, {consumed:,} samples, {path}"


def _arrays(opened: _Opened) -> list[Arrays]:
    def reader(kind: str) -> Arrays:
        prefix = "model" if kind in (WEIGHT, MASTER) else f"optimizer/{kind}"
        return Arrays(prefix, lambda name: opened.read(name, kind))

    return [reader(MASTER if MASTER in opened.kinds else WEIGHT), *map(reader, ADAMW)]


def _summary(found: Described, parameters: int) -> str:
    return f"{found.family}, {parameters:,} parameters"


def _iteration(source: Path) -> Path:
    """The directory of one iteration: the source itself, or the one that its tracker names. Raises ImportRefused, OSError."""
    tracker = source / _TRACKER
    if not tracker.is_file():
        return source
    with tracker.open("rb") as file:
        said = file.read(64).strip()
    if said == b"release":
        return source / "release"
    if not said.isdigit() or len(said) > 18:
        raise ImportRefused(f"{tracker} says {said.decode(errors='replace')!r}; expected a number, or release")
    return source / f"iter_{int(said):07d}"


def _count(name: str, value: Any, below: int) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise ImportRefused(f"the source has {name} {value!r}; expected a number below {below:,}")
    return value
