"""Real ranks: they save together, load on another number of ranks, and fail together."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zarr
from checkpoint_processes import kill_this_process, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from checkpoint import CheckpointError, LocalShard, direct, load, local_shard_of, newest_good, points, save, steps, verify
from checkpoint.saving import Saved

ROWS = 10  # over 4 ranks: 3, 3, 3, 1; over 7: 2, 2, 2, 2, 2, 0, 0


def whole(name: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.rand(shape, generator=generator)


def rows_of(rank: int, count: int) -> LocalShard:
    """FSDP2's cut of 10 rows: ceil(10 / n) each, the last ranks fewer or none."""
    part = -(-ROWS // count)
    start = min(rank * part, ROWS)
    return LocalShard("weight", (ROWS, 4), (start, 0), whole("weight", ROWS, 4)[start : start + part].clone(), (part, 4))


def save_rows(rank: int, root: Path, count: int) -> Saved:
    return save(root, 1, [rows_of(rank, count)], {"count": count}, generation=0)


def load_rows(rank: int, root: Path, count: int) -> bool:
    path = newest_good(root)
    assert path is not None
    expected = rows_of(rank, count)
    found = LocalShard(expected.array, expected.shape, expected.offset, torch.zeros_like(expected.data), expected.unit)
    load(path, [found])
    return torch.equal(found.data, expected.data)


@pytest.mark.parametrize(("writers", "readers"), [(4, 2), (2, 4), (3, 1)])
def test_uneven_shards_load_on_another_number_of_ranks(root: Path, writers: int, readers: int) -> None:
    saved = run_ranks(writers, save_rows, root, writers)
    assert all(isinstance(each, Saved) and each.path == saved[0].path for each in saved), saved
    assert run_ranks(readers, load_rows, root, readers) == [True] * readers


def test_a_rank_without_rows_takes_part(root: Path) -> None:
    assert len(rows_of(6, 7).data) == 0
    save(root, 1, [rows_of(rank, 7) for rank in range(7)], {}, generation=0)
    found = torch.zeros(ROWS, 4)
    load(root / "step-00000001", [local_shard_of("weight", found)])
    assert torch.equal(found, whole("weight", ROWS, 4))


MESHES: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "rows and columns": ((2, 2), (Shard(0), Shard(1))),
    "columns and rows": ((2, 2), (Shard(1), Shard(0))),
    "rows twice": ((2, 2), (Shard(0), Shard(0))),
    "replicas of rows": ((2, 2), (Replicate(), Shard(0))),
    "rows of replicas": ((2, 2), (Shard(0), Replicate())),
    "replicas": ((4,), (Replicate(),)),
}


