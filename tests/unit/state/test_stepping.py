"""`attach` where a GPU copies while the script goes on: what changes in an optimizer's step, and what at any time."""

from collections.abc import Callable, Iterator

import pytest
import torch
from attempts import AT, TOTAL, Attempts, Growing, Script, Unfrozen, run

from checkpoint.device import StandIn
from checkpoint.tiers import snapshots as snapshots_module
from resilient import worker
from resilient.worker import Config, settle
from trainer import kernels
from trainer.optimizer import make_optimizer
from trainer.parallel import build_stages, make_ranks
from trainer.shape import shape_of
from trainer.state import TrainingState
from trainer.weights import initialize


class Gpu(StandIn):
    """A stand-in that tells what must not change."""

    def not_held(self) -> int:
        """Numbers under way, for whose change nothing waits yet."""
        with self._lock:
            return sum(copy.source.numel() for copy in self._begun if copy.before is not None and not copy.held)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    found = Gpu()
    monkeypatch.setattr(snapshots_module, "device_of", lambda data: found)
    yield found
    found.moving.set()


def to_the_snapshot(script: Script, gpu: Gpu, step: Callable[[], None]) -> int:
    """Take the steps up to the first snapshot and one more, while nothing is copied; numbers that were copied late."""
    snapshots = script.attach()
    found = 0
    while snapshots.step <= AT:
        step()
        if snapshots.step == AT - 1:
            gpu.moving.clear()
        snapshots.after_step()
        if snapshots.step == AT:
            found = gpu.not_held()
    gpu.moving.set()
    return found


@pytest.mark.parametrize(
    "make", [Script, lambda: Script("two"), Unfrozen, Growing], ids=["adamw", "two", "states come", "a value grows"]
)
def test_what_is_copied_while_the_next_step_computes_goes_on_to_the_last_bit(
    attempts: Attempts, gpu: Gpu, make: Callable[[], Script]
):
    expected = make()
    run(expected, expected.attach())
    whole = expected.everything()
    attempts.begin()
    first = make()
    late = to_the_snapshot(first, gpu, first.step)
    states = [value for each in first._optimizers() for state in each.state.values() for value in state.values()]
    assert late == sum(each.numel() for each in [*first.model.parameters(), *states] if each.dim()), "and no buffers, no averages"
    attempts.held(AT)
    attempts.begin(AT)
    second = make()
    run(second, second.attach(), TOTAL)
    assert first.losses[:AT] + second.losses == expected.losses
    assert second.everything() == whole


def test_weights_that_a_forward_pass_changes_are_not_copied_late(attempts: Attempts, gpu: Gpu):
    attempts.begin()
    script = Script()

    def step() -> None:
        with torch.no_grad():
            script.model[0][0].weight.div_(script.model[0][0].weight.norm())
        script.step()

    assert to_the_snapshot(script, gpu, step) == 0
    attempts.held(AT)


def test_steps_that_nobody_is_told_of_are_not_waited_for_by_a_hook(attempts: Attempts, gpu: Gpu):
    attempts.begin()
    script = Script("sgd")

    def step() -> None:
        """Recorded in a graph at first, and then replayed."""
        gpu.records = not script.losses
        if gpu.records:
            script.step()
            gpu.records = False
            return
        loss = script.model(torch.randn(8, 6)).square().mean()
        loss.backward()
        with torch.no_grad():
            for each in script.model.parameters():
                each.sub_(0.01 * each.grad)

    assert to_the_snapshot(script, gpu, step) == 0
    attempts.held(AT)


def test_a_graph_that_is_replayed_after_an_eager_step_waits_for_the_copies(
    attempts: Attempts, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
):
    script, held = Script("sgd"), list[int]()

    def replay(graph: object) -> None:
        """A step that was recorded changes weights without a word, as CUDA does."""
        held.append(gpu.not_held())
        for each in script.model.parameters():
            each.data.sub_(0.01)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)
    attempts.begin()

    def step() -> None:
        """The last batch before the snapshot is shorter than the others."""
        if 1 < len(script.losses) < AT - 1 or len(script.losses) == AT:
            torch.cuda.CUDAGraph.replay(object())  # type: ignore[arg-type]  # of torch without CUDA there are none
            script.losses.append(0.0)
        else:
            script.step()

    assert to_the_snapshot(script, gpu, step), "they are copied late"
    assert held == [0] * (AT - 3 + 1)
    attempts.held(AT)


def test_weights_that_changed_once_in_a_step_of_no_optimizer_are_not_copied_late_any_more(attempts: Attempts, gpu: Gpu):
    attempts.begin()
    script = Script("sgd")

    def step() -> None:
        if len(script.losses) == 2:
            with torch.no_grad():
                script.model[0][0].weight.mul_(0.5)
            script.losses.append(0.0)
        else:
            script.step()

    assert to_the_snapshot(script, gpu, step) == 0
    attempts.held(AT)


FP32 = {"precision": "fp32", "grad_dtype": "fp32"}


def test_the_trainer_has_its_optimizer_wait_for_the_copies_of_weights_and_moments(attempts: Attempts, gpu: Gpu, alone: None):
    attempts.begin()
    sizes = {"layers": 1, "hidden": 16, "heads": 2, "ffn_hidden": 16, "vocab_size": 32, "seq_len": 8}
    config = Config.model_validate({"model": sizes, "checkpoint": {"every_steps": 1}, "train": FP32})
    shape, device = shape_of(config, 32), torch.device("cpu")
    ranks = make_ranks(device, settle(config, 1))
    kernel = kernels.choose("auto", shape, device, torch.float32)
    stages = build_stages(config, shape, kernel, ranks, device)
    initialize(stages[0], 1)
    optimizer = make_optimizer(config, stages)
    state = TrainingState(config, stages, optimizer, worker.init(), ranks)
    state.start()
    gpu.moving.clear()
    state.progress.step = AT
    state.save_if_due()
    numbers = sum(each.numel() * 3 for each in stages[0].parameters())
    assert gpu.not_held() == numbers + len(torch.get_rng_state()), "which are the CPU's, but for a stand-in"
    optimizer.step()
    assert gpu.not_held() == 0
    gpu.moving.set()
    attempts.held(AT)
