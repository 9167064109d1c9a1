"""Byte-level BPE: trained here, or given as GPT-2's `vocab.json` and `merges.txt`; kept as one `tokenizer.json`.

Every way in ends in the same checks, so that a tokenizer that exists can encode every text without loss. Text that spells a special
token is text: it never becomes that token.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.data.errors import DataError, StorageError

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # every byte, and the end of a text


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on texts. The same texts give the same tokenizer, however many threads there are.

    A text with too few different words gives fewer than `vocab_size` tokens.
    """
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def from_gpt2(vocab_file: Path, merges_file: Path) -> Tokenizer:
    """The tokenizer of GPT-2's two files.

    Raises:
        DataError: a file is missing or no such file, or the two do not fit together.
    """
    vocab = _json(vocab_file, "GPT-2's vocab.json")
    lines = _text(merges_file, "GPT-2's merges.txt").splitlines()
    merges = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#version")]
    pairs = []
    for number, line in merges:
        pair = line.split(" ")
        if len(pair) != 2:
            raise DataError(f"{merges_file}:{number} is {line!r}, and not two tokens with a space between; is it a merges.txt?")
        pairs.append((pair[0], pair[1]))
    return _checked(vocab, pairs, vocab_file, merges_file)


def load(path: Path) -> Tokenizer:
    """A tokenizer that was saved as `Tokenizer.to_str` gives it.

    Raises:
        DataError: it is missing, damaged, or not a byte-level BPE with an end-of-text token.
    """
    saved = _json(path, "a tokenizer.json")
    model = saved.get("model") if isinstance(saved, dict) else None
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(model.get("merges"), list):
        raise DataError(f"{path} is not a tokenizer.json with a byte-level BPE; build the dataset again")
    pairs = []
    for entry in model["merges"]:
        pair = entry.split(" ") if isinstance(entry, str) else entry
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise DataError(f"{path} has a merge {entry!r}, and not two tokens; build the dataset again")
        pairs.append((pair[0], pair[1]))
    return _checked(model.get("vocab"), pairs, path, path)


def from_json(serialized: str) -> Tokenizer:
    """The tokenizer that one of this module's own was serialized as."""
    tokenizer = Tokenizer.from_str(serialized)
    tokenizer.encode_special_tokens = True  # not part of what is saved
    return tokenizer


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest token."""
    return max(tokenizer.get_vocab().values()) + 1


def byte_alphabet() -> frozenset[str]:
    """The 256 characters by which a byte-level vocabulary writes bytes."""
    return frozenset(pre_tokenizers.ByteLevel.alphabet())


def _checked(vocab: Any, merges: Sequence[tuple[str, str]], vocab_file: Path, merges_file: Path) -> Tokenizer:
    """Build the tokenizer. What the library would refuse, or silently lose text with, is refused here by name."""
    whole = isinstance(vocab, dict) and all(type(number) is int and 0 <= number < 2**31 for number in vocab.values())
    if not whole or not vocab:
        raise DataError(f"{vocab_file} does not map tokens to whole numbers from 0 on, as GPT-2's vocab.json does")
    if len(set(vocab.values())) != len(vocab):
        raise DataError(f"{vocab_file} gives one number to several tokens")
    missing = [symbol for symbol in pre_tokenizers.ByteLevel.alphabet() if symbol not in vocab]
    if missing:
        raise DataError(
            f"{vocab_file} lacks {len(missing)} of the 256 byte symbols, {min(missing)!r} for one: it is no byte-level vocabulary, "
            "and text would be lost"
        )
    if END_OF_TEXT not in vocab:
        raise DataError(f"{vocab_file} has no {END_OF_TEXT} token, which separates documents")
    for left, right in merges:
        for token in (left, right, left + right):
            if token not in vocab:
                raise DataError(
                    f"{merges_file} merges {left!r} and {right!r}, and {vocab_file} has no {token!r}: they are not of one tokenizer"
                )
    tokenizer = _byte_level(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"there is no {path}; {what} is expected there") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}), as {what} is") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error


def _json(path: Path, what: str) -> Any:
    try:
        return json.loads(_text(path, what))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON, as {what} is: {error}") from error
