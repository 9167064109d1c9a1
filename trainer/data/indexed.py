"""The indexed dataset of Megatron-LM: tokens in `<prefix>.bin`, where documents begin and end in `<prefix>.idx`.

The index: 9 bytes of magic; version (u64); code of the token type (u8); number of sequences (u64); number of document boundaries
(u64); then the length of each sequence in tokens (i32), where each starts in the .bin in bytes (i64), and at which sequence each
document starts, with the total at the end (i64). All little-endian. Written here, every document is one sequence.

Owns these bytes. Knows nothing of text or of samples.
"""

import os
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from trainer.data.durable import beside, publish, write_beside
from trainer.data.errors import DataError, MissingError, StorageError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
LONGEST_SEQUENCE = 2**31 - 1  # lengths are i32
_CHUNK = 1 << 20  # sequences looked at or written at a time

Tokens = np.ndarray[Any, Any]


def bin_path(prefix: Path) -> Path:
    """Where the tokens are."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path) -> Path:
    """Where the index is."""
    return Path(f"{prefix}.idx")


def token_type(vocabulary: int) -> np.dtype[Any]:
    """The type that Megatron-LM stores a vocabulary of this size in."""
    return np.dtype("<u2" if vocabulary < 65500 else "<i4")


class IndexedWriter:
    """Writes a dataset, token by token to disk; it appears under its name only with `commit`, and is dropped without it.

    Args:
        prefix: path without suffix; its directory exists, and nobody else writes there.
        dtype: of the tokens.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self._prefix = prefix
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next(code for code, name in TOKEN_TYPES.items() if np.dtype(name) == self._dtype)
        self._lengths = array("i")
        self._pending = 0
        self._sidecars: list[Path] = []
        self.tokens = 0
        self._file = beside(bin_path(prefix)).open("wb")

    @property
    def documents(self) -> int:
        """Documents that have ended."""
        return len(self._lengths)

    def add(self, tokens: Sequence[int] | Tokens, *, end: bool = True) -> None:
        """Append tokens to the document at hand; `end` ends it. A document without tokens is left out.

        Raises:
            DataError: a token does not fit the type, or the document is too long for the format.
        """
        values = np.asarray(tokens)
        if len(values):
            if values.dtype != self._dtype:
                values = self._fitting(values)
            self._file.write(values.tobytes())
            self._pending += len(values)
            self.tokens += len(values)
        if self._pending > LONGEST_SEQUENCE:
            raise DataError(
                f"document {self.documents + 1} of {self._prefix} has more than {LONGEST_SEQUENCE:,} tokens, the most that the "
                "format holds; split it"
            )
        if end and self._pending:
            self._lengths.append(self._pending)
            self._pending = 0

    def commit(self, sidecars: Mapping[Path, bytes] | None = None) -> None:
        """Make everything durable and put it in place: the sidecars, the .bin, and last the .idx. An open document ends."""
        self.add((), end=True)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        with beside(idx_path(self._prefix)).open("wb") as file:
            file.writelines(self._index())
            file.flush()
            os.fsync(file.fileno())
        for path, content in (sidecars or {}).items():
            self._sidecars.append(path)
            write_beside(path, content)
        publish([*self._sidecars, bin_path(self._prefix), idx_path(self._prefix)])

    def _index(self) -> Iterator[bytes]:
        lengths = np.asarray(self._lengths)
        count = len(lengths)
        yield HEADER.pack(MAGIC, VERSION, self._code, count, count + 1)
        for at in range(0, count, _CHUNK):
            yield lengths[at : at + _CHUNK].astype("<i4").tobytes()
        start = 0
        for at in range(0, count, _CHUNK):
            ends = np.cumsum(lengths[at : at + _CHUNK], dtype=np.int64) * self._dtype.itemsize + start
            yield np.concatenate(([start], ends[:-1])).astype("<i8").tobytes()
            start = int(ends[-1])
        for at in range(0, count + 1, _CHUNK):
            yield np.arange(at, min(at + _CHUNK, count + 1), dtype="<i8").tobytes()

    def _fitting(self, values: Tokens) -> Tokens:
        low, high = int(values.min()), int(values.max())
        bounds = np.iinfo(self._dtype)
        if values.dtype.kind not in "iu" or low < bounds.min or high > bounds.max:
            raise DataError(f"tokens {low} to {high} do not fit {self._dtype}, which {self._prefix} is written in")
        return values.astype(self._dtype)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._file.close()
        except OSError:  # what is left in its buffer has no room, either
            if kind is None:
                raise
        finally:
            for path in (bin_path(self._prefix), idx_path(self._prefix), *self._sidecars):
                beside(path).unlink(missing_ok=True)


