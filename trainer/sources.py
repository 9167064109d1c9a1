"""Where a campaign's tokens come from: the config's data section, settled. Without torch."""

import functools
import json
from pathlib import Path

from checkpoint.naming import steps
from resilient.worker import Config, ConfigError, EnvironmentUnusable, Problem, accepted_keys
from trainer.data.errors import DataError, MissingError, StorageError, WorkerEndedError
from trainer.data.place import prepared_prefix

PREPARED = "data"  # in the run directory
END_OF_TEXT = "<|endoftext|>"


def datasets(config: Config) -> list[tuple[Path, float]]:
    """Prefixes of the indexed datasets, with their weights."""
    path = config.data.path
    if path is None:
        return [(prepared_prefix(config.run_dir / PREPARED), 1.0)]
    if isinstance(path, Path):
        return [(path, 1.0)]
    return [(entry.path, entry.weight) for entry in path]


def tokenizer_file(config: Config) -> Path:
    """Where the vocabulary of the first dataset stands."""
    return config.data.tokenizer.vocab_file or tokenizer_of_texts(config)


def tokenizer_of_texts(config: Config) -> Path:
    """The tokenizer.json beside the first dataset, which encodes and decodes texts; GPT-2's vocab.json alone cannot."""
    return Path(f"{datasets(config)[0][0]}.tokenizer.json")


def was_trained(config: Config) -> bool:
    """Whether there are checkpoints of this campaign, so that its data is not to be replaced. Step 0 has seen no data."""
    return any(steps(config.checkpoint.tiers[-1].path))


def with_other_data(config: Config) -> bool:
    """Whether somebody has accepted that the campaign goes on with other data."""
    return any(key.startswith("data.") for key in accepted_keys(config))


def vocabulary(config: Config) -> int:
    """Tokens that the data may hold.

    Raises:
        DataError: the config does not say, and the tokenizer's file is not there, or is none.
    """
    if config.model.vocab_size != "auto":
        return config.model.vocab_size
    return max(tokens_of(tokenizer_file(config)).values()) + 1


def end_of_text(config: Config) -> int | None:
    """The token that ends a document, where something asks for it.

    Raises:
        DataError: the tokenizer has none.
    """
    data = config.data
    if not (data.mask_documents or data.mask_end_of_text):
        return None
    if data.end_of_text != "auto":
        return data.end_of_text
    path = tokenizer_file(config)
    tokens = tokens_of(path)
    if END_OF_TEXT not in tokens:
        raise DataError(f"{path} has no token {END_OF_TEXT}; name the one that ends a document in data.end_of_text")
    return tokens[END_OF_TEXT]


def tokens_of(path: Path) -> dict[str, int]:
    """The tokens of a tokenizer.json, or of GPT-2's vocab.json, with their numbers. Raises DataError."""
    try:
        return _tokens_in(path, path.stat().st_mtime_ns)
    except OSError as error:
        kind = MissingError if isinstance(error, FileNotFoundError) else StorageError
        raise kind(f"{path} cannot be read: {error.strerror}; it says how many tokens the data may hold") from error


@functools.lru_cache(maxsize=4)
def _tokens_in(path: Path, changed_ns: int) -> dict[str, int]:
    """Read once, also by a process that was warmed up before it was a rank; `changed_ns` tells of a file that was replaced."""
    try:
        found = json.loads(path.read_bytes())
        model = found.get("model")  # GPT-2's vocab.json has a token of that name, too
        vocab = found if model is None or type(model) is int else model["vocab"]
        added = {token["content"]: token["id"] for token in found.get("added_tokens", [])} if vocab is not found else {}
        tokens: dict[str, int] = {**vocab, **added}
        if not tokens or not all(type(number) is int and 0 <= number < 1 << 31 for number in tokens.values()):
            raise ValueError("its tokens have no numbers")
        return tokens
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is no tokenizer: expected a tokenizer.json of a BPE, or GPT-2's vocab.json") from error


def refused(config: Config, error: DataError) -> ConfigError | EnvironmentUnusable:
    """How a command ends over such data: the config that names it is wrong, or its place or the memory for it is of no use now."""
    key = "data.text" if config.data.text is not None else "data.path"
    if isinstance(error, StorageError | WorkerEndedError):
        return EnvironmentUnusable(f"{key}: {error}")
    return ConfigError([Problem(key, None, str(error))])
