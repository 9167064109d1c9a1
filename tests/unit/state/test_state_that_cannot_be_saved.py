"""State that no snapshot can hold, or that would come back as something else, is refused by its name."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from attempts import AT, LATE, TOTAL, Attempts, Script, Unfrozen, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.two_tensor import TwoTensor

import resilient
from resilient import worker


def test_an_option_that_cannot_be_saved_is_refused_by_its_name(attempts: Attempts):
    attempts.begin()
    script = Script()
    script.optimizer.param_groups[0]["note"] = object()
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


def name_of_control_characters(script: Script) -> None:
    script.extra["a\tb"] = torch.nn.Linear(2, 2)


def name_that_is_too_long(script: Script) -> None:
    script.model.register_buffer("a" * 300, torch.ones(2))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (name_of_control_characters, r"'extra/a\\tb/weight' cannot name an array: it has a control character"),
        (name_that_is_too_long, r"'model/a+'\.\.\. cannot name an array: it is no text, or too long: 255 bytes are the most"),
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
        ([1, Best(0, 1.0)], r"extra\['history'\]\[1\] is a test_state_that_cannot_be_saved.Best, and would come back as a tuple"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused_by_its_name(attempts: Attempts, value: Any, said: str):
    attempts.begin()
    script = Script()
    script.extra["history"] = value
    with pytest.raises(worker.UnrecoverableError, match=said):
        script.attach()
