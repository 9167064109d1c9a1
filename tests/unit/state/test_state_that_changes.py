"""State of a script that comes, goes or is replaced while it trains."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attempts import AT, ENTRY, LATE, TOTAL, Attempts, Script, Unfrozen, goes_on_to_the_last_bit, run
from checkpoint_processes import run_ranks

from checkpoint.tiers.affordable import Affordable
from resilient import worker
from resilient.state import announcement
from resilient.state.meeting import all_come


class Alternating(Script):
    """The first of its optimizers takes its first step after `LATE` of the second one."""

    def __init__(self) -> None:
        super().__init__("two")
        self.turns = 0

    def _optimizers(self) -> list[Any]:
        return self.optimizer if len(self.losses) + self.turns >= LATE else self.optimizer[1:]

    def attach(self, **more: Any) -> Any:
        snapshots = super().attach(**more)
        self.turns = snapshots.step
        return snapshots


class OfSecondOrder(Script):
    """In its second step LBFGS keeps a number in a tensor's place, and a tensor in a number's: as many tensors as before."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), 1e-2, max_iter=1, history_size=3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)


class Replaced(Unfrozen):
    """One of its parameters is replaced in its module and its optimizer, which takes the state of the old one over."""

    def _train(self, trained: bool) -> None:
        """All are, from the beginning."""

    def step(self, inputs: torch.Tensor | None = None) -> None:
        if self.done == LATE:
            old, new = self.model[3].weight, torch.nn.Parameter(self.model[3].weight.detach().flip(0))
            self.model[3].weight = self.optimizer.param_groups[0]["params"][-2] = new
            self.optimizer.state[new] = self.optimizer.state.pop(old)
        super().step(inputs)


@pytest.mark.parametrize("kind", [Unfrozen, Alternating, OfSecondOrder, Replaced])
def test_states_of_optimizers_that_come_later_are_saved_from_then_on(attempts: Attempts, kind: type[Script]):
    goes_on_to_the_last_bit(attempts, kind)


def test_states_that_come_after_snapshots_were_taken_without_them_are_in_those_that_follow(attempts: Attempts):
    """Buffers are made anew while one of them holds a snapshot of what there was before."""
    expected = Unfrozen()
    run(expected, expected.attach())
    attempts.begin()
    first = Unfrozen()
    snapshots = first.attach()
    for step in snapshots.steps(AT):
        first.step()
        assert step not in (2, LATE + 1) or snapshots.save()
    attempts.held(AT)
    attempts.begin(AT)
    second = Unfrozen()
    run(second, second.attach())
    assert first.losses + second.losses == expected.losses


def buffer_comes(script: Script) -> None:
    script.model[0].register_buffer("late", torch.ones(3))


def parameters_come(script: Script) -> None:
    layer = torch.nn.Linear(2, 2)
    script.model.append(layer)
    script.average.append(torch.nn.Linear(2, 2))
    script.optimizer.add_param_group({"params": list(layer.parameters())})


def group_comes(script: Script) -> None:
    script.optimizer.add_param_group({"params": [script.average[0][0].weight]})


def module_is_replaced(script: Script) -> None:
    script.model[3] = torch.nn.Linear(6, 2)
    script.optimizer.param_groups[0]["params"][-2:] = script.model[3].parameters()


def function_comes(script: Script) -> None:
    script.extra["callback"] = print


def option_comes(script: Script) -> None:
    script.optimizer.param_groups[0]["note"] = object()


@pytest.mark.parametrize(
    ("comes", "said"),
    [
        (function_comes, "extra['callback'] is a builtins.builtin_function_or_method, which cannot be saved without pickle"),
        (option_comes, "optimizer 0.param_groups[0]['note'] is a builtins.object, which cannot be saved without pickle"),
        (buffer_comes, "model/0.late has come: make it before resilient.attach"),
        (parameters_come, "model/4.weight has come: make it before resilient.attach"),
        (module_is_replaced, "model/3.weight is in another module than before: replace modules before resilient.attach"),
        (group_comes, "optimizer 0 has other groups of parameters: make them before resilient.attach"),
    ],
)
def test_what_could_not_be_gone_on_from_costs_snapshots_and_no_training(
    attempts: Attempts, comes: Any, said: str, caplog: pytest.LogCaptureFixture
):
    attempts.begin()
    script = Script()
    snapshots = script.attach()
    for step in snapshots.steps(TOTAL):
        if step == LATE:
            assert snapshots.save()
            comes(script)
        if step > LATE:
            assert not snapshots.save()
        script.step()
    assert snapshots.step == TOTAL
    assert caplog.text.count("no snapshots from step 5 on") == 1 and said in caplog.text


