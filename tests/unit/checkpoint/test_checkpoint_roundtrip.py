"""What is saved comes back, through any cut of the arrays, and through plain Zarr."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from checkpoint_state import local_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import soaked

from checkpoint import (
    CheckpointError,
    CheckpointMismatch,
    LocalShard,
    layout,
    load,
    local_shard_of,
    points,
    read_state,
    save,
    steps,
    verify,
)
from checkpoint.saving import Saved

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def numbers(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Random bits that are numbers of the type; no NaN, so that they can be compared."""
    values = torch.randint(0, 2 if dtype == torch.bool else 100, tuple(shape))
    return values.to(dtype)


def open_plainly(path: Path) -> zarr.Group:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return zarr.open_group(path, mode="r")


def array(path: Path, name: str) -> "zarr.Array[Any]":
    found = open_plainly(path)[name]
    assert isinstance(found, zarr.Array)
    return found


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[list[int]]]:
    """A shape, a unit, and along each dimension the boundaries of blocks, all of them multiples of the unit or the edge."""
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    unit = tuple(draw(st.integers(1, max(1, length))) for length in shape)
    edges = []
    for length, part in zip(shape, unit, strict=True):
        inner = draw(st.sets(st.sampled_from(range(0, length, part)))) if length else set()
        edges.append(sorted({0, length} | inner))
    return shape, unit, edges


def check_a_cut(
    tmp_path_factory: pytest.TempPathFactory,
    cut: tuple[tuple[int, ...], tuple[int, ...], list[list[int]]],
    dtype: torch.dtype,
    target: int,
    shard: int,
    data: st.DataObject,
) -> None:
    shape, unit, edges = cut
    whole = numbers(shape, dtype)
    written = []
    for block in product(*(pairwise(each) for each in edges)):
        box = tuple(slice(low, high) for low, high in block)
        view = whole[box]
        written.append(
            LocalShard(
                "group/array", shape, tuple(low for low, _ in block), view.clone() if data.draw(st.booleans()) else view, unit
            )
        )
    if 0 in shape:
        written = [LocalShard("group/array", shape, (0,) * len(shape), whole, unit)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "CHUNK_TARGET_BYTES", target)
        patch.setattr(layout, "SHARD_LIMIT_BYTES", shard)
        saved = save(tmp_path_factory.mktemp("root"), 1, written, {}, generation=0)
    verify(saved.path)

    rectangle = [sorted(data.draw(st.tuples(st.integers(0, length), st.integers(0, length)))) for length in shape]
    box = tuple(slice(low, high) for low, high in rectangle)
    inside = torch.zeros(tuple(high - low for low, high in rectangle), dtype=dtype)
    everything = torch.zeros(tuple(reversed(shape)), dtype=dtype).permute(tuple(reversed(range(len(shape)))))  # not contiguous
    load(
        saved.path,
        [
            LocalShard("group/array", shape, tuple(low for low, _ in rectangle), inside, (1,) * len(shape)),
            local_shard_of("group/array", everything),
        ],
    )
    assert same(inside, whole[box])
    assert same(everything, whole)

    stored = array(saved.path, "group/array")
    found = torch.from_numpy(np.asarray(stored[...]).reshape(shape))
    assert stored.attrs.get("bits_of", str(dtype)[6:]) == str(dtype)[6:]
    assert same(found.view(dtype) if "bits_of" in stored.attrs else found, whole)


ANY_CUT = given(
    cut=cuts(),
    dtype=st.sampled_from(DTYPES),
    target=st.sampled_from([1, 24, 4 << 20]),
    shard=st.sampled_from([1, 9000, 16 << 30]),
    data=st.data(),
)


@pytest.mark.parametrize("examples", [15, soaked(200)])
def test_any_cut_can_be_read_through_any_rectangle(tmp_path_factory: pytest.TempPathFactory, examples: int) -> None:
    settings(max_examples=examples, deadline=None)(ANY_CUT(check_a_cut))(tmp_path_factory)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and np.array_equal(_numpy(one), _numpy(other))


def _numpy(data: torch.Tensor) -> np.ndarray[Any, Any]:
    return data.to(torch.float64).numpy() if data.dtype.is_floating_point else data.numpy()


