"""Copies from a GPU, gathered: as few cross to the host as can be, and the buffer has the same bytes as without."""

import gc
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rank_buffers import KINDS, LAYERS, Buffer, transformer

from checkpoint import device as device_module
from checkpoint.device import Cuda, OrderOfUseError, StandIn, at_once
from checkpoint.layout import ChunkRun
from checkpoint.local_shard import LocalShard, local_shard_of
from checkpoint.plan import ShardSpec, chunks_to_write, plan
from checkpoint.rounds import STAGE_BYTES, Numbered, plan_rounds
from checkpoint.tiers.mapped import MappedBuffer


def sealed_by(
    directory: Path, gpu: StandIn | None, ranks: Sequence[Sequence[LocalShard]], late: Sequence[bool] = (), rank: int = 0
) -> dict[str, bytes]:
    """What a snapshot of a rank leaves in a buffer."""
    directory.mkdir()
    buffer = Buffer(directory, ranks, rank)
    mapped = buffer.mapped(gpu)
    mark = mapped.copy(ranks[rank], late)
    if gpu is not None:
        gpu.wait(mark)
    mapped.close()
    return buffer.sealed()


@pytest.mark.soak
def test_a_model_of_many_small_tensors_crosses_by_few_copies_and_is_the_same(tmp_path: Path):
    shards = transformer()
    expected = sealed_by(tmp_path / "cpu", None, [shards])
    single, gathering = StandIn(stage_bytes=0), StandIn()
    late = [each.array.startswith("optimizer") for each in shards]
    assert sealed_by(tmp_path / "single", single, [shards], late) == expected
    assert sealed_by(tmp_path / "gathered", gathering, [shards], late) == expected
    assert single.crossings == len(shards) == 32 * 16 * 3
    assert gathering.crossings < single.crossings / 20, "an array each, but where the stage was full"


# -- a large model, by arithmetic --------------------------------------------------------------------------------------


