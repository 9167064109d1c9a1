"""`ckpt import --format hf`: weights of a Hugging Face model as a checkpoint of step 0, without an optimizer."""

from pathlib import Path

from trainer.conversion import beginning
from trainer.conversion.beginning import Arrays
from trainer.conversion.families import ImportRefused, described, left_over, pieces
from trainer.conversion.source import Source


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
    return beginning.refused_as_mismatch(lambda: _imported(source, output, config))


def _imported(source: Path, output: Path, config: Path | None) -> str:
    opened = Source(source)
    found = described(opened.config, opened.names)
    where = beginning.place(found, output, config)
    if where.shape.layers > len(opened.names):
        raise ImportRefused(f"{source}: config.json says {where.shape.layers} layers, and there are {len(opened.names)} tensors")
    made = pieces(found, where.shape)
    missing = [piece.source for piece in made.values() if piece is not None and piece.source not in opened.names]
    extra = left_over(opened.names, list(made.values()), where.shape)
    if missing or extra:
        raise ImportRefused(
            f"{source} is not what its config.json says: {len(missing)} tensors are missing {missing[:3]}, "
            f"{len(extra)} have no place {extra[:3]}"
        )
    path = beginning.write(where, found, made, [Arrays("model", opened.read)])
    return f"{found.family}, {where.shape.parameters:,} parameters, {path}"
