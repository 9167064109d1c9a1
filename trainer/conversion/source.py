"""A directory of safetensors, one file or several, read tensor by tensor. Never unpickles anything."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.conversion.families import ImportRefused, SourceUnusable

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_BYTES = 64 << 20  # of a JSON file


class Source:
    """What `transformers` has saved.

    Attributes:
        config: of config.json.
        names: of all tensors, as its family calls them.

    Raises ImportRefused where the directory does not hold what it must.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.config = _mapping(directory / "config.json")
        if (directory / _INDEX).is_file():
            places = _mapping(directory / _INDEX).get("weight_map")
            if not isinstance(places, dict):
                raise ImportRefused(f"{directory / _INDEX} has no weight_map, which says in which file each tensor is")
            files = sorted({str(name) for name in places.values()})
        elif (directory / _WHOLE).is_file():
            files = [_WHOLE]
        else:
            raise SourceUnusable(f"{directory} has neither {_WHOLE} nor {_INDEX}; other formats of weights are not read")
        self._file_of: dict[str, tuple[str, str]] = {}
        for file in files:
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise SourceUnusable(f"{directory / _INDEX} names {file!r}, which is no safetensors file beside it")
            for name in self._keys(file):
                self._file_of[self._settled(name)] = (file, name)
        self.names = tuple(self._file_of)

    def read(self, name: str) -> Tensor:
        """A tensor. Raises ImportRefused."""
        if name not in self._file_of:
            raise SourceUnusable(f"{self._directory} has no tensor {name}")
        file, key = self._file_of[name]
        try:
            with safe_open(self._directory / file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(key)
                return tensor
        except (SafetensorError, OSError) as error:
            raise SourceUnusable(f"{self._directory / file}: {name} cannot be read: {error}") from error

    def _keys(self, file: str) -> list[str]:
        try:
            with safe_open(self._directory / file, framework="pt") as opened:
                return list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise SourceUnusable(f"{self._directory / file} cannot be read: {error}") from error

    def _settled(self, name: str) -> str:
        """GPT-2 is also stored without the prefix of its body."""
        if self.config.get("model_type") == "gpt2" and not name.startswith(("transformer.", "lm_head.")):
            return f"transformer.{name}"
        return name


def _mapping(path: Path) -> Mapping[str, Any]:
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            raise SourceUnusable(f"{path} is not there, or is no file of at most {_MOST_BYTES >> 20} MiB")
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SourceUnusable(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ImportRefused(f"{path} is not a mapping")
    return found
