"""Directories of torch.distributed.checkpoint, as `FileSystemWriter` writes them: `.metadata` and `__N_M.distcp`.

Owns reading tensors from the chunks that ranks have written. The description is a pickle; nothing that it names is run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.conversion.families import ImportRefused, SourceUnusable
from trainer.conversion.pickled import Inert, fields, is_tensor, load_description, load_part

Sizes = tuple[int, ...]

_MOST = 1 << 48  # numbers in a tensor


@dataclass(frozen=True)
class Slice:
    """Bytes of a file."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor, and where it is stored."""

    offsets: Sizes
    sizes: Sizes
    stored: Slice


@dataclass(frozen=True)
class Stored:
    """A tensor."""

    shape: Sizes
    chunks: tuple[Chunk, ...]


class DCPFiles:
    """A directory of DCP.

    Attributes:
        tensors: by their names.
        objects: what is no tensor, by name.

    Raises ImportRefused where the description cannot be read, or speaks of files elsewhere; OSError.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        path = directory / ".metadata"
        about = fields(load_description(path))
        entries, storage = about.get("state_dict_metadata"), about.get("storage_data")
        if not isinstance(entries, dict) or not isinstance(storage, dict):
            raise ImportRefused(f"{path} is not the description of a checkpoint")
        try:
            places = {
                (_text(fields(index)["fqn"]), _sizes(fields(index).get("offset"))): _slice(info) for index, info in storage.items()
            }
            tensors = {_text(name): fields(entry) for name, entry in entries.items() if _is_a(entry, "TensorStorageMetadata")}
            self.tensors: Mapping[str, Stored] = {name: _stored(name, entry, places) for name, entry in tensors.items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SourceUnusable(f"{path} is damaged: {error!r}") from error
        self.objects: Mapping[str, Slice] = {name: place for (name, _), place in places.items() if name not in self.tensors}

    def read(self, name: str, layer: int | None = None) -> Tensor:
        """A tensor, or of one that has the layers in its first dimension one of them. Raises ImportRefused, OSError."""
        stored = self.tensors[name]
        shape = stored.shape if layer is None else stored.shape[1:]
        result: Tensor | None = None
        filled = 0
        for chunk in stored.chunks:
            offsets = chunk.offsets if layer is None else chunk.offsets[1:]
            if layer is not None and not chunk.offsets[0] <= layer < chunk.offsets[0] + chunk.sizes[0]:
                continue
            part = self._chunk(name, chunk)
            if layer is not None:
                part = part[layer - chunk.offsets[0]]
            filled += part.numel()
            if part.shape == shape:
                result = part
                continue
            if result is None:
                result = torch.empty(shape, dtype=part.dtype)
            if result.dtype != part.dtype:
                raise ImportRefused(f"{self._directory}: {name} is of {result.dtype} and of {part.dtype}")
            result[tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))] = part
            del part
        if result is None or filled != math.prod(shape):
            raise ImportRefused(f"{self._directory}: {name} has {filled} of {math.prod(shape)} numbers")
        return result

    def object(self, name: str) -> Any:
        """What is stored by that name. Raises ImportRefused, OSError."""
        place = self.objects[name]
        return load_part(self._directory / place.file, place.offset, place.length)

    def _chunk(self, name: str, chunk: Chunk) -> Tensor:
        stored = chunk.stored
        found = load_part(self._directory / stored.file, stored.offset, stored.length)
        if not is_tensor(found) or tuple(found.shape) != chunk.sizes:
            raise ImportRefused(
                f"{self._directory / stored.file}: {name} is not a tensor of floats of the shape {list(chunk.sizes)}"
            )
        return found  # type: ignore[no-any-return]


def _stored(name: str, entry: Mapping[str, Any], places: Mapping[tuple[str, Sizes | None], Slice]) -> Stored:
    shape = _known(entry["size"])
    chunks = []
    for each in entry["chunks"]:
        offsets, sizes = _known(fields(each)["offsets"]), _known(fields(each)["sizes"])
        ends = (start + size for start, size in zip(offsets, sizes, strict=True))
        if len(sizes) != len(shape) or any(end > full for end, full in zip(ends, shape, strict=True)):
            raise ValueError(f"a chunk of {name} is not inside of it")
        chunks.append(Chunk(offsets, sizes, places[name, offsets]))
    if len({chunk.offsets for chunk in chunks}) < len(chunks):
        raise ValueError(f"{name} has a chunk twice")
    return Stored(shape, tuple(chunks))


def _is_a(value: object, name: str) -> bool:
    return isinstance(value, Inert) and value.name.rpartition(".")[2] == name


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name is a {type(value).__name__}")
    return value


def _sizes(value: object) -> Sizes | None:
    """What a `torch.Size` was made of; None of None."""
    if value is None:
        return None
    numbers: object = value.args[0] if isinstance(value, Inert) and value.args else value
    if not isinstance(numbers, Sequence) or not all(type(each) is int and 0 <= each < _MOST for each in numbers):
        raise ValueError("sizes are not whole numbers")
    return tuple(numbers)


def _known(value: object) -> Sizes:
    found = _sizes(value)
    if found is None or math.prod(found) > _MOST:
        raise ValueError("sizes are missing, or of more numbers than there can be")
    return found


def _slice(info: object) -> Slice:
    found = fields(info)
    file, offset, length = _text(found["relative_path"]), found["offset"], found["length"]
    if Path(file).name != file or not file.endswith(".distcp"):
        raise ValueError(f"{file!r} is no file of the checkpoint")
    if type(offset) is not int or type(length) is not int:
        raise TypeError("a part of a file has no length")
    if found.get("transform_descriptors"):
        raise ValueError("it is compressed")
    return Slice(file, offset, length)
