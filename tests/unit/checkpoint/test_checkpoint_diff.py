"""`resilient ckpt diff`: what differs between two checkpoints, whatever their layouts."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_commands import flip, run, told, whole
from checkpoint_state import local_shards
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import LocalShard, save
from checkpoint.tools import diff, stream
from checkpoint.tools.diff import MISSING, Comparison, Tolerance, differing_state


def pair(tmp_path: Path, a: Sequence[LocalShard], b: Sequence[LocalShard]) -> tuple[Path, Path]:
    return save(tmp_path / "a", 1, a, {}, generation=0).path, save(tmp_path / "b", 1, b, {}, generation=0).path


KINDS = "bool uint8 int32 int64 uint16 uint64 float16 bfloat16 float32 float64 complex64 complex128 float8_e4m3fn float8_e5m2"


@pytest.mark.parametrize("kind", KINDS.split())
def test_diff_finds_one_element_of_every_type(tmp_path: Path, small_chunks: None, kind: str) -> None:
    values = torch.arange(600).reshape(20, 30).fmod(2).to(getattr(torch, kind))
    other = values.clone()
    other[7, 11] = 0 if bool(values[7, 11].to(torch.complex64) != 0) else 1
    a, b = pair(tmp_path, [whole("x", values, (20, 30))], [whole("x", other, (4, 5))])
    (found,) = told("diff", a, b, code=1)["arrays"]
    assert (found["differing"], found["elements"], found["max_abs"], found["max_rel"]) == (1, 600, 1.0, 1.0)
    assert not found["bit_equal"]
    c = save(tmp_path / "c", 1, [whole("x", values, (5, 30))], {}, generation=0).path
    result = run("diff", a, c)
    assert result.exit_code == 0
    assert "1 of 1 arrays in both are equal bit by bit: equal" in result.stdout


@pytest.mark.parametrize("limit", [1, 40, 1000])
def test_diff_counts_as_numpy_does_whatever_the_layouts(
    tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(diff, "_AT_ONCE", 17)
    monkeypatch.setattr(stream.boxes, "__defaults__", (limit * 4,))
    random = np.random.default_rng(1)
    one = random.normal(size=(13, 7, 9)).astype(np.float32)
    other = np.where(random.random(one.shape) < 0.3, one * (1 + random.normal(size=one.shape) * 0.01), one).astype(np.float32)
    one[2, 3, 4] = other[2, 3, 4] = np.nan
    one[3, 3, 3] = np.nan
    a, b = pair(tmp_path, [whole("x", torch.from_numpy(one), (4, 7, 3))], [whole("x", torch.from_numpy(other), (5, 2, 9))])
    (found,) = Comparison(a, b, tolerance=Tolerance(1e-4, 1e-3)).run().arrays
    exact = one.astype(np.float64), other.astype(np.float64)
    distance, largest = np.abs(exact[0] - exact[1]), np.maximum(*map(np.abs, exact))
    assert found.differing == np.count_nonzero(one.view(np.uint32) != other.view(np.uint32))
    assert found.max_abs == np.nanmax(distance)
    assert found.max_rel == np.nanmax(distance / largest)
    assert found.beyond == np.count_nonzero(distance > 1e-4 + 1e-3 * largest) + 1
    assert (found.nan_a, found.nan_b) == (2, 1)


def test_diff_knows_the_corners_of_floats(tmp_path: Path) -> None:
    a, b = pair(
        tmp_path,
        [whole("x", torch.tensor([0.0, math.inf, math.inf, 1.0, math.nan]))],
        [whole("x", torch.tensor([-0.0, math.inf, -math.inf, math.inf, math.nan]))],
    )
    (found,) = told("diff", a, b, "--rtol", "1", code=1)["arrays"]
    assert (found["differing"], found["beyond"], found["max_abs"], found["max_rel"]) == (3, 2, "inf", 1.0)
    assert (found["nan_a"], found["nan_b"]) == (1, 1)


def test_diff_is_exact_for_large_integers(tmp_path: Path) -> None:
    low, high = -(2**63), 2**63 - 1
    a, b = pair(tmp_path, [whole("x", torch.tensor([high, low, 5]))], [whole("x", torch.tensor([high - 1, high, 5]))])
    (found,) = Comparison(a, b).run().arrays
    assert (found.differing, found.max_abs) == (2, 2.0**64)
    (close,) = Comparison(a, b, tolerance=Tolerance(atol=1.0)).run().arrays
    assert close.beyond == 1


def test_diff_with_tolerances_across_types(tmp_path: Path) -> None:
    values = torch.linspace(0.1, 1, 50)
    a, b = pair(tmp_path, [whole("x", values)], [whole("x", values.bfloat16())])
    assert run("diff", a, b).exit_code == 1
    assert run("diff", a, b, "--rtol", "0.01").exit_code == 0
    assert run("diff", a, b, "--atol", "1e-6").exit_code == 1
    refused = run("diff", a, b, "--atol", "-1")
    assert refused.exit_code == 78
    assert "a tolerance is a number from 0 on" in refused.stderr


def test_diff_of_names_shapes_scalars_and_empty_arrays(tmp_path: Path) -> None:
    same = [whole("scalar", torch.tensor(2.0)), whole("empty", torch.zeros(0, 3))]
    a, b = pair(
        tmp_path,
        [*same, whole("mine", torch.zeros(2)), whole("shape", torch.zeros(2, 3))],
        [*same, whole("yours", torch.zeros(2)), whole("shape", torch.zeros(3, 2))],
    )
    found = told("diff", a, b, "--rtol", "1", code=1)
    assert (found["only_a"], found["only_b"]) == (["mine"], ["yours"])
    assert {each["name"]: each["equal"] for each in found["arrays"]} == {"scalar": True, "empty": True, "shape": False}
    text = run("diff", a, b).stdout
    assert "only in A: mine" in text
    assert "[2, 3] / [3, 2]" in text
    assert run("diff", a, b, "--only", "s*r", "--only", "empty").exit_code == 0
    refused = run("diff", a, b, "--only", "nothing*")
    assert refused.exit_code == 78
    assert "no array is called nothing*" in refused.stderr


def test_diff_shows_the_state_which_does_not_count(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = [{"a": 1, "in": {"b": [1], "c": 1, "d": None}}, {"a": 1, "in": {"b": [2], "c": 1.0}}]
    a, b = (save(tmp_path / f"{number}", 1, local_shards(), state, generation=0).path for number, state in enumerate(states))
    found = told("diff", a, b)
    assert found["state"]["in.b"] == {"a": {"value": [1]}, "b": {"value": [2]}}
    assert found["state"]["in.d"] == {"a": {"value": None}, "b": {}}
    assert "state in.d: None in A, (missing) in B" in run("diff", a, b).stdout
    assert differing_state(*states) == {"in.b": ([1], [2]), "in.c": (1, 1.0), "in.d": (None, MISSING)}


def test_diff_takes_the_newest_and_finds_damage(campaign: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = save(tmp_path_factory.mktemp("other"), 7, local_shards(300.0), {}, generation=0).path
    assert told("diff", campaign, other)["a"].endswith("step-00000300")
    flip(other / "model/weight/c.0.0", 5000 - 5000 % 4096)
    result = run("diff", campaign, other)
    assert result.exit_code == 69
    assert "wrong checksum" in result.stderr
    assert run("diff", campaign / "node0/step-00000350", other).exit_code == 78
    assert run("diff", campaign / "node0", other).exit_code == 69


shapes = st.lists(st.integers(1, 14), min_size=0, max_size=3)


@settings(deadline=None)
@given(st.data(), shapes, st.integers(1, 3000), st.sampled_from([1, 2, 4, 16]))
def test_boxes_cover_an_array_once_and_are_small(data: st.DataObject, shape: list[int], limit: int, size: int) -> None:
    cuts = st.tuples(*(st.integers(1, length) for length in shape))
    chunks = [data.draw(cuts), data.draw(cuts)]
    seen = np.zeros(shape, int)
    for offset, extent in stream.boxes(tuple(shape), size, chunks, limit):
        assert math.prod(extent) * size <= max(limit, size)
        seen[tuple(slice(start, start + length) for start, length in zip(offset, extent, strict=True))] += 1
    assert np.all(seen == 1)


def test_boxes_follow_chunks_where_they_fit() -> None:
    assert [extent for _, extent in stream.boxes((12, 8), 1, [(3, 8), (4, 4)], 96)] == [(12, 8)]
    assert {offset[0] % 12 for offset, _ in stream.boxes((48, 8), 1, [(3, 8), (4, 4)], 100)} == {0}
    assert list(stream.boxes((), 4, [(), ()])) == [((), ())]
    assert list(stream.boxes((0, 3), 4, [(1, 3)])) == []
