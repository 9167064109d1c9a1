"""Where bytes go: chunks, slots, shards, shares; and crc32c of what is put together."""

import math
import struct
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise, product

import crc32c
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint import CheckpointError, crc, layout
from checkpoint.layout import ArrayInfo, ChunkRun, arrange, chunk_shape
from checkpoint.local_shard import LocalShard, granule, part_of
from checkpoint.plan import ShardSpec, chunks_to_write, plan
from checkpoint.retention import superseded
from checkpoint.tiers.blueprint import places

MIB = 1 << 20


@given(st.binary(max_size=200), st.binary(max_size=200), st.integers(0, 70))
def test_crc_of_joined_bytes_follows_from_the_parts(first: bytes, second: bytes, times: int) -> None:
    one, two = crc32c.crc32c(first), crc32c.crc32c(second)
    assert crc.combine(one, two, len(second)) == crc32c.crc32c(first + second)
    assert crc.repeat(one, len(first), times) == crc32c.crc32c(first * times)
    assert crc.zeros(times) == crc32c.crc32c(bytes(times))
    assert crc32c.crc32c(first + crc.sealed(one)) == crc.SEALED


@pytest.mark.parametrize(
    ("shape", "unit"),
    [
        ((4096, 4096), (4096, 4096)),
        ((4096, 4096), (1024, 4096)),
        ((32, 4096, 1024), (1, 512, 1024)),
        ((50257, 768), (50257, 768)),  # a prime number of rows that nobody shards
        ((50257, 768), (25129, 768)),  # shards of a prime number of rows
        ((50304, 1600), (6288, 1600)),
        ((100_000_007,), (100_000_007,)),
    ],
)
def test_chunks_are_tiles_of_at_most_about_half_a_mebibyte_and_respect_the_unit(
    shape: tuple[int, ...], unit: tuple[int, ...]
) -> None:
    chunk = chunk_shape(shape, 4, unit)
    assert MIB // 32 <= 4 * math.prod(chunk) <= 4 * MIB
    assert 4 * chunk[-1] >= min(4 * shape[-1], 2048)
    for part, granted, length in zip(chunk, unit, shape, strict=True):
        assert granted % part == 0 or granted >= length
    padded = math.prod(-(-length // part) * part for length, part in zip(shape, chunk, strict=True))
    assert padded <= 1.02 * math.prod(shape) or unit != shape


shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@given(shapes, st.data())
def test_every_chunk_has_a_slot_of_its_own_inside_its_file(shape: tuple[int, ...], data: st.DataObject) -> None:
    unit = tuple(data.draw(st.integers(1, max(1, length))) for length in shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "CHUNK_TARGET_BYTES", 64)
        patch.setattr(layout, "SHARD_LIMIT_BYTES", data.draw(st.sampled_from([1, 5 * 4096, 16 << 30])))
        info = arrange("a", "float32", shape, unit)
    taken = sorted(
        (shard.path, info.offset(slot), info.offset(slot) + info.chunk_bytes + 4, shard.size_bytes)
        for shard, slot in map(info.locate, info.touched((0,) * len(shape), shape))
    )
    for (path, _, end, _), (other, start, _, _) in pairwise(taken):
        assert path != other or end <= start
    for _, start, end, size in taken:
        assert info.index_bytes <= start and end <= size
        assert start % 4096 == 0
    assert {path for path, *_ in taken} == {shard.path for shard in info.shards.values()}


def test_slots_depend_on_shape_element_and_unit_alone() -> None:
    """The numbers are part of the format: another one would misplace what older versions wrote."""
    info = arrange("layers/up", "float32", (3, 2048, 1024), (1, 1024, 1024))
    shard, slot = info.locate((2, 1, 0))
    size = MIB // 4
    assert (info.chunk, info.grid, shard.path, slot) == ((1, 64, 1024), (3, 32, 1), "layers/up/c.0.0.0", 65)
    assert (info.index_bytes, info.first_slot, info.slot_bytes) == (16 * 96 + 4, 4096, size + 4096)
    assert info.offset(65) == 4096 + 65 * (size + 4096)
    entries = struct.unpack("<192Q", shard.index[:-4])
    assert entries[130:132] == (info.offset(65), size + 4)


def test_above_the_limit_an_array_has_several_shard_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "SHARD_LIMIT_BYTES", 30 * MIB)
    info = arrange("a", "float32", (20, 1024, 1024), (1, 1024, 1024))
    assert (info.chunk, info.per_shard) == ((1, 64, 1024), (7, 16, 1))
    assert [shard.path for shard in info.shards.values()] == ["a/c.0.0.0", "a/c.1.0.0", "a/c.2.0.0"]
    assert len(info.shards[2, 0, 0].slots) == 6 * 16


@given(st.integers(1, 200), st.lists(st.integers(1, 5), max_size=3))
def test_nested_shards_are_those_of_torch_chunk(length: int, splits: list[int]) -> None:
    unit = granule(length, tuple(splits))

    def check(rows: torch.Tensor, where: list[int]) -> None:
        if len(where) == len(splits):
            offset, size = part_of(length, splits, where)
            assert size == len(rows)
            assert not size or (offset == rows[0] and (offset % unit == 0 or offset == length))
            return
        chunks = torch.chunk(rows, splits[len(where)]) if len(rows) else ()
        for index in range(splits[len(where)]):
            check(chunks[index] if index < len(chunks) else rows[:0], [*where, index])

    check(torch.arange(length), [])


def spec_of(offset: int, extent: int, replica: int = 0, replicas: int = 1, *, unit: int = 2, length: int = 8) -> ShardSpec:
    return ShardSpec("w", "float32", (length,), (offset,), (extent,), (unit,), replica, replicas)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([[spec_of(0, 4)], []], r"no rank holds the element at \(4,\)"),
        ([[spec_of(0, 4)], [spec_of(2, 6)]], r"two different blocks hold the element at \(2,\)"),
        ([[spec_of(0, 8)], [spec_of(0, 8)]], "2 holders .*each must be another one"),
        ([[spec_of(0, 8, 0, 2)], []], "1 holders .*rank 0 is 0 of 2"),
        ([[replace(spec_of(0, 8), copies=2)], []], "1 holders .*rank 0 is 0 of 1 in copy 0 of 2"),
        ([[replace(spec_of(0, 8), copies=2)], [replace(spec_of(0, 8), copies=2)]], "2 holders .*each must be another one"),
        ([[spec_of(0, 4)], [spec_of(0, 4, length=4)]], r"float32 \(8,\) on rank 0 and float32 \(4,\) on rank 1"),
        ([[spec_of(0, 8), ShardSpec("w/b", "int8", (), (), (), (), 0, 1)]], "w is an array, so w/b cannot be inside"),
    ],
)
def test_contradicting_shard_specs_are_refused(specs: list[list[ShardSpec]], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        plan(specs)


def test_units_that_differ_between_ranks_are_reconciled() -> None:
    (info,) = plan([[spec_of(0, 6, unit=6, length=14)], [spec_of(6, 8, unit=2, length=14)]])
    assert info.chunk == (2,)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.integers(0, 100))
