"""torch.distributed.checkpoint over the Zarr format: what comes back, what is refused, and real crashes."""

from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from checkpoint_processes import Child, kill_this_process
from checkpoint_state import local_shards
from hypothesis import given
from hypothesis import strategies as st
from soak import soaked_after
from state_dicts import awkward, failure, same
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from checkpoint import (
    CheckpointError,
    CheckpointMismatch,
    DamagedCheckpoint,
    StaleGeneration,
    ZarrReader,
    ZarrWriter,
    newest_good,
    points,
    safe_name,
    save,
    steps,
    verify,
)
from checkpoint.dcp_names import array_name, fqn_of
from checkpoint.fence import raise_fence

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SAVE_POINTS = points.POINTS[: points.POINTS.index("pruned_by_name")]


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
    st.sampled_from(
        ["", ".", "..", "__", "_", "%", "%2F", "a/b", "//", "\0", "zarr.json", "manifest.json", "\t", "%09", "\\", "\x7f"]
    )
    | st.text(max_size=9)
    | st.text(st.characters(max_codepoint=0x7F), max_size=9)
)
def test_every_key_has_a_name_of_its_own_that_zarr_takes(fqn: str) -> None:
    name = array_name(fqn)
    assert fqn_of(name) == fqn
    assert name.startswith("state/")
    assert "/" not in name.removeprefix("state/")
    assert safe_name.array_name(name, (3, 3)) == name


@pytest.mark.parametrize("token", ["a\tb", "\n", "\x1b[0m", "\x7f", "a\\b", "%09", "100%", "a b", "<|eos|>", "\u2028"])
def test_a_module_that_is_called_by_a_token_comes_back(root: Path, token: str) -> None:
    saved, found = ({"model": torch.nn.ModuleDict({token: torch.nn.Linear(2, 2)}).state_dict()} for _ in range(2))
    dcp.save(saved, storage_writer=ZarrWriter(root, 1))
    dcp.load(found, storage_reader=ZarrReader(root / "step-00000001"))
    assert same(found, saved)
    verify(root / "step-00000001")


def test_a_key_that_is_too_long_for_a_name_is_refused_and_leaves_nothing(root: Path) -> None:
    (error,) = failure(lambda: dcp.save({"a/" * 100: torch.ones(3)}, storage_writer=ZarrWriter(root, 1)))
    with pytest.raises(ValueError, match="cannot name an array: it is no text, or too long"):
        raise error
    assert not list(root.glob("step-*"))


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


@pytest.mark.parametrize("point", soaked_after(2, SAVE_POINTS))
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