def test_zarr_itself_finds_a_flipped_bit(root: Path, small_chunks: None) -> None:
    saved = save(root, 1, local_shards(), {}, generation=0)
    shard = saved.path / "model/weight/c.0.0"
    content = bytearray(shard.read_bytes())
    content[4096] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        array(saved.path, "model/weight")[...]


def test_stacked_layers_are_one_array_and_can_be_read_one_by_one(root: Path) -> None:
    layers = [torch.randn(3, 5) for _ in range(4)]
    written = [local_shard_of("blocks.weight", layer, stack=(index, 4)) for index, layer in enumerate(layers)]
    saved = save(root, 1, written, {}, generation=0)
    assert array(saved.path, "blocks.weight").shape == (4, 3, 5)
    third = torch.zeros(3, 5)
    load(saved.path, [local_shard_of("blocks.weight", third, stack=(2, 4))])
    assert torch.equal(third, layers[2])


def test_parameters_are_filled_in_place(root: Path) -> None:
    model = torch.nn.Linear(7, 3)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    saved = save(root, 1, [local_shard_of(name, value) for name, value in model.named_parameters()], {}, generation=0)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    load(saved.path, [local_shard_of(name, value) for name, value in model.named_parameters()])
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert model.weight.requires_grad


def test_state_comes_back_and_is_what_zarr_shows(root: Path) -> None:
    state: dict[str, Any] = {
        "samples": 6400,
        "loss": 2.5,
        "rng": [1, 2, 3],
        "name": "größe",
        "nothing": None,
        "nested": {"yes": True},
    }
    saved = save(root, 40, local_shards(), state, generation=3)
    assert read_state(saved.path) == state == load(saved.path, [])
    attributes = open_plainly(saved.path).attrs["resilient"]
    assert attributes == {"version": 1, "step": 40, "generation": 3, "state": state}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"rng": b"bytes"}, r"state\['rng'\] is a bytes"),
        ({"losses": [1.0, float("nan")]}, r"state\['losses'\]\[1\] is nan"),
        ({"by_rank": {0: 1}}, r"state\['by_rank'\] has the key 0"),
    ],
)
def test_a_state_that_json_cannot_say_is_refused(root: Path, state: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        save(root, 1, local_shards(), state, generation=0)
    assert not list(root.glob("step-*"))


@pytest.mark.parametrize("name", ["model/a\tb.weight", "/".join(["m" * 200] * 6)])
def test_what_could_never_be_read_is_refused_and_the_checkpoint_before_stays(root: Path, name: str) -> None:
    save(root, 1, local_shards(), {}, generation=0, keep_last=1)
    with pytest.raises(ValueError, match="cannot name an array"):
        save(root, 2, [local_shard_of(name, torch.ones(3))], {}, generation=0, keep_last=1)
    assert steps(root) == [1]
    verify(root / "step-00000001")


def test_what_save_reports_is_what_is_there(root: Path) -> None:
    saved = save(root, 7, local_shards(), {}, generation=0)
    files = [path for path in saved.path.rglob("*") if path.is_file()]
    assert saved == Saved(root / "step-00000007", 7, sum(path.stat().st_size for path in files), len(files), saved.write_s, False)
    assert steps(root) == [7]


def test_a_missing_array_is_said(root: Path) -> None:
    saved = save(root, 1, local_shards(), {}, generation=0)
    with pytest.raises(CheckpointMismatch, match=r"has no array model/bias; it has 2 others"):
        load(saved.path, [local_shard_of("model/bias", torch.zeros(3))])


@pytest.mark.parametrize("other", [torch.zeros(6, 5), torch.zeros(6, 4, dtype=torch.float64)])
def test_another_shape_or_type_is_said_before_anything_changes(root: Path, other: torch.Tensor) -> None:
    saved = save(root, 1, local_shards(), {}, generation=0)
    moment = torch.full((5,), 9.0)
    with pytest.raises(CheckpointMismatch, match=r"expected float\d+ \[6, \d\], found float32 \[6, 4\]"):
        load(saved.path, [local_shard_of("optimizer/moment", moment), local_shard_of("model/weight", other)])
    assert moment.eq(9.0).all()


def test_a_step_that_is_there_and_sound_is_left_as_it_is(root: Path) -> None:
    first = save(root, 1, local_shards(1.0), {"first": True}, generation=0)
    again = save(root, 1, local_shards(1.0), {"first": False}, generation=1)
    assert again.already_there
    assert not first.already_there
    assert (again.path, again.bytes, again.files) == (first.path, first.bytes, first.files)
    assert read_state(again.path) == {"first": True}
    assert [path.name for path in root.glob("step-*")] == ["step-00000001"]


def test_a_step_that_is_there_and_damaged_is_set_aside(root: Path) -> None:
    for number in (1, 2):
        saved = save(root, 1, local_shards(), {"number": number}, generation=0)
        assert not saved.already_there
        (saved.path / "model/weight/c.0.0").unlink()
    save(root, 1, local_shards(), {"number": 3}, generation=0)
    assert read_state(saved.path) == {"number": 3}
    assert sorted(path.name for path in root.glob("step-*")) == [
        "step-00000001",
        "step-00000001.damaged-1",
        "step-00000001.damaged-2",
    ]
    assert steps(root) == [1]


def test_whatever_else_has_the_name_of_a_step_is_set_aside(root: Path) -> None:
    root.mkdir(exist_ok=True)
    taken = root / "step-00000001"
    for number, target in enumerate(("nowhere", "step-00000001", "/dev/null"), start=1):
        taken.symlink_to(target)
        saved = save(root, 1, local_shards(), {"number": number}, generation=0)
        assert not saved.already_there and read_state(saved.path) == {"number": number}
        assert (root / f"step-00000001.damaged-{number}").readlink() == Path(target)
        saved.path.rename(root / f"mine-{number}")


def test_a_step_that_another_process_commits_meanwhile_is_left_as_it_is(root: Path) -> None:
    def overtake() -> None:
        points.disarm()
        save(root, 1, local_shards(), {"first": True}, generation=0)

    points.arm("chunks_durable", overtake)
    saved = save(root, 1, local_shards(), {"first": False}, generation=1)
    assert saved.already_there
    assert read_state(saved.path) == {"first": True}
    assert [path.name for path in root.glob("step-*")] == ["step-00000001"]


def test_a_system_call_may_do_less_than_it_was_asked_to(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_less(fd: int, data: memoryview, offset: int, call: Callable[..., int] = os.pwrite) -> int:
        return call(fd, data[:11], offset)

    def read_less(fd: int, parts: list[memoryview], offset: int, *flags: int, call: Callable[..., int] = os.preadv) -> int:
        return call(fd, [parts[0][:11]], offset, *flags)

    monkeypatch.setattr(os, "pwrite", write_less)
    monkeypatch.setattr(os, "preadv", read_less)
    values = torch.randn(40, 3)
    saved = save(root, 1, [LocalShard("a", (40, 3), (0, 0), values, (8, 3))], {}, generation=0)
    verify(saved.path)
    found = torch.zeros(40, 3)
    load(saved.path, [local_shard_of("a", found)])
    assert torch.equal(found, values)


def test_other_arrays_than_last_time_are_written_as_they_are(root: Path) -> None:
    """The layout is kept from save to save; it must not outlive a change of the local shards."""
    save(root, 1, [local_shard_of("a", torch.ones(3))], {}, generation=0)
    saved = save(root, 2, [local_shard_of("a", torch.ones(4)), local_shard_of("b", torch.ones(2))], {}, generation=0)
    assert sorted(open_plainly(saved.path)) == ["a", "b"]
    assert array(saved.path, "a").shape == (4,)


def test_a_gpt_needs_few_files(root: Path) -> None:
    """20 arrays of weights with two moments each, whatever the number of layers and ranks."""
    written = [
        local_shard_of(f"{part}/blocks.{number}", torch.zeros(2, 2), stack=(layer, 3))
        for part in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
        for number in range(20)
        for layer in range(3)
    ]
    saved = save(root, 1, written, {}, generation=0)
    assert sum(1 for _ in saved.path.rglob("*")) <= 250


def test_importing_the_package_imports_neither_torch_nor_zarr() -> None:
    script = (
        "import sys, checkpoint, checkpoint.fence, checkpoint.cli, json\n"
        "print(json.dumps([name for name in ('torch', 'zarr', 'numpy') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    assert json.loads(done.stdout) == []


def test_the_snapshot_daemon_imports_no_torch() -> None:
    script = "import sys, checkpoint.daemon.daemon; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "False"