def test_replicas_share_a_block_evenly_and_write_each_chunk_once(replicas: int, rows: int, columns: int, ordinal: int) -> None:
    shape = (rows, columns)
    held = [ShardSpec("w", "int8", shape, (0, 0), shape, (1, 1), replica, replicas) for replica in range(replicas)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "CHUNK_TARGET_BYTES", 1)
        (info,) = plan([[each] for each in held])
    written = [list(chunks_to_write(info, ordinal, each)) for each in held]
    assert sorted(chunk for each in written for chunk in chunks(each)) == sorted(info.touched((0, 0), shape))
    counts = [sum(chunk_run.length for chunk_run in each) for each in written]
    assert max(counts) - min(counts) <= 1


@given(st.integers(1, 3), st.integers(2, 4), st.integers(1, 9), st.integers(0, 100))
def test_each_copy_has_all_of_a_block_in_snapshots_and_all_of_them_write_a_checkpoint_together(
    replicas: int, copies: int, rows: int, ordinal: int
) -> None:
    held = [
        [
            ShardSpec("w", "int8", (rows, 3), (0, 0), (rows, 3), (1, 1), replica, replicas, copy, copies)
            for replica in range(replicas)
        ]
        for copy in range(copies)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "CHUNK_TARGET_BYTES", 1)
        (info,) = plan([[each] for copy in held for each in copy])
    everything = sorted(info.touched((0, 0), (rows, 3)))
    together = [chunks_to_write(info, ordinal, each) for copy in held for each in copy]
    assert sorted(chunk for each in together for chunk in chunks(each)) == everything
    alone = [[list(chunks_to_write(info, ordinal, each.for_snapshots)) for each in copy] for copy in held]
    assert all(sorted(chunk for each in copy for chunk in chunks(each)) == everything for copy in alone)
    assert all(copy == alone[0] for copy in alone)  # the nodes of any of them hold the same


def test_nodes_whose_ranks_write_the_same_have_one_shard_of_one_number() -> None:
    assert places(["a", "b", "c", "d"], 2) == [None, None]
    assert places(["a", "b", "a", "b"], 2) == [(0, 1), (0, 1)]
    assert places(["a", "b", "b", "a"], 2) == [None, None]
    assert places(["a", "b", "a", "b", "c", "d", "c", "d"], 1) == [(0, 4), (1, 4), (0, 4), (1, 4), (2, 4), (3, 4), (2, 4), (3, 4)]


