"""Where a script that says nothing is stopped: between two iterations, whatever steps in them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter
from watched_rank import Time, Watched

from resilient.script.iterations import MOST
from resilient.script.stop import Stopped

SETTLED = 14  # iterations, after which the next one is expected to be like them
TRAINING, VALIDATION = (TensorDataset(torch.ones(400, 4)) for _ in range(2))


@pytest.fixture(autouse=True)
def reading(watched: Watched) -> Iterator[None]:
    """Batches are read as a script reads them that is watched."""
    before = _BaseDataLoaderIter.__next__
    _BaseDataLoaderIter.__next__ = watched.progress.reading(before)  # type: ignore[method-assign]
    yield
    _BaseDataLoaderIter.__next__ = before  # type: ignore[method-assign]


@contextmanager
def another(path: Path, **more: Any) -> Iterator[Watched]:
    """One more rank, which is the one that reads batches meanwhile."""
    made, before = Watched(path, **more), _BaseDataLoaderIter.__next__
    _BaseDataLoaderIter.__next__ = made.progress.reading(before)  # type: ignore[method-assign]
    try:
        yield made
    finally:
        _BaseDataLoaderIter.__next__ = before  # type: ignore[method-assign]
        for handle in made.progress._stop.handles:
            handle.remove()
        made.agent.close()


class Script:
    """A training script, whose `finally` saves what there is when it is stopped.

    Attributes: steps: of each optimizer, by its name; iterations: that were finished.
    """

    def __init__(self, watched: Watched, names: str) -> None:
        self.watched = watched
        self.model = watched.model
        self.optimizers = {name: watched.optimizer() for name in names}
        self.steps = dict.fromkeys(names, 0)
        self.iterations = 0
        self.batches = iter(DataLoader(TRAINING))

    def step(self, name: str) -> None:
        self.model(torch.ones(4)).sum().backward()
        self.optimizers[name].step()
        self.steps[name] += 1

    def run(self, iteration: Callable[["Script"], None], *, stop_at: int, most: int = 200) -> "Script":
        """Until it is stopped, which is asked for while this iteration runs."""
        with pytest.raises(Stopped) as stop:
            for number in range(most):
                if number == stop_at:
                    count = self.watched.progress.count
                    self.watched.agent.propose(-1, "SIGTERM")
                    self.watched.agent.arm(count + 1)
                iteration(self)
                self.iterations += 1
        assert stop.value.code == 0
        assert self.watched.agent.activity().stopped
        return self


def steps_of(letters: str) -> Callable[[Script], None]:
    """An iteration; a dot is a batch that is read."""

    def iteration(script: Script) -> None:
        for letter in letters:
            if letter == ".":
                next(script.batches)
            else:
                script.step(letter)

    return iteration


LOOPS = ["A", "AB", "ABC", "DDDDDG", "GDD", "ABAC", ".A", "...A", ".AB", ".A.B", ".AAAA", ".DGD", ".D.D.D.D.DG"]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("stop_at", [SETTLED, SETTLED + 1])
def test_a_stop_comes_after_an_iteration_and_not_within(watched: Watched, loop: str, stop_at: int):
    script = Script(watched, "".join(sorted(set(loop) - {"."}))).run(steps_of(loop), stop_at=stop_at)
    assert script.iterations == stop_at + 1, "it is the iteration in which the stop was asked for"
    for name, steps in script.steps.items():
        assert steps == script.iterations * loop.count(name)


@pytest.mark.parametrize(
    ("loop", "stop_at"),
    [
        *((loop, number) for loop in ("A", "AB", "ABC", ".A", "..A", ".AB") for number in range(3)),
        *((loop, number) for loop in (".AAAA", ".DGD", ".DDDDDG") for number in (2, 3)),
    ],
)
def test_so_it_does_at_the_beginning_of_a_process(watched: Watched, loop: str, stop_at: int):
    script = Script(watched, "".join(sorted(set(loop) - {"."}))).run(steps_of(loop), stop_at=stop_at)
    assert script.iterations == stop_at + 1
    for name, steps in script.steps.items():
        assert steps == script.iterations * loop.count(name)


def test_a_stop_of_which_is_learned_in_the_middle_of_an_iteration_lets_it_end(watched: Watched):
    script = Script(watched, "DG")
    for _ in range(SETTLED):
        steps_of("DDDDDG")(script)
    steps_of("DD")(script)
    watched.agent.propose(-1, "SIGTERM")
    watched.agent.arm(watched.progress.count + 1)
    with pytest.raises(Stopped):
        steps_of("DDDG" + "DDDDDG" * 3)(script)
    assert script.steps == {"D": (SETTLED + 1) * 5, "G": SETTLED + 1}


def test_all_ranks_stop_after_the_same_step_whatever_they_validate(tmp_path: Path):
    """Rank 0 alone validates, and learns of the stop somewhere else than the other, which is told the same boundary."""

    def validating(script: Script) -> None:
        script.step("D")
        script.step("G")
        if script.iterations % 3 == 0:
            script.model.eval()
            for _ in DataLoader(VALIDATION, batch_size=200):
                with torch.no_grad():
                    script.model(torch.ones(4))
            script.model.train()

    for stop_at in (SETTLED, SETTLED + 1, SETTLED + 2):
        stopped = []
        for rank, iteration in enumerate((validating, steps_of("DG"))):
            with another(tmp_path / f"{stop_at}-{rank}") as other:
                stopped.append(Script(other, "DG").run(iteration, stop_at=stop_at).steps)
        assert stopped == [{"D": stop_at + 1, "G": stop_at + 1}] * 2


def test_an_optimizer_that_steps_seldom_is_not_waited_for_but_its_batch_is_finished(watched: Watched):
    def iteration(script: Script) -> None:
        next(script.batches)
        script.step("A")
        if script.iterations % 40 == 39:
            script.step("B")

    script = Script(watched, "AB").run(iteration, stop_at=159)
    assert script.iterations == 160 and script.steps == {"A": 160, "B": 4}


@pytest.mark.parametrize("loader", [True, False])
def test_where_nothing_repeats_a_stop_comes_with_the_next_batch_or_the_next_iteration(watched: Watched, loader: bool):
    draw = torch.Generator().manual_seed(0)

    def iteration(script: Script) -> None:
        if loader:
            next(script.batches)
        for name in ("A", "B", "C"):
            for _ in range(int(torch.randint(0, 3, (), generator=draw))):
                script.step(name)
        script.step("A")

    script = Script(watched, "ABC").run(iteration, stop_at=100)
    assert 101 <= script.iterations + 1 <= 100 + 2 * MOST


def test_a_loop_that_changes_is_stopped_all_the_same(watched: Watched):
    def iteration(script: Script) -> None:
        script.step("D")
        if script.iterations < SETTLED:
            script.step("G")

    assert Script(watched, "DG").run(iteration, stop_at=SETTLED).iterations <= SETTLED + 2


def test_micro_batches_after_the_last_step_are_not_computed(watched: Watched):
    """The gradients that a stop would throw away are those of an iteration that has not begun."""
    script = Script(watched, "A")
    for _ in range(SETTLED):
        steps_of("..A")(script)
    watched.agent.propose(-1, "SIGTERM")
    watched.agent.arm(watched.progress.count + 1)
    script.step("A")
    with pytest.raises(Stopped):
        next(script.batches)


@pytest.mark.parametrize("inside", [True, False], ids=["read without gradients", "read with gradients"])
def test_a_validation_after_the_last_step_is_finished(watched: Watched, inside: bool):
    validated = []

    def iteration(script: Script) -> None:
        next(script.batches)
        script.step("A")
        if script.iterations == SETTLED:
            with torch.set_grad_enabled(not inside):
                for (sample,) in DataLoader(VALIDATION, batch_size=100):
                    script.model.eval()
                    with torch.no_grad():
                        validated.append(script.model(sample))
                    script.model.train()

    script = Script(watched, "A").run(iteration, stop_at=SETTLED)
    assert len(validated) == 4 and script.steps == {"A": SETTLED + 1}


def test_a_validation_may_not_take_all_the_time_that_a_stop_has(tmp_path: Path, passing: Time):
    """With 5 s for a stop, it gets 1.5."""
    validated: list[float] = []

    def iteration(script: Script) -> None:
        script.step("A")
        if script.iterations == SETTLED:
            with torch.no_grad():
                while len(validated) < 100:
                    script.model(torch.ones(4))
                    passing.passes()
                    validated.append(passing.now)

    with another(tmp_path / "short", drain_s=5.0) as watched:
        began = passing.now
        script = Script(watched, "A").run(iteration, stop_at=SETTLED)
    assert 1.5 < validated[-1] - began < 2.5 and script.steps == {"A": SETTLED + 1}


def test_a_model_that_is_trained_in_its_evaluation_mode_is_stopped_before_it_steps_again(watched: Watched):
    def iteration(script: Script) -> None:
        script.model.eval()
        script.step("A")

    assert Script(watched, "A").run(iteration, stop_at=SETTLED).steps == {"A": SETTLED + 1}


def test_a_checkpoint_for_which_a_state_is_made_is_written_after_the_last_step(watched: Watched):
    script = Script(watched, "AB")
    for _ in range(SETTLED):
        script.step("A")
    watched.agent.propose(-1, "SIGTERM")
    watched.agent.arm(watched.progress.count + 1)
    script.step("A")
    get_state_dict(script.model, script.optimizers["B"])
    with pytest.raises(Stopped):
        script.step("A")


@pytest.mark.parametrize("training", [True, False])
def test_what_is_first_compiled_after_the_last_step_is_compiled_whole(watched: Watched, training: bool):
    """As a rank has it compiled that has done so before: that one does not notice a call either, and all are to leave together."""
    script = Script(watched, "A")
    results = []

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(sample: torch.Tensor) -> Any:
        return script.model(sample)

    def iteration(script: Script) -> None:
        script.step("A")
        if script.iterations == SETTLED:
            script.model.train(training)
            with torch.set_grad_enabled(training):
                results.append(compiled(torch.ones(4)))

    assert script.run(iteration, stop_at=SETTLED).steps == {"A": SETTLED + 1}
    assert len(results) == 1
