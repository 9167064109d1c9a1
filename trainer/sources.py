"""Where a campaign's tokens come from: the config's data section, settled. Without torch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilient.worker import Config

PREPARED = "data"  # in the run directory


def datasets(config: "Config") -> list[tuple[Path, float]]:
    """Prefixes of the indexed datasets, with their weights."""
    path = config.data.path
    if path is None:
        return [(config.run_dir / PREPARED / "corpus", 1.0)]
    if isinstance(path, Path):
        return [(path, 1.0)]
    return [(entry.path, entry.weight) for entry in path]


def tokenizer_file(config: "Config") -> Path:
    """Where the vocabulary of the first dataset stands."""
    return config.data.tokenizer.vocab_file or Path(f"{datasets(config)[0][0]}.tokenizer.json")


def vocabulary(config: "Config") -> int:
    """Tokens that the data may hold.

    Raises:
        FileNotFoundError: there is no tokenizer beside the dataset, and none is named.
    """
    found = json.loads(tokenizer_file(config).read_bytes())
    vocab = found["model"]["vocab"] if "model" in found else found
    numbers: list[int] = [*vocab.values(), *(token["id"] for token in found.get("added_tokens", []))]
    return max(numbers) + 1


Progress = Callable[[str, int, int], None]
