"""A durable tier that cannot be read keeps nobody from going on from what the nodes hold."""

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from lone_daemon import PATIENCE_S, LoneDaemon
from mounts import hanging, needs_root, unreachable

from checkpoint import Candidate, Holding, LocalShard, NoReachableCheckpoint, Snapshots, restore, restoring, save
from checkpoint.protocol import Held

pytestmark = needs_root

Broken = Callable[[Path], AbstractContextManager[None]]


@pytest.fixture
def held(base: Path) -> Candidate:
    """Step 5, with ones, that this node holds."""
    with LoneDaemon(base) as daemon:
        daemon.start()
        snapshots = Snapshots(daemon.begin(1))
        snapshots.start(weights(1.0))
        snapshots.ready()
        assert snapshots.take(5, weights(1.0), {}, frozenset(["ram"]), wait_s=PATIENCE_S).copied
        directory = daemon.wait_for(Held).shard.directory
        snapshots.finish()
    return Candidate(5, "ram", holdings=[Holding(directory=Path(directory))])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A durable tier with step 3, of threes."""
    (root := tmp_path / "durable").mkdir()
    save(root, 3, weights(3.0), {}, generation=1)
    return root


def weights(value: float) -> list[LocalShard]:
    return [LocalShard("w", (8, 8), (0, 0), torch.full((8, 8), value), (8, 8))]


def in_a_child(work: Callable[[], None]) -> None:
    """It may wait in the kernel without end: it fails then, and is killed."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it must not come back to pytest
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("broken", [unreachable, hanging])
def test_what_is_held_is_gone_on_from_where_the_durable_tier_cannot_be_listed(
    root: Path, held: Candidate, broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring, "LIST_S", 0.5)

    def work() -> None:
        into = weights(0.0)
        found = restore(root, lambda state: into, held=[held], durable_step=3)
        assert found is not None and (found.step, found.tier) == (5, "ram")
        assert float(into[0].data[0, 0]) == 1.0

    with broken(root):
        in_a_child(work)


@pytest.mark.parametrize("broken", [unreachable, hanging])
def test_what_is_durable_and_newer_than_what_is_held_is_not_given_up_because_it_cannot_be_listed(
    root: Path, held: Candidate, broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring, "LIST_S", 0.5)

    def work() -> None:
        with pytest.raises(NoReachableCheckpoint, match=r"step 7: .*durable cannot be read"):
            restore(root, lambda state: weights(0.0), held=[held], durable_step=7)

    with broken(root):
        in_a_child(work)


def test_what_is_held_and_damaged_leaves_unknown_what_a_durable_tier_has_that_cannot_be_listed(root: Path, held: Candidate) -> None:
    gone = Candidate(5, "ram", holdings=[Holding(directory=root.parent / "nowhere")])
    with unreachable(root), pytest.raises(NoReachableCheckpoint, match="start again once"):
        restore(root, lambda state: weights(0.0), held=[gone], durable_step=3)
