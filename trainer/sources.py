"""Where a campaign's tokens come from: the config's data section, settled. Without torch."""

import json
from pathlib import Path

from resilient.worker import Config, ConfigError, Problem
from trainer.data.errors import DataError

PREPARED = "data"  # in the run directory


def datasets(config: Config) -> list[tuple[Path, float]]:
    """Prefixes of the indexed datasets, with their weights."""
    path = config.data.path
    if path is None:
        return [(config.run_dir / PREPARED / "corpus", 1.0)]
    if isinstance(path, Path):
        return [(path, 1.0)]
    return [(entry.path, entry.weight) for entry in path]


def tokenizer_file(config: Config) -> Path:
    """Where the vocabulary of the first dataset stands."""
    return config.data.tokenizer.vocab_file or Path(f"{datasets(config)[0][0]}.tokenizer.json")


def vocabulary(config: Config) -> int:
    """Tokens that the data may hold.

    Raises:
        DataError: the tokenizer's file is not there, or is none.
    """
    path = tokenizer_file(config)
    try:
        found = json.loads(path.read_bytes())
        vocab = found["model"]["vocab"] if "model" in found else found
        numbers: list[int] = [*vocab.values(), *(token["id"] for token in found.get("added_tokens", []))]
        return max(numbers) + 1
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; it says how many tokens the data may hold") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no tokenizer: expected a tokenizer.json of a BPE, or GPT-2's vocab.json") from error


def refused(config: Config, error: DataError) -> ConfigError:
    """The error of the config that names such data."""
    return ConfigError([Problem("data.text" if config.data.text is not None else "data.path", None, str(error))])