def save_placed(rank: int, root: Path, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Every kind of placement at once, one array each."""
    written = []
    for name, (mesh, placements) in MESHES.items():
        tensor = distribute_tensor(whole(name, *shape), init_device_mesh("cpu", mesh), placements)
        written.append(local_shard_of(name, tensor))
    save(root, 1, written, {}, generation=0)
    return [(local_shard.array, local_shard.unit) for local_shard in written]


@pytest.mark.parametrize("shape", [(8, 8), (10, 7), (3, 2)])
def test_every_placement_of_a_dtensor_becomes_the_same_global_array(root: Path, shape: tuple[int, ...]) -> None:
    told = run_ranks(4, save_placed, root, shape)
    assert all(each == told[0] for each in told), told
    verify(root / "step-00000001")
    group = zarr.open_group(root / "step-00000001", mode="r")
    for name in MESHES:
        assert np.array_equal(np.asarray(group[name]), whole(name, *shape).numpy()), name


def fsdp_on_tensor_parallel(rank: int, root: Path, rows: int) -> list[Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, rows, bias=True))
    expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    written = [local_shard_of(name, value) for name, value in model.named_parameters()]
    path = save(root, 1, written, {}, generation=0).path
    group = zarr.open_group(path, mode="r")
    same = [bool(np.array_equal(np.asarray(group[name]), value.numpy())) for name, value in expected.items()]
    return [type(model[0].weight) is DTensor or isinstance(model[0].weight, DTensor), *same, written[0].offset, written[0].unit]


@pytest.mark.parametrize(("rows", "offsets", "unit"), [(8, [0, 4, 2, 6], 2), (10, [0, 5, 3, 8], 1)])
def test_fsdp_on_tensor_parallel_rows_is_told_apart(root: Path, rows: int, offsets: list[int], unit: int) -> None:
    told = run_ranks(4, fsdp_on_tensor_parallel, root, rows)
    assert told == [[True, True, True, (offset, 0), (unit, 4)] for offset in offsets]


def placement_that_cannot_be_saved(rank: int) -> str:
    tensor = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])
    try:
        local_shard_of("sum", tensor)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_partial_sum_is_refused() -> None:
    assert all("sum: placement" in each and "cannot be saved" in each for each in run_ranks(2, placement_that_cannot_be_saved))


def replicas_share(rank: int, root: Path) -> int:
    """How many bytes this rank has written of an array that both hold."""
    written = 0
    before = direct.write

    def counted(fd: int, data: memoryview, offset: int) -> None:
        nonlocal written
        written += len(data)
        before(fd, data, offset)

    setattr(direct, "write", counted)  # noqa: B010
    data = whole("weight", 64, 4)
    save(root, 1, [LocalShard("weight", (64, 4), (0, 0), data, (8, 4), rank, 2)], {}, generation=0)
    return written


def test_replicas_write_half_each(root: Path) -> None:
    assert run_ranks(2, replicas_share, root) == [4 * 4096, 4 * 4096]
    found = torch.zeros(64, 4)
    load(root / "step-00000001", [local_shard_of("weight", found)])
    assert torch.equal(found, whole("weight", 64, 4))


def two_saves(rank: int, root: Path) -> list[str]:
    """What this rank tells rank 0 during the second save."""
    told: list[Any] = []
    save(root, 1, [rows_of(rank, 2)], {}, generation=0)
    before = dist.gather_object

    def told_to(value: Any, *args: Any, **kwargs: Any) -> None:
        told.append(value)
        before(value, *args, **kwargs)

    setattr(dist, "gather_object", told_to)  # noqa: B010
    save(root, 2, [rows_of(rank, 2)], {}, generation=0)
    return [type(each).__name__ for each in told]


def test_the_second_save_does_not_tell_the_layout_again(root: Path) -> None:
    assert run_ranks(2, two_saves, root) == [["Outcome"], ["Outcome"]]


def grow_on_rank_1(rank: int, root: Path) -> list[int]:
    """Rank 1's block grows between two saves; rank 0 holds what it held."""
    told = []
    for step, rows in ((1, 4), (2, 8)):
        mine = whole("mine", 4, 4) if rank == 0 else whole("mine", rows, 4)
        save(root, step, [LocalShard(f"array{rank}", tuple(mine.shape), (0, 0), mine, (4, 4))], {}, generation=0)
        load(root / f"step-{step:08d}", [local_shard_of("array1", torch.zeros(rows, 4))])
        told.append(rows)
    return told


def test_a_change_on_one_rank_is_a_new_layout_for_all(root: Path) -> None:
    assert run_ranks(2, grow_on_rank_1, root) == [[4, 8], [4, 8]]
    verify(root / "step-00000002")


def reject(rank: int, root: Path) -> tuple[str | None, list[int]]:
    rejected: list[int] = []
    path = newest_good(root, on_reject=lambda step, reason: rejected.append(step))
    return (None if path is None else path.name), rejected


def test_all_ranks_choose_the_same_checkpoint_although_one_sees_the_damage(root: Path) -> None:
    for step in (1, 2):
        save(root, step, [local_shard_of(name, whole(name, 16, 16)) for name in "abcd"], {}, generation=0)
    shard = root / "step-00000002/d/c.0.0"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    assert run_ranks(2, reject, root) == [("step-00000001", [2]), ("step-00000001", [])]


def die_or_save(rank: int, root: Path) -> str:
    if rank == 1:
        points.arm("half_of_chunks_written", kill_this_process)
    return type(save(root, 2, [rows_of(rank, 2)], {}, generation=0)).__name__


def test_a_rank_that_dies_leaves_the_previous_checkpoint(root: Path) -> None:
    run_ranks(2, save_rows, root, 2)
    survivor, dead = run_ranks(2, die_or_save, root)
    assert isinstance(survivor, RuntimeError)
    assert str(dead) == "died with status -9"
    assert steps(root) == [1]
    assert run_ranks(2, load_rows, root, 2) == [True, True]
    save(root, 2, [rows_of(0, 1)], {}, generation=1)
    assert sorted(path.name for path in root.glob("step-*")) == ["step-00000001", "step-00000002"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: a full disk needs root, to mount a tmpfs of 1 MiB; run the tests as root once")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def fill_the_disk(rank: int, root: Path) -> str:
    """Rank 1 holds far more than there is room for."""
    rows = [(0, 8), (8, 1024)][rank]
    local_shard = LocalShard("big", (1032, 256), (rows[0], 0), torch.ones(rows[1], 256), (8, 256))
    try:
        save(root, 2, [local_shard], {}, generation=0)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_full_disk_fails_the_save_on_all_ranks_and_leaves_the_previous_checkpoint(small_disk: Path) -> None:
    run_ranks(2, save_rows, small_disk, 2)
    told = run_ranks(2, fill_the_disk, small_disk)
    assert told[0] == told[1]
    assert told[0].startswith(f"step 2 could not be saved in {small_disk}: rank ")
    assert "OSError: [Errno 28] No space left" in told[0]
    assert [path.name for path in small_disk.glob("step-*")] == ["step-00000001"]
    assert run_ranks(2, load_rows, small_disk, 2) == [True, True]
