"""State of a script that comes while it trains, and state of classes that JSON does not know."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from attempts import AT, ENTRY, LATE, TOTAL, Attempts, Script, Unfrozen, goes_on_to_the_last_bit, run
from checkpoint_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.two_tensor import TwoTensor

import resilient
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


def test_an_option_that_cannot_be_saved_is_refused_by_its_name(attempts: Attempts):
    attempts.begin()
    script = Script()
    option_comes(script)
    with pytest.raises(worker.UnrecoverableError, match=r"param_groups\[0\]\['note'\] is a builtins.object"):
        script.attach()


def sparse_buffer(script: Script) -> None:
    script.model.register_buffer("adjacency", torch.eye(3).to_sparse())


def buffer_of_conjugates(script: Script) -> None:
    script.model.register_buffer("phases", torch.ones(3, dtype=torch.complex64).conj())


def parameter_on_meta(script: Script) -> None:
    script.model[1][0] = torch.nn.Linear(6, 6, device="meta")


def frozen_subclass(script: Script) -> None:
    """As quantized weights are, below adapters that are trained."""
    weight = script.model[0][0].weight.detach()
    script.model[0][0].weight = torch.nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)  # type: ignore[no-untyped-call]


def lazy_parameter(script: Script) -> None:
    script.model[1][0] = torch.nn.LazyLinear(6)


def value_on_meta(script: Script) -> None:
    script.extra["history"] = [torch.ones(2, device="meta")]


def sparse_value(script: Script) -> None:
    script.extra["history"] = {"adjacency": torch.eye(3).to_sparse()}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (sparse_buffer, r"model/adjacency is a sparse_coo tensor, and only dense ones are saved"),
        (buffer_of_conjugates, r"model/phases is a view of conjugates, whose memory has other values: save what its resolve_conj"),
        (parameter_on_meta, r"model/1\.0\.weight is on the meta device, and has no values"),
        (lazy_parameter, r"model/1\.0\.weight is not initialized, and has no shape: call the model once"),
        (frozen_subclass, r"model/0\.0\.weight is a torch\.testing\._internal\.two_tensor\.TwoTensor, and only plain tensors"),
        (value_on_meta, r"extra\['history'\]\[0\] is on the meta device, and has no values"),
        (sparse_value, r"extra\['history'\]\['adjacency'\] is a sparse_coo tensor, and only dense ones are saved"),
    ],
)
def test_a_tensor_that_cannot_be_saved_is_refused_by_its_name(attempts: Attempts, spoil: Callable[[Script], None], said: str):
    attempts.begin()
    script = Script()
    spoil(script)
    with pytest.raises(worker.UnrecoverableError, match=said):
        script.attach()


def quantized_state(script: Script) -> None:
    """As optimizers with states of 8 bits keep them."""
    value = script.optimizer.state[script.model[0][0].bias]["exp_avg"]
    script.optimizer.state[script.model[0][0].bias]["exp_avg"] = TwoTensor(value, value.clone())  # type: ignore[no-untyped-call]


def test_a_state_that_cannot_be_saved_ends_the_campaign_and_is_named(attempts: Attempts):
    attempts.begin()
    script = Script()
    snapshots = script.attach()
    script.step()
    quantized_state(script)
    with pytest.raises(worker.UnrecoverableError, match=r"exp_avg of parameter 1 of an optimizer is a .*TwoTensor, and only plain"):
        snapshots.after_step()


def sharded(model: torch.nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("change", "now"), [(torch.nn.Module.bfloat16, r"bfloat16 \(6, 6\)"), (sharded, r"float32 \(6, 6\) \(DTensor\)")]
)
def test_a_model_that_is_converted_or_sharded_after_attach_is_refused_after_its_first_step(
    attempts: Attempts, change: Callable[[torch.nn.Module], None], now: str
):
    attempts.begin()
    script = Script("sgd")
    snapshots = script.attach()
    script.step()
    change(script.model)
    said = rf"model/0\.0\.weight was float32 \(6, 6\) when .* called, and is {now} after the first step: convert and shard"
    with pytest.raises(worker.UnrecoverableError, match=said):
        snapshots.after_step()


@pytest.mark.parametrize(
    ("made", "why"),
    [(Script, "optimizer/exp_avg/0.0.bias is a torch.testing"), (Unfrozen, "exp_avg of parameter 1 of an optimizer is a")],
    ids=["announced before", "new"],
)
def test_a_state_that_becomes_one_that_cannot_be_saved_costs_snapshots_and_no_training(
    attempts: Attempts, caplog: pytest.LogCaptureFixture, made: type[Script], why: str
):
    attempts.begin()
    script = made()
    snapshots = script.attach()
    for step in snapshots.steps(TOTAL):
        script.step()
        if step == LATE:
            quantized_state(script)
            script.step = script.optimizer.zero_grad
    assert snapshots.step == TOTAL
    assert "no snapshots from step 7 on" in caplog.text and why in caplog.text


def test_what_is_trained_can_be_given_without_frozen_weights_that_cannot_be_saved(attempts: Attempts):
    def made() -> Script:
        script = Script()
        frozen_subclass(script)
        trained = torch.nn.ParameterList(script.model[3].parameters())
        script.optimizer = torch.optim.AdamW(trained, 1e-2)
        script.attach = lambda: resilient.attach(model=trained, optimizer=script.optimizer)  # type: ignore[method-assign]
        script.step = script.optimizer.step  # type: ignore[method-assign]
        for each in trained:
            each.grad = torch.ones_like(each)
        return script

    attempts.begin()
    first = made()
    run(first, first.attach(), AT)
    attempts.held(AT)
    attempts.begin(AT)
    second = made()
    assert second.attach().step == AT
    assert torch.equal(second.model[3].weight, first.model[3].weight)


class Best(NamedTuple):
    step: int
    loss: float


def test_dicts_and_tuples_of_classes_of_their_own_come_back_as_what_they_were(attempts: Attempts):
    given = {"words": Counter("aab"), "lists": defaultdict(list), "record": Best(0, 9.0), "order": OrderedDict(b=1, a=2)}
    attempts.begin()
    script = Script()
    script.extra.update(given)
    snapshots = script.attach()
    for step in snapshots.steps(AT):
        script.extra["words"].update("b")
        script.extra["lists"][f"{step}"].append(step)
        script.extra["record"] = script.extra["record"]._replace(step=step)
        script.step()
    attempts.held(AT)
    attempts.begin(AT)
    again = Script()
    again.extra.update(words=Counter(z=3), lists=defaultdict(list), record=Best(-1, 0.0), order=OrderedDict())
    again.attach()
    assert again.extra["words"] == Counter(a=2, b=1 + AT) and again.extra["words"]["nothing"] == 0
    assert again.extra["lists"]["new"] == [] and again.extra["lists"]["3"] == [3]
    assert again.extra["record"] == Best(AT - 1, 9.0) and isinstance(again.extra["record"], Best)
    assert list(again.extra["order"]) == ["b", "a"] and isinstance(again.extra["order"], OrderedDict)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"lists": defaultdict()}, r"extra\['history'\]\['lists'\] is a collections.defaultdict, and would come back as a dict"),
        ([1, Best(0, 1.0)], r"extra\['history'\]\[1\] is a test_state_that_changes.Best, and would come back as a tuple"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused_by_its_name(attempts: Attempts, value: Any, said: str):
    attempts.begin()
    script = Script()
    script.extra["history"] = value
    with pytest.raises(worker.UnrecoverableError, match=said):
        script.attach()


# -- several ranks -----------------------------------------------------------------------------------------------------


def come(rank: int, absent: int | None) -> list[bool]:
    if rank == absent:
        torch.distributed.distributed_c10d._get_default_store().wait(["resilient/here/all"])
    return [all_come("here", 3, 0.5 if absent is not None else 60.0), all_come("there", 3, 60.0)]


@pytest.mark.parametrize("absent", [None, 0, 2])
def test_all_ranks_get_the_same_answer_also_one_that_comes_too_late(absent: int | None):
    assert run_ranks(3, come, absent) == [[absent is None, True]] * 3