class Counts(torch.nn.Module):
    def get_extra_state(self) -> int:
        return 7

    def set_extra_state(self, state: int) -> None: ...


def buffer_goes(script: Script) -> None:
    del script.average[0][1].running_mean


def layer_goes(script: Script) -> None:
    del script.extra["more"].last


@pytest.mark.parametrize(
    ("goes", "said"), [(buffer_goes, "'running_mean' is gone"), (layer_goes, "extra/more/last._extra_state is gone")]
)
def test_what_goes_while_a_value_outgrows_its_room_costs_snapshots_and_no_training(
    attempts: Attempts, goes: Any, said: str, caplog: pytest.LogCaptureFixture
):
    attempts.begin()
    script = Script()
    script.extra["all"] = []
    script.extra["more"] = torch.nn.ModuleDict({"first": torch.nn.Linear(2, 2), "last": Counts()})
    snapshots = script.attach()
    for step in snapshots.steps(TOTAL):
        assert step < LATE or snapshots.save() == (step == LATE)
        if step == LATE:
            goes(script)
            script.extra["all"] += [ENTRY] * 20
        script.step()
    assert snapshots.step == TOTAL
    assert caplog.text.count("no snapshots from step 5 on") == 1 and said in caplog.text


def test_a_buffer_that_goes_in_the_first_step_ends_the_campaign_and_is_named(attempts: Attempts):
    attempts.begin()
    script = Script()
    snapshots = script.attach()
    buffer_goes(script)
    with pytest.raises(worker.UnrecoverableError, match="'running_mean' is gone"):
        snapshots.after_step()


@pytest.mark.parametrize("wait", ["all", "all_come", "ready"])
def test_what_ranks_wait_for_each_other_and_for_buffers_of_new_states_is_no_cost_of_a_snapshot(
    attempts: Attempts, monkeypatch: pytest.MonkeyPatch, wait: str
):
    attempts.begin()
    script = Unfrozen()
    snapshots = script.attach()
    clock_s, costs_s = [0.0], []

    def takes_long(does: Callable[..., Any]) -> Callable[..., Any]:
        def waited(*arguments: Any) -> Any:
            clock_s[0] += 1000.0
            return does(*arguments)

        return waited

    class Told(Affordable):
        def taken(self, cost_s: float) -> None:
            costs_s.append(cost_s)

    for step in snapshots.steps(AT):
        if step == LATE:
            taken = snapshots._snapshots
            monkeypatch.setattr(taken, "_affordable", {"ram": Told(0.01)})
            monkeypatch.setattr(taken, "_clock_of_copies", lambda: clock_s[0])
            monkeypatch.setattr(taken, "_asked_t", 0.0)
            owner = {"all": snapshots._peers, "all_come": announcement, "ready": taken}[wait]
            monkeypatch.setattr(owner, wait, takes_long(getattr(owner, wait)))
        script.step()
        assert step <= LATE or snapshots.save()
    assert clock_s[0] >= 1000.0 and costs_s and not any(costs_s)


def replaced(script: Script) -> None:
    script.optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(torch.ones(6, 6))
    script.optimizer.state.clear()


def test_a_parameter_that_is_replaced_ends_no_training(attempts: Attempts, caplog: pytest.LogCaptureFixture):
    attempts.begin()
    script = Script()
    snapshots = script.attach()
    for step in snapshots.steps(TOTAL):
        if step == LATE:
            replaced(script)
        script.step()
    assert snapshots.step == TOTAL
    assert "no snapshots from step 7 on" in caplog.text and "belongs to no module that is saved" in caplog.text


def test_a_buffer_that_comes_in_the_first_step_is_told_and_the_rest_is_saved(attempts: Attempts, caplog: pytest.LogCaptureFixture):
    attempts.begin()
    script = Script()
    snapshots = script.attach()
    for step in snapshots.steps(AT):
        if step == 0:
            buffer_comes(script)
        script.step()
    assert "model/0.late has come in the first step, and is not saved: make it before resilient.attach" in caplog.text
    attempts.held(AT)


# -- several ranks -----------------------------------------------------------------------------------------------------


def come(rank: int, absent: int | None) -> list[bool]:
    if rank == absent:
        torch.distributed.distributed_c10d._get_default_store().wait(["resilient/here/all"])
    return [all_come("here", 3, 0.5 if absent is not None else 60.0), all_come("there", 3, 60.0)]


@pytest.mark.parametrize("absent", [None, 0, 2])
def test_all_ranks_get_the_same_answer_also_one_that_comes_too_late(absent: int | None):
    assert run_ranks(3, come, absent) == [[absent is None, True]] * 3