def chunks(chunk_runs: Iterable[ChunkRun]) -> list[tuple[int, ...]]:
    """Places in the grid of chunks."""
    found = []
    for chunk_run in chunk_runs:
        for place, counts in chunk_run.boxes():
            found += product(*(range(start, start + count) for start, count in zip(place, counts, strict=True)))
    return found


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), max_size=3), st.integers(1, 12), st.data())
def test_strips_have_the_chunks_of_a_block_once_and_in_the_order_of_slots(
    grid: list[tuple[int, int]], most: int, data: st.DataObject
) -> None:
    shape = tuple(count * part - data.draw(st.integers(0, part - 1)) for count, part in grid)
    chunk = tuple(part for _, part in grid)
    info = ArrayInfo("a", "int8", shape, chunk, tuple(data.draw(st.integers(1, count)) for count, _ in grid))
    offset = tuple(data.draw(st.integers(0, length - 1)) for length in shape)
    extent = tuple(data.draw(st.integers(1, length - start)) for length, start in zip(shape, offset, strict=True))
    chunk_runs = list(info.chunk_runs(offset, extent))
    assert sorted(chunks(chunk_runs)) == sorted(info.touched(offset, extent))
    for chunk_run in chunk_runs:
        end = chunk_run.slot + chunk_run.length
        parts = [chunk_run.part(slot, slot + most) for slot in range(chunk_run.slot, end, most)]
        assert [info.locate(each) for each in chunks(parts)] == [
            (chunk_run.shard, chunk_run.slot + n) for n in range(chunk_run.length)
        ]
    if len(info.shards) == 1 and extent == shape:
        assert len(chunk_runs) == 1


def test_small_arrays_of_many_layers_are_spread_over_replicas() -> None:
    norms = [ShardSpec("norm", "float32", (32, 64), (layer, 0), (1, 64), (1, 64), 0, 4) for layer in range(32)]
    (info,) = plan([[ShardSpec(**{**vars(each), "replica": rank}) for each in norms] for rank in range(4)])
    assert sum(chunk_run.length for each in norms for chunk_run in chunks_to_write(info, 0, each)) == 8


@pytest.mark.parametrize(
    ("array", "shape", "offset", "extent", "unit", "message"),
    [
        ("", (2,), (0,), (2,), (1,), "cannot name"),
        ("a//b", (2,), (0,), (2,), (1,), "cannot name"),
        ("a/../b", (2,), (0,), (2,), (1,), "cannot name"),
        ("a/zarr.json", (2,), (0,), (2,), (1,), "cannot name"),
        ("a/b\tc", (2,), (0,), (2,), (1,), r"'a/b\\tc' cannot name an array: it has a control character"),
        ("a/b\\c", (2,), (0,), (2,), (1,), "a control character or a backslash"),
        ("a/\ud800", (2,), (0,), (2,), (1,), "it is no text"),
        ("a/" + "b" * 256, (2,), (0,), (2,), (1,), "255 bytes are the most between two slashes"),
        ("a/" * 507 + "b", (2,), (0,), (2,), (1,), "1024 with the name of a file"),
        ("a", (2,), (0, 0), (2,), (1,), "same number of dimensions"),
        ("a", (4,), (3,), (2,), (1,), "not inside the array"),
        ("a", (8,), (3,), (4,), (3,), "does not begin and end at multiples"),
        ("a", (8,), (2,), (3,), (3,), "does not begin and end at multiples"),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(
    array: str, shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...], unit: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LocalShard(array, shape, offset, torch.zeros(extent), unit)


def test_a_piece_of_a_type_that_cannot_be_stored_is_refused() -> None:
    with pytest.raises(ValueError, match="float8_e4m3fnuz cannot be stored; there are"):
        LocalShard("a", (1,), (0,), torch.zeros(1, dtype=torch.float8_e4m3fnuz), (1,))


@pytest.mark.parametrize(
    ("steps", "keep_last", "keep_every", "upto", "gone"),
    [
        ([], 1, None, None, []),
        ([10], 1, None, None, []),
        ([10, 20, 30], 1, None, None, [10, 20]),
        ([10, 20, 30], 5, None, None, []),
        ([30, 10, 20, 40], 2, None, None, [10, 20]),
        ([10, 20, 30, 40, 50], 1, 20, None, [10, 30]),
        ([10, 20, 30, 40], 1, None, 20, [10]),  # 30 and 40 are from a past that was rolled back
    ],
)
def test_retention(steps: list[int], keep_last: int, keep_every: int | None, upto: int | None, gone: list[int]) -> None:
    assert superseded(steps, keep_last, keep_every, upto) == gone


def test_retention_never_gives_up_the_newest() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        superseded([1, 2], 0)
