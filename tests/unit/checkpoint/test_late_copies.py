"""Snapshots that a GPU copies while training goes on: a real daemon, and a stand-in for the GPU whose copies are late."""

import errno
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lone_daemon import PATIENCE_S, LoneDaemon

from checkpoint import LocalShard, Snapshots, restore
from checkpoint.block import Block
from checkpoint.device import OrderOfUseError, StandIn
from checkpoint.protocol import Committed, Flushed, Held, Retain, SnapshotKey, StartJob
from checkpoint.tiers import mappings
from checkpoint.tiers import snapshots as tiers_snapshots
from checkpoint.tiers.affordable import Affordable
from checkpoint.tiers.gathering import Gathering

RAM = frozenset(["ram"])


class Training:
    """A rank with weights and a buffer on a GPU, and a number on the CPU; all of them are the number of the step."""

    def __init__(self, base: Path, gpu: StandIn) -> None:
        self.daemon = LoneDaemon(base)
        self.gpu = gpu
        self.weights, self.running = torch.zeros(64, 256), torch.zeros(16)
        self.daemon.start()
        self.snapshots = Snapshots(self.daemon.begin(1))
        self.snapshots.start(self.shards(), self.gpu)
        self.ready = self.snapshots.ready()
        self.step = 0

    def shards(self) -> list[LocalShard]:
        return [
            LocalShard("model/w", (64, 256), (0, 0), self.weights, (64, 256)),
            LocalShard("model/running", (16,), (0,), self.running, (16,)),
            LocalShard("count", (), (), torch.tensor(float(self.weights[0, 0])), ()),
        ]

    def compute(self, *, told: bool = True) -> None:
        """The next step: the buffer changes in the forward pass, weights in the optimizer's step."""
        self.running += 1
        if told:
            self.snapshots.before_change()
        self.weights += 1
        self.step += 1

    def snapshot(self, wait_s: float = 0.0, *, running_is_late: bool = False) -> bool:
        """Take one, of which the caller says that weights change only where it is told."""
        late = [True, running_is_late, False]
        return self.snapshots.take(self.step, self.shards(), {"step": self.step}, RAM, wait_s=wait_s, late=late).copied

    def told(self) -> list[str]:
        """What the daemon has said by now."""
        self.daemon.sync(1)
        return [type(each).__name__ for each in self.daemon.news]

    def sealed(self) -> int:
        """The step of the next snapshot that is whole, after which the one before may be forgotten."""
        step = self.daemon.wait_for(Held).shard.key.step
        self.daemon.send(Retain(generation=1, tier="ram", steps=(step,), upto=step))
        return step

    def saved(self, step: int) -> set[float]:
        """The numbers in a snapshot."""
        for kind, end in (("flush", Flushed), ("commit", Committed)):
            self.daemon.send(StartJob(kind=kind, tier="durable", key=SnapshotKey(step, 1), generation=1, job_id=step, shard=0))
            self.daemon.wait_for(end)
        self.weights, self.running, count = torch.empty(64, 256), torch.empty(16), torch.empty(())
        into = [*self.shards()[:2], LocalShard("count", (), (), count, ())]
        found = restore(self.daemon.durable, lambda state: into)
        assert found is not None and found.step == step
        return set(torch.cat([self.weights.flatten(), self.running, count.view(1)]).tolist())


class SlowToLock(StandIn):
    """A GPU that page-locks memory only once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.locking = threading.Event()

    def register(self, address: int, size_bytes: int) -> bool:
        self.locking.wait()
        return super().register(address, size_bytes)


@contextmanager
def trained(base: Path, gpu: StandIn) -> Iterator[Training]:
    made = Training(base, gpu)
    with made.daemon:
        yield made
        made.gpu.moving.set()
        made.snapshots.close()


@pytest.fixture
def training(base: Path) -> Iterator[Training]:
    with trained(base, StandIn()) as made:
        assert made.ready
        yield made


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every state counts as one whose buffers take a while."""
    monkeypatch.setattr(tiers_snapshots, "AT_ONCE_BYTES", 0)


@pytest.mark.usefixtures("large")
def test_training_goes_on_while_buffers_are_mapped_and_locked_and_takes_no_snapshot(base: Path):
    gpu = SlowToLock()
    with trained(base, gpu) as training:
        assert not training.ready
        training.compute()
        assert not training.snapshot()
        training.compute()
        threading.Timer(0.3, gpu.locking.set).start()
        assert training.snapshot(wait_s=PATIENCE_S), "the last one waits for it"
        assert training.sealed() == 2
        assert gpu.locked


@pytest.mark.usefixtures("large")
def test_a_run_that_ends_while_buffers_are_mapped_leaves_nothing_locked(base: Path):
    gpu = SlowToLock()
    with trained(base, gpu) as training:
        training.compute()
        threading.Timer(0.3, gpu.locking.set).start()
    assert not gpu.locked


@pytest.mark.usefixtures("large")
def test_a_graph_that_is_recorded_while_buffers_are_mapped_is_not_spoiled(base: Path):
    gpu = SlowToLock()
    with trained(base, gpu) as training:
        gpu.records = True
        training.compute()
        gpu.locking.set()
        while training.snapshots._mappings is not None and not training.snapshots._mappings.done_within(PATIENCE_S):
            pass
        assert len(gpu.registered) == gpu.tries > 0, "locked all the same"
        gpu.records = False
        assert training.snapshot(wait_s=PATIENCE_S)
        assert training.sealed() == 1


class FailsOnce(StandIn):
    """A GPU that refuses to allocate memory once, after pages have been locked."""

    failed = False

    def stage(self) -> torch.Tensor:
        if not self.failed:
            self.failed = True
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
        return super().stage()


