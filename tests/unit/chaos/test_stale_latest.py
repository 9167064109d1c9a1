"""What looks like the newest checkpoint is a copy of the oldest that stays there for as long as it takes to copy it."""

import json
from pathlib import Path
from typing import Literal, cast

import pytest

from chaos.fault import CannotInject
from chaos.faults.stale_latest import StaleLatest
from chaos.injectors.context import InjectionContext
from checkpoint.naming import step_path, steps, temporary_path

NOBODY = cast(InjectionContext, None)  # is not asked


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (5, 10, 15):
        path = step_path(tmp_path, step)
        path.mkdir()
        (path / "manifest.json").write_text(json.dumps({"step": step}))
        (path / "shard").write_bytes(b"0" * 100)
    return tmp_path


def vanish(root: Path, step: int) -> None:
    """A file of it is in the directory and is gone when it is read, as while somebody deletes it."""
    (step_path(root, step) / "shard").unlink()
    (step_path(root, step) / "shard").symlink_to("gone")


@pytest.mark.parametrize("how", ["older", "unfinished"])
@pytest.mark.parametrize(("gone", "copied"), [((), 5), ((5,), 10)])
def test_it_is_the_oldest_that_can_be_copied(root: Path, how: Literal["older", "unfinished"], gone: tuple[int, ...], copied: int):
    for step in gone:
        vanish(root, step)
    evidence = StaleLatest(how=how).damage(step_path(root, 15), NOBODY)
    target = step_path(root, 16) if how == "older" else temporary_path(root, 16, 0)
    assert evidence == {"path": str(target), "of_step": copied}
    assert steps(root) == ([5, 10, 15, 16] if how == "older" else [5, 10, 15])
    assert len(list(root.iterdir())) == 4
    sound = json.dumps({"step": copied})
    assert (target / "manifest.json").read_text() == (sound if how == "older" else sound[:10])


def test_where_none_can_be_copied_nothing_is_injected_and_nothing_is_left(root: Path):
    for step in steps(root):
        vanish(root, step)
    with pytest.raises(CannotInject, match="stays there"):
        StaleLatest().damage(step_path(root, 15), NOBODY)
    assert sorted(root.iterdir()) == [step_path(root, step) for step in (5, 10, 15)]
