"""Byte-level BPE: trained here, or given as GPT-2's `vocab.json` and `merges.txt`; kept as one `tokenizer.json`."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.data.errors import DataError

END_OF_TEXT = "<|endoftext|>"


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on texts. The same texts in the same order give the same tokenizer."""
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
    """The tokenizer of GPT-2's two files. Raises DataError if they are missing, no such files, or lack the end-of-text token."""
    for path in (vocab_file, merges_file):
        if not path.is_file():
            raise DataError(f"there is no {path}; a GPT-2 tokenizer has a vocab.json and a merges.txt")
    try:
        vocab = json.loads(vocab_file.read_text(encoding="utf-8"))
        if not isinstance(vocab, dict) or not all(isinstance(value, int) for value in vocab.values()):
            raise DataError(f"{vocab_file} is not a mapping of tokens to numbers, as GPT-2's vocab.json is")
        tokenizer = _byte_level(models.BPE.from_file(str(vocab_file), str(merges_file)))
    except (ValueError, UnicodeDecodeError) as error:
        raise DataError(f"{vocab_file} is not JSON: {error}") from error
    except DataError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower for a file that it does not like
        raise DataError(f"{vocab_file} and {merges_file} are not a GPT-2 tokenizer: {error}") from error
    if END_OF_TEXT not in vocab:
        raise DataError(f"{vocab_file} has no {END_OF_TEXT} token, which separates documents")
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def load(path: Path) -> Tokenizer:
    """A tokenizer that was saved. Raises DataError."""
    if not path.is_file():
        raise DataError(f"there is no {path}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # as above
        raise DataError(f"{path} is not a tokenizer: {error}") from error


def _byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