@pytest.mark.usefixtures("large")
def test_a_buffer_that_a_gpu_refuses_to_have_mapped_is_given_back_and_mapped_by_the_next_snapshot(base: Path):
    gpu = FailsOnce()
    with trained(base, gpu) as training:
        training.compute()
        assert training.snapshot(wait_s=PATIENCE_S)
        assert training.sealed() == 1
    assert gpu.tries > 1 and not gpu.locked


@pytest.mark.usefixtures("large")
def test_a_buffer_that_is_gone_before_it_is_mapped_is_mapped_by_the_next_snapshot(base: Path, monkeypatch: pytest.MonkeyPatch):
    def gone(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    with ExitStack() as ends:
        with monkeypatch.context() as patched:
            patched.setattr(mappings, "MappedBuffer", gone)
            training = ends.enter_context(trained(base, StandIn()))
            assert not training.ready
        training.compute()
        assert training.snapshot(wait_s=PATIENCE_S)
        assert training.sealed() == 1


def test_training_goes_on_while_a_gpu_copies_and_the_snapshot_is_of_its_step(training: Training):
    training.compute()
    training.gpu.moving.clear()
    training.daemon.wait_for_lease()
    assert training.snapshot(), "and nothing has waited"
    training.compute()
    training.compute()
    assert not training.snapshot(), "there is no other buffer before the daemon has this one"
    assert "Held" not in training.told(), "nobody is told of a copy that is not there"
    training.gpu.moving.set()
    assert training.sealed() == 1
    assert training.saved(1) == {1.0}


def test_an_optimizer_that_does_not_wait_for_the_copy_is_an_error(training: Training):
    training.compute()
    training.gpu.moving.clear()
    training.daemon.wait_for_lease()
    training.snapshot()
    training.compute(told=False)
    training.gpu.moving.set()
    with pytest.raises(OrderOfUseError, match="held back"):
        training.snapshots.finish()
    assert "Held" not in training.told()


def test_a_tensor_that_changes_at_any_time_must_not_be_called_late(training: Training):
    training.compute()
    training.gpu.moving.clear()
    training.daemon.wait_for_lease()
    training.snapshot(running_is_late=True)
    with pytest.raises(OrderOfUseError, match="held back"):
        training.compute()  # its forward pass tells nobody


def test_the_last_snapshot_is_waited_for(training: Training):
    training.compute()
    assert training.snapshot(wait_s=PATIENCE_S)
    training.running += 7  # nothing of it is under way any more
    training.weights += 7
    assert training.sealed() == 1
    training.gpu.moving.clear()
    training.daemon.wait_for_lease()
    training.step = 2
    assert training.snapshot()
    training.gpu.moving.set()
    assert not training.snapshots.left_out(copied=True)
    assert training.sealed() == 2, "the process may end now"


def test_a_gpu_that_fails_while_it_copies_leaves_no_snapshot(training: Training):
    training.compute()
    training.gpu.moving.clear()
    training.daemon.wait_for_lease()
    training.snapshot()
    training.gpu.fails = True
    training.gpu.moving.set()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        training.snapshots.left_out(copied=True)
    assert "Held" not in training.told()


@pytest.mark.parametrize("late", [True, False])
def test_tensors_that_are_replaced_in_each_step_are_let_go_of_once_they_are_copied(
    training: Training, monkeypatch: pytest.MonkeyPatch, late: bool
):
    renewed: Counter[int] = Counter()
    replaced: list[weakref.ref[Any]] = []
    renew = Gathering.renew

    def counted(gathering: Gathering, number: int, block: Block) -> int:
        renewed[number] += 1
        return renew(gathering, number, block)

    monkeypatch.setattr(Gathering, "renew", counted)
    for step in range(1, 6):
        memory = (training.weights + 1).numpy()  # it is there for as long as something lies in it
        training.weights, training.step = torch.from_numpy(memory), step
        replaced.append(weakref.ref(memory))
        del memory
        training.running += 1
        training.daemon.wait_for_lease()
        result = training.snapshots.take(step, training.shards(), {"step": step}, RAM, wait_s=PATIENCE_S, late=[late, late, False])
        assert result.copied
        if step == 2:
            assert [each() is not None for each in replaced] == [False, True], "but for what the script has"
        assert training.sealed() == step
    training.weights = torch.zeros(64, 256)
    assert not any(each() is not None for each in replaced)
    assert renewed == {0: 5, 1: 2}, "what stays where it is is looked up once for each buffer"


def test_what_the_gpu_was_held_back_is_a_cost_of_snapshots(training: Training):
    told: list[float] = []

    class Told(Affordable):
        def taken(self, cost_s: float) -> None:
            told.append(cost_s)

    training.snapshots._affordable = {"ram": Told(0.01)}
    training.compute()
    training.daemon.wait_for_lease()
    training.snapshots.due(1)
    training.snapshot()
    assert not told, "the GPU has yet to say"
    training.compute()
    training.gpu.held_back_s = 1000.0
    training.snapshots.due(2)
    assert len(told) == 1 and 1000.0 <= told[0] < 1500.0


def test_what_a_caller_waits_for_is_no_cost_of_a_snapshot(training: Training):
    told: list[float] = []
    clock_s = [0.0]

    class Told(Affordable):
        def taken(self, cost_s: float) -> None:
            told.append(cost_s)

    training.snapshots._affordable = {"ram": Told(0.01)}
    training.snapshots._clock_of_copies = lambda: clock_s[0]
    training.compute()
    training.daemon.wait_for_lease()
    training.snapshots.due(1)
    with training.snapshots.waiting():
        clock_s[0] += 1000.0
    clock_s[0] += 1.0
    assert training.snapshot()
    training.snapshots.due(2)
    assert told == [1.0]
