"""Bytes of text that tokens stand for."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from resilient.worker import Config
from trainer.data.errors import DataError
from trainer.data.tokenizer import END_OF_TEXT, byte_alphabet
from trainer.sources import tokenizer_file, tokens_of

Bytes = np.ndarray[Any, np.dtype[np.int64]]

_ONE_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "\u2581"  # as SentencePiece writes it


def token_sizes(path: Path, vocab: int) -> Bytes | None:
    """Bytes of text that each token of a tokenizer stands for, (vocab); 0 for special ones. None: it is no kind that is known here.

    Known are byte-level BPE, in which each character of a token is a byte, and SentencePiece's with byte fallback.

    Raises:
        DataError: the file cannot be read, or is no tokenizer.
    """
    tokens = tokens_of(path)
    alphabet = byte_alphabet()
    byte_level = all(symbol in tokens for symbol in alphabet)
    if not byte_level and not all(f"<0x{byte:02X}>" in tokens for byte in range(256)):
        return None
    special = _special(path) | {END_OF_TEXT}
    sizes = np.zeros(vocab, np.int64)
    for token, number in tokens.items():
        if token in special or number >= vocab:
            continue
        if byte_level:
            sizes[number] = len(token) if alphabet.issuperset(token) else len(token.encode(errors="replace"))
        else:
            sizes[number] = 1 if _ONE_BYTE.fullmatch(token) else len(token.replace(_SPACE, " ").encode(errors="replace"))
    return sizes


def _special(path: Path) -> set[str]:
    added = json.loads(path.read_bytes()).get("added_tokens", [])
    return {token["content"] for token in added if token.get("special")} if isinstance(added, list) else set()


def sizes_of(config: Config, tokenizer: Path | None, vocab: int) -> Bytes | None:
    """Those of a campaign's tokenizer, or of another file, (vocab); None where they are not to be had.

    Raises:
        DataError: that other file cannot be read, or is no tokenizer.
    """
    if tokenizer is not None:
        return token_sizes(tokenizer, vocab)
    try:
        return token_sizes(tokenizer_file(config), vocab)
    except DataError:
        return None
