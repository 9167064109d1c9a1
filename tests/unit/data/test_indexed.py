"""The indexed format, to the byte, and everything that may be wrong with its files."""

import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.errors import DataError
from trainer.data.indexed import IndexedDataset, IndexedWriter, token_type


def write(prefix: Path, documents: list[list[int]], dtype: type[np.generic] = np.uint16) -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add(document)
    return prefix


def test_the_files_of_a_small_dataset_are_these_bytes(tmp_path: Path):
    prefix = write(tmp_path / "d", [[1, 2, 3], [4]])
    assert (tmp_path / "d.bin").read_bytes() == bytes.fromhex("0100 0200 0300 0400")
    assert (tmp_path / "d.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + bytes.fromhex("0100000000000000")  # version 1
        + bytes.fromhex("08")  # uint16
        + bytes.fromhex("0200000000000000")  # two sequences
        + bytes.fromhex("0300000000000000")  # three document boundaries
        + bytes.fromhex("03000000 01000000")  # lengths
        + bytes.fromhex("0000000000000000 0600000000000000")  # starts in bytes
        + bytes.fromhex("0000000000000000 0100000000000000 0200000000000000")  # documents
    )
    assert len(IndexedDataset(prefix)) == 2


def foreign_read(prefix: Path) -> list[list[int]]:
    """A reader of the format that shares nothing with ours."""
    data = Path(f"{prefix}.idx").read_bytes()
    assert data[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, boundaries = struct.unpack("<QBQQ", data[9:34])
    assert version == 1
    kind = {4: ("<i", 4), 8: ("<H", 2)}[code]
    lengths = struct.unpack(f"<{sequences}i", data[34 : 34 + 4 * sequences])
    starts = struct.unpack(f"<{sequences}q", data[34 + 4 * sequences : 34 + 12 * sequences])
    documents = struct.unpack(f"<{boundaries}q", data[34 + 12 * sequences :])
    assert documents == tuple(range(sequences + 1))
    tokens = Path(f"{prefix}.bin").read_bytes()
    return [
        [value for (value,) in struct.iter_unpack(kind[0], tokens[start : start + length * kind[1]])]
        for start, length in zip(starts, lengths, strict=True)
    ]


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 65000), min_size=1, max_size=40), max_size=20),
    wide=st.booleans(),
)
def test_what_is_written_is_read_by_us_and_by_a_foreign_reader(tmp_path_factory, documents, wide):
    prefix = write(tmp_path_factory.mktemp("i") / "d", documents, np.int32 if wide else np.uint16)
    assert foreign_read(prefix) == documents
    data = IndexedDataset(prefix)
    bounds = [data.boundary(number) for number in range(len(data) + 1)]
    assert [data.tokens[a:b].tolist() for a, b in pairwise(bounds)] == documents


def test_a_document_may_come_in_pieces_and_gets_one_closing_token(tmp_path: Path):
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        writer.add([1, 2], end=False)
        writer.add([3], closing=9)
        writer.add([], closing=9)  # an empty document is none
        writer.add([], end=False)
        writer.add([4], closing=9)
    assert foreign_read(tmp_path / "d") == [[1, 2, 3, 9], [4, 9]]


def test_large_vocabularies_get_wider_tokens():
    assert token_type(65499) is np.uint16
    assert token_type(65500) is np.int32


def test_a_writer_that_fails_leaves_nothing_and_what_was_there_stays(tmp_path: Path):
    write(tmp_path / "d", [[1]])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ZeroDivisionError), IndexedWriter(tmp_path / "d", np.uint16) as writer:
        writer.add([7, 7])
        _ = 1 / 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def poke(at: int, value: bytes) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        path = Path(f"{prefix}.idx")
        data = bytearray(path.read_bytes())
        data[at : at + len(value)] = value
        path.write_bytes(data)

    return damage


def cut(suffix: str, size: int) -> Callable[[Path], None]:
    return lambda prefix: Path(f"{prefix}{suffix}").write_bytes(Path(f"{prefix}{suffix}").read_bytes()[:size])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (lambda prefix: Path(f"{prefix}.idx").unlink(), "there is no .*d.idx.*resilient data build"),
    "no tokens": (lambda prefix: Path(f"{prefix}.bin").unlink(), "there is no .*d.bin"),
    "a foreign file": (poke(0, b"RIFF"), "d.idx is not the index"),
    "an empty index": (cut(".idx", 0), "d.idx is not the index"),
    "half a header": (cut(".idx", 20), "cut short: 20 bytes"),
    "half an index": (cut(".idx", 60), "cut short: 60 bytes instead of"),
    "another version": (poke(9, b"\x02"), "version 2"),
    "an unknown type": (poke(17, b"\x63"), "token type 99"),
    "floats": (poke(17, b"\x07"), "float32 instead of whole numbers"),
    "another type than was written": (poke(17, b"\x04"), "do not follow each other"),
    "a wrong length": (poke(34, b"\x09"), "do not follow each other"),
    "a negative length": (poke(34, b"\xff\xff\xff\xff"), "do not follow each other"),
    "documents beyond the end": (poke(34 + 24 + 16, b"\x09"), "document boundaries"),
    "too few tokens": (cut(".bin", 5), "d.bin has 5 bytes, and .*d.idx speaks of 8"),
    "too many tokens": (lambda prefix: Path(f"{prefix}.bin").write_bytes(bytes(10)), "d.bin has 10 bytes"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_good_is_told(tmp_path: Path, damage: str):
    prefix = write(tmp_path / "d", [[1, 2, 3], [4]])
    harm, words = DAMAGE[damage]
    harm(prefix)
    with pytest.raises(DataError, match=words):
        IndexedDataset(prefix)
