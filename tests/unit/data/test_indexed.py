"""The bytes of an indexed dataset, and what is said when they are wrong."""

import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.data.errors import DataError
from trainer.data.indexed import IndexedDataset, IndexedWriter, token_type

DOCUMENTS = [[1, 2, 3], [500], [65000, 7]]

INDEX_BYTES = bytes.fromhex(
    "4d4d4944494458 0000"  # MMIDIDX
    "0100000000000000"  # version
    "08"  # uint16
    "0300000000000000"  # sequences
    "0400000000000000"  # document boundaries
    "03000000 01000000 02000000"  # lengths
    "0000000000000000 0600000000000000 0800000000000000"  # starts in bytes
    "0000000000000000 0100000000000000 0200000000000000 0300000000000000"  # documents
)
TOKEN_BYTES = bytes.fromhex("0100 0200 0300 f401 e8fd 0700")


def write(prefix: Path, documents: list[list[int]], dtype: str = "<u2") -> Path:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add(document)
        writer.commit()
    return prefix


def read_by_the_description(prefix: Path) -> list[list[int]]:
    """A reader that shares nothing with the one under test."""
    index, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert index[:9] == b"MMIDIDX\0\0"
    version, code, sequences, boundaries = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    letter, size = {1: ("B", 1), 2: ("b", 1), 3: ("h", 2), 4: ("i", 4), 5: ("q", 8), 8: ("H", 2)}[code]
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    starts = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
    documents = struct.unpack_from(f"<{boundaries}q", index, 34 + 12 * sequences)
    assert len(index) == 34 + 12 * sequences + 8 * boundaries
    assert starts == tuple(sum(lengths[:number]) * size for number in range(sequences))
    assert documents == tuple(range(sequences + 1))
    return [list(struct.unpack_from(f"<{n}{letter}", tokens, at)) for n, at in zip(lengths, starts, strict=True)]


def read(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(prefix)
    bounds = [data.boundary(number) for number in range(len(data) + 1)]
    return [data.tokens[first:last].tolist() for first, last in pairwise(bounds)]


def test_a_small_dataset_has_exactly_these_bytes(tmp_path: Path) -> None:
    write(tmp_path / "d", DOCUMENTS)
    assert (tmp_path / "d.idx").read_bytes() == INDEX_BYTES
    assert (tmp_path / "d.bin").read_bytes() == TOKEN_BYTES


def test_a_reader_made_from_the_description_reads_what_is_written(tmp_path: Path) -> None:
    for dtype in ("<u2", "<i4", "<i8"):
        assert read_by_the_description(write(tmp_path / "d", DOCUMENTS, dtype)) == DOCUMENTS


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=9), min_size=1, max_size=9), st.sampled_from(["<u2", "<i4"]))
def test_what_is_written_is_what_is_read(tmp_path: Path, documents: list[list[int]], dtype: str) -> None:
    prefix = write(tmp_path / "d", documents, dtype)
    assert read(prefix) == documents == read_by_the_description(prefix)


def test_documents_may_have_several_sequences_and_modes_as_other_writers_leave_them(tmp_path: Path) -> None:
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, 3, 3) + struct.pack("<3i3q3q", 2, 1, 2, 0, 8, 12, 0, 2, 3) + b"\0\1\0"
    (tmp_path / "d.idx").write_bytes(index)
    (tmp_path / "d.bin").write_bytes(struct.pack("<5i", 1, 2, 3, 4, 5))
    assert read(tmp_path / "d") == [[1, 2, 3], [4, 5]]


