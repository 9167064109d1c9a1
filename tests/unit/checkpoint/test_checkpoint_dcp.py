"""torch.distributed.checkpoint over the Zarr format: real ranks, real crashes, and the example that users begin with."""

import errno
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from checkpoint_processes import Child, kill_this_process, run_ranks
from checkpoint_state import local_shards
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from checkpoint import (
    CheckpointError,
    CheckpointMismatch,
    DamagedCheckpoint,
    StaleGeneration,
    ZarrReader,
    ZarrWriter,
    newest_good,
    points,
    save,
    steps,
    verify,
)
from checkpoint.dcp_names import array_name, fqn_of
from checkpoint.fence import raise_fence

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

EXAMPLE = Path(__file__).parents[3] / "examples/plain_pytorch.py"
SAVE_POINTS = points.POINTS[: points.POINTS.index("pruned_by_name")]


def awkward(empty: bool = False) -> dict[str, Any]:
    """Whatever a state dict may hold."""
    values: dict[str, Any] = {
        "matrix": torch.arange(12.0).reshape(3, 4),
        "transposed": torch.arange(12).reshape(3, 4).t(),
        "number": torch.tensor(3.5),
        "nothing": torch.ones(0, 4),
        "bf16": torch.linspace(0, 1, 5).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "a/b": torch.ones(2),
        ".hidden": torch.ones(3),
        "zarr.json": torch.ones(4),
        "__nested__": {"100%": torch.ones(5), "": {"deep": torch.ones(6)}},
        "list": [torch.ones(7), "text", {"inner": torch.ones(8)}],
        "step": 40,
        "group": {"lr": 1e-3, "betas": (0.9, 0.95), "name": None},
    }
    return blank(values) if empty else values


def blank(value: Any) -> Any:
    """The same with zeros, and other objects."""
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    if isinstance(value, list):
        return [blank(each) for each in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else "not loaded"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(each, other[key]) for key, each in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def failure(work: Callable[[], Any]) -> list[BaseException]:
    """What DCP says went wrong, by rank; it raises what `except Exception` does not catch."""
    try:
        work()
    except CheckpointException as error:
        return [error.failures[rank][0] for rank in sorted(error.failures)]
    return []


def test_a_state_dict_of_all_kinds_comes_back_and_zarr_shows_its_tensors(root: Path, small_chunks: None) -> None:
    dcp.save(awkward(), storage_writer=ZarrWriter(root, 7))
    assert steps(root) == [7]
    path = newest_good(root)
    assert path is not None
    found = awkward(empty=True)
    dcp.load(found, storage_reader=ZarrReader(path))
    assert same(found, awkward())

    group = zarr.open_group(path, mode="r")
    for name in ("matrix", "transposed", "number", "nothing", "flags"):
        stored = np.asarray(group[f"state/{name}"])  # type: ignore[arg-type]
        assert np.array_equal(stored, awkward()[name].numpy())
    assert group["state/bf16"].attrs["bits_of"] == "bfloat16"
    assert len(list(group["state"])) == 13  # type: ignore[arg-type]
    assert list(group["objects"]) == ["0"]  # type: ignore[arg-type]


@given(
    st.sampled_from(["", ".", "..", "__", "_", "%", "%2F", "a/b", "//", "\0", "zarr.json", "manifest.json"]) | st.text(max_size=9)
)
def test_every_key_has_a_name_of_its_own_that_zarr_takes(fqn: str) -> None:
    name = array_name(fqn)
    assert fqn_of(name) == fqn
    node = name.removeprefix("state/")
    assert node
    assert not node.startswith((".", "__"))
    assert not {"/", "\0"} & set(node)
    assert node not in ("zarr.json", "manifest.json")


def test_a_checkpoint_of_save_is_read_by_its_names_and_into_another_type(root: Path) -> None:
    path = save(root, 1, local_shards(1.0), {"dcp_is": "not there"}, generation=0).path
    found = {"model/weight": torch.zeros(6, 4, dtype=torch.float64), "optimizer/moment": torch.zeros(5)}
    dcp.load(found, storage_reader=ZarrReader(path))
    assert torch.equal(found["model/weight"], torch.arange(24.0).reshape(6, 4).double() + 1)
    assert torch.equal(found["optimizer/moment"], torch.linspace(0, 1, 5))


def test_the_path_of_a_checkpoint_says_where_it_goes(root: Path) -> None:
    writer = ZarrWriter(root / "elsewhere", generation=1)
    for step in (10, 20):
        dcp.save({"step": torch.tensor(step)}, checkpoint_id=root / f"step-{step:08d}", storage_writer=writer)
    assert steps(root) == [10, 20]
    found = {"step": torch.tensor(0)}
    dcp.load(found, checkpoint_id=root / "step-00000020", storage_reader=ZarrReader(root / "step-00000010"))
    assert found["step"] == 20
    with pytest.raises(ValueError, match=r"is called ROOT/step-<8 digits>, not .*latest"):
        dcp.save({}, checkpoint_id=root / "latest", storage_writer=writer)
    with pytest.raises(ValueError, match="which step"):
        dcp.save({}, storage_writer=ZarrWriter(root))


def test_a_step_that_is_there_is_left_and_a_damaged_one_is_set_aside(root: Path) -> None:
    found = {"a": torch.zeros(3)}
    for fill in (1.0, 2.0):
        dcp.save({"a": torch.full((3,), fill)}, storage_writer=ZarrWriter(root, 1))
    dcp.load(found, storage_reader=ZarrReader(root / "step-00000001"))
    assert found["a"].eq(1.0).all()
    (root / "step-00000001/state/a/c.0").unlink()
    dcp.save({"a": torch.full((3,), 2.0)}, storage_writer=ZarrWriter(root, 1))
    dcp.load(found, storage_reader=ZarrReader(root / "step-00000001"))
    assert found["a"].eq(2.0).all()
    assert sorted(path.name for path in root.glob("step-*")) == ["step-00000001", "step-00000001.damaged-1"]


@pytest.mark.parametrize("file", ["state/matrix/c.0.0", "objects/0/c.0", "state/number/c", "zarr.json", "manifest.json"])
def test_a_damaged_byte_is_found(root: Path, file: str) -> None:
    dcp.save(awkward(), storage_writer=ZarrWriter(root, 1))
    path = root / "step-00000001"
    content = bytearray((path / file).read_bytes())
    content[4096 if file.endswith(("c.0.0", "c.0")) else 2] ^= 1
    (path / file).write_bytes(content)
    with pytest.raises(DamagedCheckpoint):
        verify(path)
    (error,) = failure(lambda: dcp.load(awkward(empty=True), storage_reader=ZarrReader(path)))
    assert isinstance(error, DamagedCheckpoint) or "metadata is None" in str(error)  # what DCP makes of it, by version


class DoublePrecision(DefaultSavePlanner):
    """Gives something else than it has planned."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        return super().resolve_data(write_item).double()


class Talkative(DefaultSavePlanner):
    """Has data of its own."""

    def create_local_plan(self) -> SavePlan:
        return replace(super().create_local_plan(), planner_data={"a": (b"bytes",)})


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        (DoublePrecision(), r"a: expected float32 \[3\] as planned, and the planner gives float64 \[3\]"),
        (Talkative(), r"a: the path \(b'bytes',\) cannot be stored"),
    ],
)
def test_what_a_planner_must_not_do_is_said_and_leaves_nothing(root: Path, planner: DefaultSavePlanner, message: str) -> None:
    (error,) = failure(lambda: dcp.save({"a": torch.ones(3)}, storage_writer=ZarrWriter(root, 1), planner=planner))
    with pytest.raises(ValueError, match=message):
        raise error
    assert not list(root.glob("step-*"))


def test_a_planner_that_sends_only_changes_is_refused(root: Path) -> None:
    def save_cached(step: int) -> None:
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"a": torch.ones(3)}, storage_writer=ZarrWriter(root, step), planner=planner)

    save_cached(1)
    (error,) = failure(lambda: save_cached(2))
    assert "enable_plan_caching=False" in str(error)
    assert steps(root) == [1]


def test_ranks_that_do_not_speak_are_refused(root: Path) -> None:
    with pytest.raises(CheckpointError, match="use collectives"):
        dcp.save({"a": torch.ones(3)}, storage_writer=ZarrWriter(root, 1), use_collectives=False)


def test_another_use_of_the_state_is_told_apart(root: Path) -> None:
    path = save(root, 1, local_shards(), {"dcp": "mine"}, generation=0).path
    with pytest.raises(CheckpointMismatch, match="is not what ZarrWriter writes"):
        ZarrReader(path).read_metadata()


def test_a_stale_generation_is_refused(root: Path) -> None:
    dcp.save(awkward(), storage_writer=ZarrWriter(root, 1, generation=1))
    raise_fence(root, 2)
    (error,) = failure(lambda: dcp.save(awkward(), storage_writer=ZarrWriter(root, 2, generation=1)))
    assert isinstance(error, StaleGeneration)
    assert [path.name for path in root.glob("step-*")] == ["step-00000001"]
    dcp.save(awkward(), storage_writer=ZarrWriter(root, 2, generation=2))
    assert steps(root) == [1, 2]


def save_and_die(pipe: Connection, root: Path, point: str) -> None:
    points.arm(point, kill_this_process)
    dcp.save(awkward(), storage_writer=ZarrWriter(root, 2, generation=1))
    pipe.send("survived")


@pytest.mark.parametrize("point", SAVE_POINTS)
def test_a_writer_killed_at_any_point_leaves_the_old_or_the_new(root: Path, point: str) -> None:
    dcp.save(awkward(), storage_writer=ZarrWriter(root, 1))
    if point == "old_set_aside":
        dcp.save(awkward(), storage_writer=ZarrWriter(root, 2))
        (root / "step-00000002/zarr.json").unlink()
    with Child(save_and_die, root, point) as child:
        assert child.end() == -9
    path = newest_good(root)
    published = SAVE_POINTS.index(point) >= SAVE_POINTS.index("renamed")
    assert path == root / f"step-0000000{2 if published else 1}"
    found = awkward(empty=True)
    dcp.load(found, storage_reader=ZarrReader(path))
    assert same(found, awkward())
    dcp.save(awkward(), storage_writer=ZarrWriter(root, 3, generation=2))
    assert not list(root.glob("*.tmp"))


def whole(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(float(rows * columns)).reshape(rows, columns)


def training(ranks: int, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose dimensions no number of ranks divides, one step into its training."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 11), torch.nn.Linear(11, 7, bias=False), torch.nn.Linear(7, 1))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


def save_training(rank: int, root: Path, ranks: int) -> dict[str, Any]:
    model, optimizer = training(ranks, seed=0)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, storage_writer=ZarrWriter(root, 1))
    return {name: value.full_tensor().numpy() for name, value in weights.items()}


def load_and_save_training(rank: int, root: Path, ranks: int, step: int) -> Any:
    """From one step to the next, through a model that has other numbers."""
    model, optimizer = training(ranks, seed=step)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    path = newest_good(root)
    assert path is not None
    dcp.load(state, storage_reader=ZarrReader(path))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, storage_writer=ZarrWriter(root, step))
    return optimizer.param_groups[0]["lr"]


def test_training_goes_from_one_rank_to_two_to_three_and_back(root: Path, small_chunks: None) -> None:
    (weights,) = run_ranks(1, save_training, root, 1)
    for step, ranks in ((2, 2), (3, 3), (4, 1)):
        assert run_ranks(ranks, load_and_save_training, root, ranks, step) == [0.1] * ranks
    first, last = (zarr.open_group(root / f"step-0000000{step}", mode="r")["state"] for step in (1, 4))
    assert isinstance(first, zarr.Group)
    assert isinstance(last, zarr.Group)
    names = sorted(first)
    assert names == sorted(last)
    assert len([name for name in names if name.endswith(".exp_avg")]) == len(weights) == 5
    for name in names:
        assert np.array_equal(np.asarray(first[name]), np.asarray(last[name])), name  # type: ignore[arg-type]
    for name, value in weights.items():
        assert np.array_equal(np.asarray(first[f"model.{name}"]), value)  # type: ignore[arg-type]


PLACED = {
    "rows": [Replicate(), Shard(0)],
    "both": [Shard(0), Shard(1)],
    "twice": [Shard(1), Shard(1)],
    "replicas": [Replicate(), Replicate()],
}


def save_placed(rank: int, root: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    state = {name: distribute_tensor(whole(5, 7), mesh, placed) for name, placed in PLACED.items()}
    dcp.save({**state, "plain": whole(3, 2), "rank": "all"}, storage_writer=ZarrWriter(root, 1))


def load_columns(rank: int, root: Path) -> bool:
    mesh = init_device_mesh("cpu", (3,))
    state: dict[str, Any] = {name: distribute_tensor(torch.zeros(5, 7), mesh, [Shard(1)]) for name in PLACED}
    state |= {"plain": torch.zeros(3, 2), "rank": None}
    dcp.load(state, storage_reader=ZarrReader(root / "step-00000001"))
    return all(torch.equal(state[name].full_tensor(), whole(5, 7)) for name in PLACED) and state["rank"] == "all"


def test_any_layout_becomes_one_array_and_loads_into_another(root: Path) -> None:
    assert run_ranks(4, save_placed, root) == [None] * 4
    verify(root / "step-00000001")
    assert run_ranks(3, load_columns, root) == [True] * 3
    group = zarr.open_group(root / "step-00000001", mode="r")
    for name in PLACED:
        assert np.array_equal(np.asarray(group[f"state/{name}"]), whole(5, 7).numpy())  # type: ignore[arg-type]


def save_while_training(rank: int, root: Path) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(whole(5, 7), mesh, [Shard(0)])
    saving = dcp.async_save({"weight": tensor, "step": 1}, storage_writer=ZarrWriter(root, 1))
    tensor.to_local().fill_(-1.0)
    saving.result()  # type: ignore[union-attr]
    dcp.load({"weight": tensor}, storage_reader=ZarrReader(root / "step-00000001"))
    return torch.equal(tensor.full_tensor(), whole(5, 7))


def test_saving_in_the_background_writes_what_was_there_at_the_call(root: Path) -> None:
    assert run_ranks(2, save_while_training, root) == [True, True]
    verify(root / "step-00000001")


def save_on_a_full_disk(rank: int, root: Path) -> list[str]:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank == 1:
        points.arm("chunks_written", full)
    tensor = distribute_tensor(whole(5, 7), init_device_mesh("cpu", (2,)), [Shard(0)])
    errors = failure(lambda: dcp.save({"weight": tensor}, storage_writer=ZarrWriter(root, 2)))
    return [type(error).__name__ for error in errors if "No space" in str(error)]


def test_a_failure_of_one_rank_fails_all_and_leaves_nothing(root: Path) -> None:
    assert run_ranks(2, save_while_training, root) == [True, True]
    assert run_ranks(2, save_on_a_full_disk, root) == [["OSError"], ["OSError"]]
    assert [path.name for path in root.glob("step-*")] == ["step-00000001"]


def die_or_save(rank: int, root: Path, generation: int, dies: bool) -> str:
    if dies and rank == 1:
        points.arm("half_of_chunks_written", kill_this_process)
    tensor = distribute_tensor(whole(5, 7) + 1, init_device_mesh("cpu", (2,)), [Shard(0)])
    dcp.save({"weight": tensor}, storage_writer=ZarrWriter(root, 2, generation=generation))
    return "saved"


def test_a_rank_killed_in_the_middle_leaves_the_old_checkpoint(root: Path) -> None:
    run_ranks(2, save_while_training, root)
    survivor, dead = run_ranks(2, die_or_save, root, 0, True)
    assert isinstance(survivor, RuntimeError)
    assert str(dead) == "died with status -9"
    assert newest_good(root) == root / "step-00000001"
    raise_fence(root, 1)
    assert run_ranks(2, die_or_save, root, 1, False) == ["saved", "saved"]
    assert sorted(path.name for path in root.glob("step-*")) == ["step-00000001", "step-00000002"]


def run_example(root: Path, last_step: int, *launcher: str) -> list[str]:
    command = [sys.executable, *launcher, str(EXAMPLE), str(root), str(last_step)]
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("step ")]


def example_into(pipe: Connection, root: Path, last_step: int, output: Path) -> None:
    sys.argv = [str(EXAMPLE), str(root), str(last_step)]
    sys.stdout = output.open("w")
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def run_example_forked(root: Path, last_step: int, output: Path) -> list[str]:
    """The same in a process that has imported PyTorch already."""
    with Child(example_into, root, last_step, output) as child:
        assert child.end() == 0
    return output.read_text().splitlines()


@pytest.fixture(scope="module")
def ten_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The example's checkpoints and what it printed, in ten steps at a stretch."""
    root = tmp_path_factory.mktemp("example")
    return root, run_example_forked(root, 10, root.with_suffix(".txt"))


def test_the_example_goes_on_where_it_ended(tmp_path: Path, ten_steps: tuple[Path, list[str]]) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 75
    _, straight = ten_steps
    assert run_example_forked(tmp_path / "resumed", 7, tmp_path / "output") == straight[:7]
    assert run_example(tmp_path / "resumed", 10) == straight[5:]
    assert steps(tmp_path / "resumed") == [5, 10]


@pytest.mark.soak
def test_the_example_goes_on_under_torchrun(tmp_path: Path, ten_steps: tuple[Path, list[str]]) -> None:
    done, straight = ten_steps
    root = shutil.copytree(done, tmp_path / "root")
    told = run_example(root, 12, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    assert [line.split()[1] for line in (*straight, *told)] == [str(step) for step in range(1, 13)]