def large(dp: int) -> list[list[ShardSpec]]:
    """By rank: what fully sharded data parallelism gives it of 32 layers of 4,096, gated, with norms and without biases."""
    side, inner, kv = 4096, 14336, 1024
    matrices = {"query": (side, side), "key": (kv, side), "value": (kv, side), "out": (side, side)}
    matrices |= {"up": (inner, side), "gate": (inner, side), "down": (side, inner)}
    everything: dict[str, tuple[int, ...]] = {**matrices, "norm_attention": (side,), "norm_mlp": (side,)}
    found: list[list[ShardSpec]] = []
    for rank in range(dp):
        specs = []
        for (name, (rows, *rest)), layer, kind in itertools.product(everything.items(), range(LAYERS), KINDS):
            part = (1, rows // dp, *rest)
            specs.append(
                ShardSpec(
                    f"{kind}/{name}", "float32", (LAYERS, rows, *rest), (layer, rank * part[1], *[0] * len(rest)), part, part, 0, 1
                )
            )
        found.append(specs)
    return found


@pytest.mark.parametrize(("dp", "least"), [(1, 100.0), (8, 20.0), (64, 6.0)])
def test_the_copies_of_a_large_model_are_few(dp: int, least: float):
    specs = large(dp)
    infos = plan(specs)
    numbers = {info.name: number for number, info in enumerate(infos)}
    runs = [
        Numbered(number, run)
        for number, spec in enumerate(specs[0])
        for run in chunks_to_write(infos[numbers[spec.array]], numbers[spec.array], spec)
    ]
    rounds, alone = plan_rounds(runs, STAGE_BYTES)
    chunks = sum(run.length for _, run in runs)
    crossings = sum(len(each.crossings) for each in rounds)
    assert not alone
    assert chunks / crossings > least, f"{chunks} chunks by {crossings} copies"
    for each in rounds:
        places = [placed for _, placed in each.pieces]
        assert all(before.end <= after.offset for before, after in itertools.pairwise(places)), "no two in one place"
        assert places[-1].end <= STAGE_BYTES
    assert sum(placed.run.length for each in rounds for _, placed in each.pieces) == chunks, "each once"
    assert sum(placed.run.length for each in rounds for placed in each.crossings) == chunks


# -- any shapes --------------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


def anything(draw: random.Random, numbers: torch.Generator) -> list[list[LocalShard]]:
    """Two ranks with rows of some arrays, cut at edges, strided, stacked, whole, and of one number."""
    ranks: list[list[LocalShard]] = [[], []]
    for name in range(draw.randint(3, 6)):
        dtype, rows, columns = draw.choice(DTYPES), draw.randint(2, 300), draw.choice([1, 7, 300, 1500])
        unit = draw.choice([rows, max(1, rows // 3), max(1, rows // 10)])
        half = draw.randrange(0, rows + 1, unit)
        data = torch.randint(0, 100, (rows, columns), generator=numbers).to(dtype)
        if draw.random() < 0.3:
            data = data.t().contiguous().t()
        layers = draw.randint(1, 3)
        for layer in range(layers):
            for rank, (first, end) in enumerate([(0, half), (half, rows)]):
                part = data[first:end].clone(memory_format=torch.preserve_format).unsqueeze(0)
                ranks[rank].append(LocalShard(f"a{name}", (layers, rows, columns), (layer, first, 0), part, (1, unit, columns)))
    ranks[0].append(LocalShard("scalars", (3,), (0,), torch.arange(3.0), (3,)))
    ranks[1].append(LocalShard("scalars", (3,), (3,), torch.empty(0), (3,)))
    ranks[0].append(LocalShard("number", (), (), torch.tensor(5.0), (), replica=0, replicas=2))
    ranks[1].append(LocalShard("number", (), (), torch.tensor(5.0), (), replica=1, replicas=2))
    draw.shuffle(ranks[0])
    return ranks


class Everything(StandIn):
    """A GPU that has numbers by themselves too."""

    def holds(self, data: torch.Tensor) -> bool:
        return True


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_shapes_the_buffer_has_the_same_bytes(tmp_path: Path, seed: int, rank: int):
    draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    ranks = anything(draw, numbers)
    late = [draw.random() < 0.5 for _ in ranks[rank]]
    expected = sealed_by(tmp_path / "cpu", None, ranks, rank=rank)
    for stage_bytes in (0, 64 << 10, 600 << 10, 8 << 20):
        gpu = Everything(stage_bytes=stage_bytes)
        assert sealed_by(tmp_path / str(stage_bytes), gpu, ranks, late, rank) == expected


def test_tensors_that_have_moved_or_are_late_no_more_are_copied_from_where_they_are(tmp_path: Path):
    def shards(values: torch.Tensor) -> list[LocalShard]:
        return [LocalShard("w", (2, 100, 300), (layer, 0, 0), values[layer : layer + 1], (1, 100, 300)) for layer in (0, 1)]

    first, second = torch.randn(2, 100, 300), torch.randn(2, 100, 300)
    gpu, buffer = StandIn(), Buffer(tmp_path / "gpu", [shards(first)])
    mapped = buffer.mapped(gpu)
    cases = [(first, [True, True]), (second, [True, True]), (second, []), (first, [False, True]), (first, [True, True])]
    for number, (values, late) in enumerate(cases):
        values += 1
        gpu.wait(mapped.copy(shards(values), late))
        assert buffer.sealed() == sealed_by(tmp_path / str(number), None, [shards(values)])
        assert mapped.size_bytes == values.nbytes


# -- the order of use --------------------------------------------------------------------------------------------------


def test_a_buffer_that_is_closed_is_unmapped_at_once(tmp_path: Path):
    shards, gpu = [local_shard_of("w", torch.randn(100, 300)), local_shard_of("v", torch.randn(300))], StandIn()
    mapped = Buffer(tmp_path, [shards]).mapped(gpu)
    gpu.wait(mapped.copy(shards))
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    gc.disable()  # which would free it later
    try:
        mapped.close()
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


@pytest.fixture
def staged(tmp_path: Path) -> tuple[StandIn, MappedBuffer, torch.Tensor, Buffer]:
    """Eight matrices of 256 KiB, of which the stage holds two at a time."""
    gpu, data = StandIn(stage_bytes=600 << 10), torch.arange(8.0 * 256 * 256).view(8, 256, 256)
    buffer = Buffer(tmp_path, [matrices(data)])
    return gpu, buffer.mapped(gpu), data, buffer


def matrices(data: torch.Tensor) -> list[LocalShard]:
    return [LocalShard("w", (8, 256, 256), (layer, 0, 0), data[layer : layer + 1], (1, 256, 256)) for layer in range(8)]


def test_all_rounds_are_waited_for_before_what_is_late_changes(staged: tuple[StandIn, MappedBuffer, torch.Tensor, Buffer]):
    gpu, mapped, data, buffer = staged
    mark = mapped.copy(matrices(data), [True] * 8)
    assert gpu.crossings == 4
    gpu.hold_back(mark)
    data += 1
    gpu.wait(mark)
    before = buffer.sealed()
    gpu.wait(mapped.copy(matrices(data - 1), [True] * 8))
    assert buffer.sealed() == before
    mark = mapped.copy(matrices(data), [True] * 8)
    data[7] += 1  # of the last round
    with pytest.raises(OrderOfUseError, match="held back"):
        gpu.hold_back(mark)


def test_what_may_change_at_any_time_is_read_before_it_does(staged: tuple[StandIn, MappedBuffer, torch.Tensor, Buffer]):
    gpu, mapped, data, buffer = staged
    kept = data.clone()
    mark = mapped.copy(matrices(data))
    data += 1
    gpu.wait(mark)
    before = buffer.sealed()
    gpu.wait(mapped.copy(matrices(kept)))
    assert buffer.sealed() == before


def test_small_tensors_of_one_type_are_packed_at_once():
    rows = [torch.zeros(size, dtype=torch.int32) for size in (3, 5, 7)]
    wide = torch.zeros(4, 4)[:, :2]
    targets = [rows[0], wide, rows[1], torch.zeros(2, dtype=torch.int16), rows[2]]
    groups = [targets for targets, _ in at_once(targets, [each.clone() for each in targets])]
    assert sorted(map(len, groups)) == [1, 1, 3]


def test_a_gpu_that_is_full_copies_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    def empty(size: int, **_: object) -> torch.Tensor:
        asked.append(size)
        if size:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.zeros(0, dtype=torch.uint8)

    monkeypatch.setattr(device_module.torch, "empty", empty)
    gpu = Cuda(torch.device("cuda", 0))
    assert [gpu.stage().nbytes, gpu.stage().nbytes] == [0, 0]
    assert asked == [STAGE_BYTES, 0]


def test_neighbours_of_another_file_do_not_cross_together():
    (info,) = plan([[ShardSpec("w", "float32", (8, 256, 256), (0, 0, 0), (8, 256, 256), (1, 256, 256), 0, 1)]])
    (other,) = plan([[ShardSpec("v", "float32", (8, 256, 256), (0, 0, 0), (8, 256, 256), (1, 256, 256), 0, 1)]])
    (shard,), (another,) = info.shards.values(), other.shards.values()
    runs = [ChunkRun(shard, 2, 2), ChunkRun(another, 1, 1), ChunkRun(shard, 4, 1), ChunkRun(shard, 6, 1)]
    (only,), _ = plan_rounds([Numbered(number, run) for number, run in enumerate(runs)], 8 << 20)
    assert [(each.run.shard, each.run.slot, each.run.length) for each in only.crossings] == [
        (another, 1, 1),
        (shard, 2, 3),
        (shard, 6, 1),
    ]
