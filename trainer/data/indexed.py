"""The indexed dataset of Megatron-LM: tokens in `<prefix>.bin`, where documents begin and end in `<prefix>.idx`.

The index: 9 bytes of magic; version (u64); code of the token type (u8); number of sequences (u64); number of document boundaries
(u64); then the length of each sequence in tokens (i32), where each starts in the .bin in bytes (i64), and at which sequence each
document starts, with the total at the end (i64). All little-endian. Here every document is one sequence.
"""

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from trainer.data.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16,
}  # fmt: skip
_CODES = {np.dtype(kind): code for code, kind in TOKEN_TYPES.items()}

Tokens = np.ndarray[Any, Any]


def bin_path(prefix: Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path) -> Path:
    return Path(f"{prefix}.idx")


def token_type(vocabulary: int) -> type[np.generic]:
    """The type that Megatron-LM stores a vocabulary of this size in."""
    return np.uint16 if vocabulary < 65500 else np.int32


class IndexedWriter:
    """Writes a dataset document by document; it appears under its name only when `close` has made it durable.

    Args:
        prefix: path without suffix; its directory exists.
        dtype: of the tokens.
    """

    def __init__(self, prefix: Path, dtype: type[np.generic]) -> None:
        self._prefix = prefix
        self._dtype = np.dtype(dtype)
        self._lengths: list[int] = []
        self._pending = 0
        self._new_bin = bin_path(prefix).with_suffix(f".bin.new{os.getpid()}")
        self._new_idx = idx_path(prefix).with_suffix(f".idx.new{os.getpid()}")
        self._file = self._new_bin.open("wb")

    @property
    def tokens(self) -> int:
        return sum(self._lengths) + self._pending

    def add(self, tokens: Sequence[int] | Tokens, *, end: bool = True, closing: int | None = None) -> None:
        """Append tokens to the document at hand; `end` ends it, with the token `closing`. One without tokens is left out."""
        array = np.asarray(tokens, dtype=self._dtype)
        self._file.write(array.tobytes())
        self._pending += len(array)
        if end and self._pending:
            if closing is not None:
                self._file.write(np.asarray([closing], self._dtype).tobytes())
                self._pending += 1
            self._lengths.append(self._pending)
            self._pending = 0

    def close(self) -> None:
        """Write the index and put both files in place, the index last."""
        _sync_and_close(self._file)
        with self._new_idx.open("wb") as file:
            lengths = np.asarray(self._lengths, dtype="<i4")
            starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)[:-1])) if self._lengths else np.empty(0)
            count = len(lengths)
            file.write(HEADER.pack(MAGIC, VERSION, _CODES[self._dtype], count, count + 1))
            file.write(lengths.tobytes())
            file.write((starts * self._dtype.itemsize).astype("<i8").tobytes())
            file.write(np.arange(count + 1, dtype="<i8").tobytes())
            file.flush()
            os.fsync(file.fileno())
        idx_path(self._prefix).unlink(missing_ok=True)
        self._new_bin.replace(bin_path(self._prefix))
        self._new_idx.replace(idx_path(self._prefix))

    def discard(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        self._new_bin.unlink(missing_ok=True)
        self._new_idx.unlink(missing_ok=True)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def _sync_and_close(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


class IndexedDataset:
    """A dataset, memory-mapped.

    Args:
        prefix: path without suffix.

    Raises:
        DataError: a file is missing, truncated, foreign, or the two do not belong together.
    """

    def __init__(self, prefix: Path) -> None:
        self._idx, self._bin = idx_path(prefix), bin_path(prefix)
        index = self._read_index()
        self.lengths, self.starts, self.documents, self.dtype = index
        self.tokens = self._map_tokens()

    def _read_index(self) -> tuple[Tokens, Tokens, Tokens, np.dtype[Any]]:
        try:
            data = self._idx.read_bytes()
        except FileNotFoundError:
            raise DataError(f"there is no {self._idx}; build it with `resilient data build`") from None
        except OSError as error:
            raise DataError(f"{self._idx} cannot be read: {error.strerror}") from error
        if data[: len(MAGIC)] != MAGIC:
            raise DataError(f"{self._idx} is not the index of an indexed dataset: it starts with {data[:9]!r}")
        if len(data) < HEADER.size:
            raise DataError(f"{self._idx} is cut short: {len(data)} bytes, and the header alone has {HEADER.size}")
        _, version, code, sequences, boundaries = HEADER.unpack_from(data)
        if version != VERSION:
            raise DataError(f"{self._idx} has version {version}; this reader knows version {VERSION}")
        if code not in TOKEN_TYPES:
            raise DataError(f"{self._idx} has token type {code}; known are {', '.join(map(str, TOKEN_TYPES))}")
        expected = HEADER.size + 12 * sequences + 8 * boundaries
        if len(data) < expected:
            raise DataError(f"{self._idx} is cut short: {len(data)} bytes instead of {expected}; build it again")
        at = HEADER.size
        lengths = np.frombuffer(data, "<i4", sequences, at)
        starts = np.frombuffer(data, "<i8", sequences, at + 4 * sequences)
        documents = np.frombuffer(data, "<i8", boundaries, at + 12 * sequences)
        dtype = np.dtype(TOKEN_TYPES[code])
        if dtype.kind not in "iu":
            raise DataError(f"{self._idx} holds {dtype} instead of whole numbers; it is no text")
        contiguous = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        if not boundaries or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
            raise DataError(f"{self._idx} has document boundaries that do not cover its {sequences} sequences")
        if (lengths < 0).any() or not np.array_equal(starts, contiguous[:-1] * dtype.itemsize):
            raise DataError(f"{self._idx} has sequences that do not follow each other; such datasets are not supported")
        return lengths, starts, documents, dtype

    def _map_tokens(self) -> Tokens:
        expected = int(self.lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        try:
            size = self._bin.stat().st_size
        except FileNotFoundError:
            raise DataError(f"there is no {self._bin}, which {self._idx} belongs to; build it again") from None
        if size != expected:
            raise DataError(f"{self._bin} has {size} bytes, and {self._idx} speaks of {expected}; build it again")
        if size == 0:
            return np.empty(0, self.dtype)
        return np.memmap(self._bin, self.dtype, "r")

    def __len__(self) -> int:
        """Documents."""
        return len(self.documents) - 1

    def boundary(self, document: int) -> int:
        """The token at which a document starts; for the number of documents, the number of tokens."""
        sequence = int(self.documents[document])
        if sequence == len(self.starts):
            return len(self.tokens)
        return int(self.starts[sequence]) // self.dtype.itemsize