def test_a_document_may_come_in_parts_and_one_without_tokens_is_left_out(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", np.dtype("<u2")) as writer:
        writer.add([1, 2], end=False)
        writer.add(np.array([3], "<u2"), end=False)
        writer.add([], end=True)
        writer.add([], end=True)
        writer.add([4])
        writer.commit()
    assert read(tmp_path / "d") == [[1, 2, 3], [4]]


def test_the_index_of_many_documents_is_right_across_its_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.indexed._CHUNK", 4)
    documents = [[number] * (number % 5 + 1) for number in range(23)]
    assert read(write(tmp_path / "d", documents)) == documents == read_by_the_description(tmp_path / "d")


def test_small_vocabularies_take_two_bytes_a_token_and_large_ones_four() -> None:
    assert (token_type(65499), token_type(65500)) == (np.dtype("<u2"), np.dtype("<i4"))


def test_without_a_commit_nothing_is_left(tmp_path: Path) -> None:
    write(tmp_path / "d", [[9]])
    with IndexedWriter(tmp_path / "d", np.dtype("<u2")) as writer:
        writer.add([1])
    assert read(tmp_path / "d") == [[9]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


@pytest.mark.parametrize("token", [-1, 65536])
def test_a_token_that_does_not_fit_the_type_is_refused(tmp_path: Path, token: int) -> None:
    with IndexedWriter(tmp_path / "d", np.dtype("<u2")) as writer, pytest.raises(DataError, match="do not fit uint16"):
        writer.add([1, token])


def test_a_document_longer_than_the_format_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.indexed.LONGEST_SEQUENCE", 3)
    with IndexedWriter(tmp_path / "d", np.dtype("<u2")) as writer, pytest.raises(DataError, match=r"document 2 .* split it"):
        writer.add([1, 2, 3])
        writer.add([1, 2], end=False)
        writer.add([3, 4])


def _index(**changes: Any) -> bytes:
    given: dict[str, Any] = {
        "magic": b"MMIDIDX\0\0",
        "version": 1,
        "code": 8,
        "lengths": [3, 1, 2],
        "starts": [0, 6, 8],
        "documents": [0, 1, 2, 3],
    }
    given.update(changes)
    lengths, starts, documents = given["lengths"], given["starts"], given["documents"]
    head = struct.pack("<9sQBQQ", given["magic"], given["version"], given["code"], len(lengths), len(documents))
    return head + np.array(lengths, "<i4").tobytes() + np.array(starts, "<i8").tobytes() + np.array(documents, "<i8").tobytes()


DAMAGES: dict[str, tuple[bytes | None, bytes | None, str]] = {  # index, tokens, what is said
    "no index": (None, TOKEN_BYTES, r"there is no .*d\.idx; build it with `resilient data build`"),
    "no tokens": (_index(), None, r"there is no .*d\.bin, which .*d\.idx belongs to"),
    "empty index": (b"", TOKEN_BYTES, r"d\.idx is truncated: 0 bytes, and the header alone has 34"),
    "index cut in the magic": (_index()[:5], TOKEN_BYTES, r"d\.idx is truncated: 5 bytes"),
    "index cut in the header": (_index()[:20], TOKEN_BYTES, r"d\.idx is truncated: 20 bytes"),
    "index cut in the tables": (_index()[:-1], TOKEN_BYTES, r"d\.idx is truncated: 101 bytes instead of 102"),
    "index with bytes behind": (_index() + b"abcd", TOKEN_BYTES, r"d\.idx is damaged: 106 bytes instead of 102"),
    "foreign index": (b"PK\3\4" + bytes(99), TOKEN_BYTES, r"d\.idx is not the index of a Megatron-LM dataset: it starts with b'PK"),
    "old index": (b"TNTIDX\0\0" + bytes(99), TOKEN_BYTES, r"an index of fairseq's old kind"),
    "unknown version": (_index(version=2), TOKEN_BYTES, r"d\.idx has version 2; this reader knows version 1"),
    "unknown token type": (_index(code=9), TOKEN_BYTES, r"d\.idx has token type 9; known are 1 to 8"),
    "floating point": (_index(code=7), TOKEN_BYTES, r"d\.idx holds float32 \(token type 7\); tokens are whole numbers"),
    "absurd counts": (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 2**60, 2), TOKEN_BYTES, r"d\.idx is truncated"),
    "negative length": (_index(lengths=[3, -1, 2]), TOKEN_BYTES, r"d\.idx is damaged: sequence 1 has length -1"),
    "gap": (_index(starts=[0, 6, 10]), TOKEN_BYTES, r"sequence 2 starts at byte 10 instead of 8"),
    "documents short of the end": (_index(documents=[0, 1, 2, 2]), TOKEN_BYTES, r"documents do not cover its 3 sequences"),
    "documents out of order": (_index(documents=[0, 2, 1, 3]), TOKEN_BYTES, r"documents do not cover its 3 sequences"),
    "documents from the middle": (_index(documents=[1, 1, 2, 3]), TOKEN_BYTES, r"documents do not cover its 3 sequences"),
    "nothing in it": (_index(lengths=[], starts=[], documents=[0]), b"", r"d\.idx holds no document"),
    "no token in it": (_index(lengths=[0], starts=[0], documents=[0, 1]), b"", r"d\.bin holds no token"),
    "tokens cut": (_index(), TOKEN_BYTES[:-1], r"d\.bin is truncated: 11 bytes, and .*d\.idx speaks of 12"),
    "other tokens": (_index(), TOKEN_BYTES * 2, r"d\.bin is not the one that the index was made for: 24 bytes"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_dataset_is_refused_with_file_and_reason(tmp_path: Path, damage: str) -> None:
    index, tokens, said = DAMAGES[damage]
    for name, content in (("d.idx", index), ("d.bin", tokens)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        IndexedDataset(tmp_path / "d")


def test_the_good_one_that_the_bad_ones_are_made_from_is_read(tmp_path: Path) -> None:
    (tmp_path / "d.idx").write_bytes(_index())
    (tmp_path / "d.bin").write_bytes(TOKEN_BYTES)
    assert read(tmp_path / "d") == DOCUMENTS


def test_a_directory_in_the_place_of_the_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.idx").mkdir()
    with pytest.raises(DataError, match=r"d\.idx cannot be read: Is a directory"):
        IndexedDataset(tmp_path / "d")


def test_who_names_the_file_instead_of_the_prefix_is_told(tmp_path: Path) -> None:
    write(tmp_path / "d", DOCUMENTS)
    with pytest.raises(DataError, match=r"give the prefix alone: .*/d$"):
        IndexedDataset(tmp_path / "d.bin")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_byte_of_an_index_is_refused_or_changes_nothing_but_documents(tmp_path: Path, data: st.DataObject) -> None:
    """The tokens come out the same, or there is an error that names the file: never a crash, never other tokens."""
    place = data.draw(st.integers(0, len(INDEX_BYTES) - 1))
    value = data.draw(st.integers(0, 255))
    (tmp_path / "d.idx").write_bytes(INDEX_BYTES[:place] + bytes([value]) + INDEX_BYTES[place + 1 :])
    (tmp_path / "d.bin").write_bytes(TOKEN_BYTES)
    try:
        tokens = IndexedDataset(tmp_path / "d").tokens
    except DataError as error:
        assert str(tmp_path / "d") in str(error)
    else:
        assert place == 17 or tokens.tobytes() == TOKEN_BYTES  # the token type alone says how to read them
        assert len(tokens) == 6


FULL = """
import resource, sys
import numpy as np
from pathlib import Path
from trainer.data.indexed import IndexedWriter

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
with IndexedWriter(Path(sys.argv[1]), np.dtype("<u2")) as writer:
    for _ in range(1 << 20):
        writer.add(range(100))
"""


def test_a_disk_that_gets_full_while_a_dataset_is_written_gets_its_room_back(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, tmp_path / "d"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []
