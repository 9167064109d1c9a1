"""torch.distributed.checkpoint over the Zarr format, by several ranks: other layouts, failures, and the example."""

import errno
import os
import runpy
import shutil
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from checkpoint_processes import Child, kill_this_process, run_ranks
from state_dicts import failure
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from checkpoint import ZarrReader, ZarrWriter, newest_good, points, steps, verify
from checkpoint.fence import raise_fence

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

EXAMPLE = Path(__file__).parents[3] / "examples/plain_pytorch.py"


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