class IndexedDataset:
    """A dataset, memory-mapped: opening costs one look at the index, whatever the number of tokens.

    Args:
        prefix: path without suffix.

    Attributes:
        tokens: all tokens, (tokens,).
        lengths, starts, documents: the three tables of the index.

    Raises:
        DataError: a file is truncated, foreign, or the two do not belong together.
        MissingError: a file is not there.
        StorageError: a file cannot be read.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self._idx, self._bin = idx_path(prefix), bin_path(prefix)
        sequences, boundaries, self.dtype = self._header()
        index = _mapped(self._idx, np.dtype("u1"))
        at = HEADER.size
        self.lengths: Tokens = np.frombuffer(index, "<i4", sequences, at)
        self.starts: Tokens = np.frombuffer(index, "<i8", sequences, at + 4 * sequences)
        self.documents: Tokens = np.frombuffer(index, "<i8", boundaries, at + 12 * sequences)
        self._check_documents()
        self._check_tokens(self._checked_total())
        self.tokens: Tokens = _mapped(self._bin, self.dtype)

    def __len__(self) -> int:
        """Documents."""
        return len(self.documents) - 1

    def boundary(self, document: int) -> int:
        """The token at which a document starts; for the number of documents, the number of tokens."""
        sequence = int(self.documents[document])
        if sequence == len(self.starts):
            return len(self.tokens)
        return int(self.starts[sequence]) // self.dtype.itemsize

    def _header(self) -> tuple[int, int, np.dtype[Any]]:
        try:
            with self._idx.open("rb") as file:
                head = file.read(HEADER.size)
                size = os.fstat(file.fileno()).st_size
        except FileNotFoundError as error:
            raise MissingError(f"there is no {self._idx}{self._hint()}") from error
        except OSError as error:
            raise StorageError(f"{self._idx} cannot be read: {error.strerror}") from error
        if not MAGIC.startswith(head[: len(MAGIC)]):
            legacy = ", but an index of fairseq's old kind" if head.startswith(b"TNTIDX") else f": it starts with {head[:9]!r}"
            raise DataError(f"{self._idx} is not the index of a Megatron-LM dataset{legacy}; build it again from the text")
        if size < HEADER.size:
            raise DataError(f"{self._idx} is truncated: {size} bytes, and the header alone has {HEADER.size}; build it again")
        _, version, code, sequences, boundaries = HEADER.unpack(head)
        if version != VERSION:
            raise DataError(f"{self._idx} has version {version}; this reader knows version {VERSION}")
        if code not in TOKEN_TYPES:
            raise DataError(f"{self._idx} has token type {code}; known are 1 to {max(TOKEN_TYPES)}")
        dtype = np.dtype(TOKEN_TYPES[code])
        if dtype.kind not in "iu":
            raise DataError(f"{self._idx} holds {dtype.name} (token type {code}); tokens are whole numbers")
        expected = HEADER.size + 12 * sequences + 8 * boundaries
        if size < expected:
            raise DataError(f"{self._idx} is truncated: {size} bytes instead of {expected}; build it again")
        if size not in (expected, expected + sequences):  # a multimodal index ends with one more byte per sequence
            raise DataError(f"{self._idx} is damaged: {size} bytes instead of {expected}; build it again")
        if sequences == 0 or boundaries < 2:
            raise DataError(f"{self._idx} holds no document; build it again from files that hold text")
        return sequences, boundaries, dtype

    def _check_documents(self) -> None:
        sequences = len(self.starts)
        pieces = [self.documents[at : at + _CHUNK + 1] for at in range(0, len(self.documents) - 1, _CHUNK)]
        ascending = all((piece[1:] >= piece[:-1]).all() for piece in pieces)  # a difference may be more than 64 bits hold
        if self.documents[0] != 0 or self.documents[-1] != sequences or not ascending:
            raise DataError(f"{self._idx} is damaged: its documents do not cover its {sequences} sequences; build it again")

    def _checked_total(self) -> int:
        """Tokens that the index speaks of, when its sequences lie one after the other."""
        start = 0
        for at in range(0, len(self.lengths), _CHUNK):
            lengths, starts = self.lengths[at : at + _CHUNK], self.starts[at : at + _CHUNK]
            if (lengths < 0).any():
                wrong = at + int(np.argmax(lengths < 0))
                raise DataError(f"{self._idx} is damaged: sequence {wrong} has length {self.lengths[wrong]}; build it again")
            ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize + start
            expected = np.concatenate(([start], ends[:-1]))
            if not np.array_equal(starts, expected):
                wrong = int(np.argmax(starts != expected))
                raise DataError(
                    f"{self._idx} is damaged: sequence {at + wrong} starts at byte {starts[wrong]} instead of {expected[wrong]}, "
                    "where the one before it ends; build it again"
                )
            start = int(ends[-1])
        return start // self.dtype.itemsize

    def _check_tokens(self, tokens: int) -> None:
        expected = tokens * self.dtype.itemsize
        try:
            size = self._bin.stat().st_size
        except FileNotFoundError as error:
            raise MissingError(f"there is no {self._bin}, which {self._idx} belongs to; build it again") from error
        except OSError as error:
            raise StorageError(f"{self._bin} cannot be read: {error.strerror}") from error
        if size != expected:
            state = "truncated" if size < expected else "not the one that the index was made for"
            raise DataError(f"{self._bin} is {state}: {size} bytes, and {self._idx} speaks of {expected}; build it again")
        if size == 0:
            raise DataError(f"{self._bin} holds no token; build it again from files that hold text")

    def _hint(self) -> str:
        if self.prefix.suffix in (".bin", ".idx"):
            return f"; give the prefix alone: {self.prefix.with_suffix('')}"
        return "; build it with `resilient data build`, or correct the path"


def _mapped(path: Path, dtype: np.dtype[Any]) -> Tokens:
    try:
        return np.memmap(path, dtype, "r").view(np.ndarray)
    except FileNotFoundError as error:  # it was there a moment ago
        raise MissingError(f"there is no {path} any more") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
