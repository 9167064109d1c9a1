"""Whatever moment a writer dies at, a reader finds the old checkpoint or the new one, whole."""

import random
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from checkpoint_processes import Child, kill_this_process
from checkpoint_state import local_shards
from soak import soaked

from checkpoint import LocalShard, load, newest_good, points, prune, save, steps
from checkpoint.fence import newest_generation, raise_fence

SAVE_POINTS = points.POINTS[: points.POINTS.index("fence_written")]
AND_FENCE_POINTS = points.POINTS[: points.POINTS.index("buffer_made")]


def save_and_die(pipe: Connection, root: Path, point: str) -> None:
    points.arm(point, kill_this_process)
    save(root, 3, local_shards(3.0), {"step": 3}, generation=1, keep_last=1)
    pipe.send("survived")


def newest_step(root: Path) -> int:
    """The step of the newest checkpoint, every byte of which has been compared with what was saved."""
    path = newest_good(root)
    assert path is not None
    found = [LocalShard(each.array, each.shape, each.offset, torch.full_like(each.data, -1), each.unit) for each in local_shards()]
    state = load(path, found)
    step = state["step"]
    assert isinstance(step, int)
    for one, other in zip(found, local_shards(float(step)), strict=True):
        assert torch.equal(one.data, other.data)
    return step


@pytest.mark.parametrize("point", SAVE_POINTS)
def test_a_writer_killed_at_any_point_leaves_the_old_or_the_new(root: Path, point: str) -> None:
    for step in (1, 2):
        save(root, step, local_shards(float(step)), {"step": step}, generation=0)
    damaged = point == "old_set_aside"
    if damaged:  # only then is there something to set aside
        (save(root, 3, local_shards(9.0), {"step": 3}, generation=0).path / "zarr.json").unlink()
    with Child(save_and_die, root, point) as child:
        assert child.end() == -9

    published = SAVE_POINTS.index(point) >= SAVE_POINTS.index("renamed")
    assert newest_step(root) == (3 if published else 2)

    # The next attempt begins where this one ended, and clears away what it left.
    raise_fence(root, 2)
    save(root, 3, local_shards(3.0), {"step": 3}, generation=2, keep_last=1)
    if published:
        prune(root, keep_last=1)
    assert newest_step(root) == 3
    left = {path.name for path in root.iterdir() if path.is_dir()}
    assert left - {"step-00000003.damaged-1"} == {"step-00000003"}
    assert ("step-00000003.damaged-1" in left) == damaged


def save_on_and_on(pipe: Connection, root: Path) -> None:
    step = newest_step(root)
    while True:
        step += 1
        save(root, step, local_shards(float(step)), {"step": step}, generation=0, keep_last=2)
        pipe.send(step)


@pytest.mark.parametrize("kills", [12, soaked(200)])
def test_what_was_reported_as_saved_is_there_after_a_kill_at_a_random_moment(root: Path, kills: int) -> None:
    save(root, 1, local_shards(1.0), {"step": 1}, generation=0)
    moments = random.Random(7)
    for _ in range(kills):
        with Child(save_on_and_on, root) as child:
            for _ in range(moments.randint(1, 3)):
                reported = child.receive()
            child.process.join(moments.uniform(0, 0.03))  # somewhere inside the next save
            child.process.kill()
            child.process.join()
            while child.pipe.poll():
                try:
                    reported = child.receive()
                except EOFError:
                    break
        assert newest_step(root) in (reported, reported + 1)
        assert len(steps(root)) <= 3


def raise_and_die(pipe: Connection, root: Path, point: str) -> None:
    points.arm(point, kill_this_process)
    raise_fence(root, 7)
    pipe.send("survived")


@pytest.mark.parametrize(("point", "generation"), [("fence_written", 3), ("fence_replaced", 7)])
def test_a_fence_is_raised_or_not_when_its_raiser_is_killed(root: Path, point: str, generation: int) -> None:
    raise_fence(root, 3)
    with Child(raise_and_die, root, point) as child:
        assert child.end() == -9
    assert newest_generation(root) == generation
    assert raise_fence(root, 7) == 7
    assert newest_generation(root) == 7


def test_every_point_is_passed_in_the_order_that_is_written_down(root: Path) -> None:
    (save(root, 1, local_shards(), {}, generation=0).path / "zarr.json").unlink()
    save(root, 0, local_shards(), {}, generation=0)
    passed: list[str] = []
    for point in points.POINTS:
        points.arm(point, lambda point=point: passed.append(point))  # type: ignore[misc]
    save(root, 1, local_shards(), {}, generation=0, keep_last=1)
    raise_fence(root, 1)
    assert tuple(passed) == AND_FENCE_POINTS
