"""Where text comes from: files, or the corpus; cut into pieces that can be tokenized apart.

Owns reading and the cutting. Reading the bytes and making text of them are apart, so that the second can be done by several
processes. Never tokenizes.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from checkpoint.sampled import sampled
from trainer.data import corpus
from trainer.data.errors import DataError, StorageError
from trainer.data.tokenizer import END_OF_TEXT

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PIECE_BYTES = 1 << 19  # a longer document is tokenized in pieces
BATCH_BYTES = 1 << 18

_MARK = END_OF_TEXT.encode()


class Piece(NamedTuple):
    """A document or a part of one, as it lies in the file."""

    origin: str
    line: int  # at which it starts
    json_key: str | None  # of the text in a JSON object; None: it is the text
    raw: bytes
    ends: bool  # the document


Batch = list[Piece]


class Files:
    """Text files and JSONL files.

    A text file is one document, or several, separated by lines that say `<|endoftext|>`. In a JSONL file (.jsonl, .ndjson, .json)
    each line is an object with one document. A document of white space alone is left out.

    Raises:
        DataError: a file is missing or is none.
    """

    def __init__(self, paths: Sequence[Path], json_key: str = "text") -> None:
        if not paths:
            raise DataError("no file is named, so there is no text")
        self.paths, self._key = [Path(path) for path in paths], json_key
        for path in self.paths:
            if not path.exists():
                raise DataError(f"there is no file {path}")
            if not path.is_file():
                raise DataError(f"{path} is not a file; name the files themselves")

    @cached_property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def identity(self) -> Any:
        """JSON that changes when what is in the files does, as far as their sizes and samples of them say."""
        try:
            found = sampled(self.paths)
        except OSError as error:
            raise StorageError(f"{error.filename} cannot be read: {error.strerror}") from error
        return {"files": [list(each) for each in found], "json_key": self._key}

    def identities(self) -> list[Any]:
        """The same, and as earlier versions had it: by sizes and times."""
        stats = [(str(path.resolve()), path.stat()) for path in self.paths]
        times = {"files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats], "json_key": self._key}
        return [self.identity(), times]

    def pieces(self) -> Iterator[Piece]:
        """All text, in order."""
        for path in self.paths:
            try:
                yield from self._jsonl(path) if path.suffix.lower() in JSON_SUFFIXES else self._text(path)
            except OSError as error:
                raise StorageError(f"{path} cannot be read: {error.strerror}") from error

    def _jsonl(self, path: Path) -> Iterator[Piece]:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield Piece(str(path), number, self._key, line, True)

    def _text(self, path: Path) -> Iterator[Piece]:
        lines: list[bytes] = []
        first, size = 1, 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip() == _MARK:
                    yield Piece(str(path), first, None, b"".join(lines), True)
                    lines, first, size = [], number + 1, 0
                    continue
                if size >= PIECE_BYTES and _separable(lines, line):
                    # The cut is before the line feed: there the tokenizer would cut in any case.
                    lines[-1] = lines[-1][:-1]
                    yield Piece(str(path), first, None, b"".join(lines), False)
                    lines, first, size = [b"\n"], number - 1, 1
                lines.append(line)
                size += len(line)
        yield Piece(str(path), first, None, b"".join(lines), True)


class Corpus:
    """The prose that Python carries."""

    paths: Sequence[Path] = ()

    @cached_property
    def _documents(self) -> list[bytes]:
        return [text.encode() for text in corpus.documents()]

    @property
    def size_bytes(self) -> int:
        return sum(len(text) for text in self._documents)

    def identity(self) -> Any:
        """Without the version of Python: a run that goes on under a newer one keeps the text that it began with."""
        return {"corpus": corpus.LIMIT_BYTES}

    def identities(self) -> list[Any]:
        """See `Files`."""
        return [self.identity()]

    def pieces(self) -> Iterator[Piece]:
        """All text, in order."""
        for text in self._documents:
            yield Piece("the documentation of Python", 1, None, text, True)


Source = Files | Corpus


def batches(pieces: Iterable[Piece]) -> Iterator[Batch]:
    """The pieces in groups of about BATCH_BYTES."""
    batch: Batch = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.raw)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def text_of(piece: Piece) -> str:
    """The text of a piece.

    Raises:
        DataError: it is not UTF-8, not JSON, or not an object with that key.
    """
    where = f"{piece.origin}:{piece.line}"
    try:
        text = piece.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = piece.line + piece.raw.count(b"\n", 0, error.start)
        raise DataError(f"{piece.origin}:{line} is not UTF-8 text: {error.reason}; convert the file, or name another") from error
    if piece.line == 1:
        text = text.removeprefix("\ufeff")
    if piece.json_key is not None:
        text = _value(text, piece.json_key, where)
    return "" if text.isspace() else text


def _value(line: str, key: str, where: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}; each line of a JSONL file is one object") from error
    if not isinstance(found, dict):
        raise DataError(f"{where} is a JSON {type(found).__name__}; each line of a JSONL file is one object")
    if key not in found:
        raise DataError(f"{where} has no key {key!r}, only {', '.join(map(repr, found)) or 'none'}; see --json-key")
    text = found[key]
    if not isinstance(text, str):
        raise DataError(f"{where} has {type(text).__name__} under {key!r} instead of text; see --json-key")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where} has half a character (a lone surrogate) under {key!r}: {error.reason}") from error
    return text


def _separable(lines: Sequence[bytes], following: bytes) -> bool:
    """Whether byte-level BPE cuts before the last line feed of `lines` in any case, and neither side is white space alone.

    Its pre-tokenizer takes white space before a visible character in two parts: all but the last character, and that one.
    """
    visible = not following[:4].decode(errors="replace")[0].isspace()
    return visible and any(not line.decode(errors="replace").isspace() for line in reversed(lines))
