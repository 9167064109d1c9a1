"""`attach` in one process, with a real snapshot daemon: what goes on is what would have gone on."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attempts import AT, TOTAL, Attempts, Script, goes_on_to_the_last_bit, loses_no_step, run
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import resilient
from resilient import worker
from resilient.state.arrays import shares
from resilient.state.modules import ModelTensors
from resilient.state.optimizers import other_states, set_other_states


@pytest.mark.parametrize("how", ["adamw", "sgd", "adafactor", "nadam", "groups", "two", "counting"])
def test_all_state_of_a_script_goes_on_to_the_last_bit(attempts: Attempts, how: str):
    goes_on_to_the_last_bit(attempts, lambda: Script(how))


@pytest.mark.parametrize("token", ["a\tb", "a\\b", "%09"])
def test_a_module_that_is_called_by_a_token_goes_on_to_the_last_bit(attempts: Attempts, token: str):
    def made() -> Script:
        script = Script()
        for model in (script.model, script.average):
            model[0].register_module(token, torch.nn.Linear(6, 6))
        script.optimizer.param_groups[0]["params"] += script.model[0].get_submodule(token).parameters()
        return script

    goes_on_to_the_last_bit(attempts, made)


def test_a_loop_that_cannot_be_turned_round_has_the_same_in_words(attempts: Attempts):
    expected = Script()
    run(expected, expected.attach())
    attempts.begin()
    losses = []
    for generation in range(2):
        script = Script()
        snapshots = script.attach()
        while snapshots.step < TOTAL and not snapshots.should_stop():
            if generation == 0 and snapshots.step == AT + 1:
                break  # this attempt is killed one step later
            script.step()
            snapshots.after_step()
        losses.append(script.losses)
        if generation == 0:
            attempts.held(AT)
            attempts.begin(AT)
    assert losses[0][:AT] + losses[1] == expected.losses


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_in_the_middle_of_its_epoch(attempts: Attempts, workers: int):
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="NOT TESTED HERE: torchdata is not installed")
    numbers = torch.arange(40 * 6, dtype=torch.float32).reshape(40, 6) / 99

    def trained(script: Script, total: int) -> None:
        loader = loaders.StatefulDataLoader(numbers, batch_size=8, shuffle=True, num_workers=workers)
        snapshots = script.attach(loader=loader)
        batches = iter(())
        for _ in snapshots.steps(total):
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            script.step(batch)

    loses_no_step(attempts, trained)


def test_the_epoch_of_a_sampler_goes_on(attempts: Attempts):
    def made() -> tuple[Any, Any]:
        sampler = DistributedSampler(range(8), num_replicas=1, rank=0)  # type: ignore[arg-type]
        loader = DataLoader(range(8), sampler=sampler)  # type: ignore[arg-type]
        script = Script()
        return sampler, (script, script.attach(loader=loader))

    attempts.begin()
    sampler, (script, snapshots) = made()
    sampler.set_epoch(3)
    run(script, snapshots, AT)
    attempts.held(AT)
    attempts.begin(AT)
    assert made()[0].epoch == 3


def test_a_snapshot_is_global_arrays_with_layers_stacked_and_no_pickle(attempts: Attempts, tmp_path: Path):
    attempts.begin()
    script = Script()
    run(script, script.attach(), AT)
    attempts.held(AT)
    held = attempts.path(AT).resolve()
    text = (held / "zarr.json").read_text()
    arrays = set(json.loads(text)["consolidated_metadata"]["metadata"])
    assert {"model/0.weight", "optimizer/exp_avg/0.weight", "optimizer.numbers/step", "extra/average/0.weight"} <= arrays
    state = json.loads(text)["attributes"]
    assert "attached" in json.dumps(state)


def test_a_scheduler_that_begins_after_another_one_goes_on(attempts: Attempts):
    """Of its state MultiStepLR asks for the elements of a Counter when SequentialLR comes to it."""

    def trained(script: Script, total: int) -> None:
        schedulers = torch.optim.lr_scheduler
        first = schedulers.ConstantLR(script.optimizer, 0.5, AT)
        then = schedulers.MultiStepLR(script.optimizer, [1, 3])
        script.scheduler = schedulers.SequentialLR(script.optimizer, [first, then], milestones=[AT + 1])
        run(script, script.attach(), total)

    loses_no_step(attempts, trained)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.complex128])
def test_parameters_and_buffers_that_are_views_go_on_to_the_last_bit(attempts: Attempts, dtype: torch.dtype):
    """One element of a view has whatever stride the view has."""

    def made() -> tuple[Script, Any]:
        script, views = Script(), torch.nn.Module()
        whole = torch.arange(12).reshape(4, 3).to(dtype)
        views.one = torch.nn.Parameter(whole.clone()[:1, 1])
        views.turned = torch.nn.Parameter(whole.clone().t())
        views.register_buffer("some", whole.clone()[::2, 1:].t())
        script.extra["views"] = views
        return script, views

    attempts.begin()
    first, views = made()
    for step in first.attach().steps(AT):
        first.step()
        for each in views.state_dict().values():
            each.mul_(step % 3 + 1)
    attempts.held(AT)
    attempts.begin(AT)
    again, others = made()
    assert again.attach().step == AT
    for name, value in views.state_dict().items():
        assert torch.equal(others.state_dict()[name], value), name


def test_a_module_that_a_model_has_twice_is_saved_once_and_in_arrays():
    layer = torch.nn.Linear(64, 64)
    tensors = ModelTensors(torch.nn.Sequential(layer, torch.nn.Tanh(), layer))
    assert [slot.name for slot in tensors.slots] == ["model/0.weight", "model/0.bias"]
    assert tensors.rest() == {}, "what is in here is text in each snapshot, and no DTensor is"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("before", [False, True])
def test_a_validation_that_leaves_parameters_of_fsdp_whole_costs_no_snapshot(attempts: Attempts, before: bool):
    def trained(script: Script, total: int) -> None:
        fully_shard(script.model)
        script.optimizer = torch.optim.AdamW(script.model.parameters(), 1e-2)
        script.extra = {}
        if before:
            with torch.no_grad():
                script.model(torch.ones(8, 6))
        snapshots = resilient.attach(model=script.model, optimizer=script.optimizer)
        for _ in snapshots.steps(total):
            script.optimizer.zero_grad()
            loss = script.model(torch.randn(8, 6)).square().mean()
            loss.backward()
            script.optimizer.step()
            script.losses.append(loss.item())
            with torch.no_grad():
                script.model(torch.ones(8, 6))

    loses_no_step(attempts, trained)


def test_who_shares_the_writing_follows_from_the_meshes_of_all_ranks():
    everyone = [[(0, 1), (0, 1, 2, 3)], [(0, 1), (0, 1, 2, 3)], [(2, 3), (0, 1, 2, 3)], [(2, 3), (0, 1, 2, 3)]]
    assert shares(everyone[0], everyone) == {(0, 1): (0, 2), (0, 1, 2, 3): (0, 1)}
    assert shares(everyone[3], everyone) == {(2, 3): (1, 2), (0, 1, 2, 3): (0, 1)}


def test_what_cannot_be_saved_is_said_at_once(attempts: Attempts):
    attempts.begin()
    script = Script()
    script.extra["print"] = print
    with pytest.raises(worker.UnrecoverableError, match=r"extra\['print'\] is a builtins.builtin_function_or_method"):
        script.attach()


def test_parameters_that_belong_to_no_module_are_named(attempts: Attempts):
    attempts.begin()
    script = Script()
    stray = torch.nn.Parameter(torch.ones(3))
    script.optimizer = torch.optim.SGD([*script.model.parameters(), stray], 0.1)
    snapshots = script.attach()
    with pytest.raises(worker.UnrecoverableError, match=r"parameter 14 of optimizer \(3,\) belongs to no module"):
        run(script, snapshots)


def test_states_of_an_optimizer_that_are_of_no_parameter_and_cannot_be_saved_are_named(attempts: Attempts):
    attempts.begin()
    script = Script()
    script.optimizer.state["hook"] = print
    with pytest.raises(worker.UnrecoverableError, match=r"optimizer 0\.state\['hook'\] is a builtins\.builtin_function_or_method"):
        script.attach()
    del script.optimizer.state["hook"]
    script.optimizer.state[1] = {"count": 3}
    with pytest.raises(worker.UnrecoverableError, match=r"a state under the number 1, which cannot be told from .* parameter"):
        script.attach()


def test_tensors_in_other_states_of_an_optimizer_come_back_on_the_device_that_they_were_on():
    def made() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.empty(2, device="meta"))], 0.1)

    optimizer, again = made(), made()
    (parameter,) = optimizer.param_groups[0]["params"]
    optimizer.state["means"] = {"all": [torch.ones(2, device="meta")], "host": (torch.ones(3), 4)}
    optimizer.state[parameter]["directions"] = [torch.ones(2, device="meta"), torch.ones(1)]
    set_other_states(again, other_states(optimizer))
    found, directions = again.state["means"], again.state[again.param_groups[0]["params"][0]]["directions"]
    assert [found["all"][0].device.type, found["host"][0].device.type, found["host"][1]] == ["meta", "cpu", 4]
    assert [each.device.type for each in directions] == ["meta", "cpu"]
    set_other_states(again, {"means": {"all": [{"$on_device": torch.ones(2)}]}})  # of an earlier version
    assert again.state["means"]["all"][0].device.type == "meta"


def test_a_checkpoint_of_another_model_ends_the_campaign(attempts: Attempts):
    attempts.begin()
    script = Script()
    run(script, script.attach(), AT)
    attempts.held(AT)
    attempts.begin(AT)
    other = Script("sgd")
    other.model[3] = torch.nn.Linear(6, 3)
    other.optimizer = torch.optim.AdamW(other.model.parameters())
    with pytest.raises(worker.UnrecoverableError):
        other.attach()


def test_state_that_changes_its_shape_costs_snapshots_and_no_training(attempts: Attempts, caplog: pytest.LogCaptureFixture):
    attempts.begin()
    script = Script()
    snapshots = script.attach()
    for step in snapshots.steps(AT):
        script.step()
        if step == 3:
            script.model[3].bias.data = torch.zeros(5)
            script.model[3].bias.grad = None
            script.step = lambda: None  # type: ignore[method-assign]
    assert snapshots.step == AT
    assert "no snapshots from step 7 on" in caplog.text and "model/3.bias was float32 (2,), and is float32 (5,)" in caplog.text


ONCE = r"resilient\.attach is called once in a process"


@pytest.mark.parametrize("supervised", [False, True])
def test_two_models_that_are_attached_side_by_side_are_refused(attempts: Attempts, supervised: bool):
    if supervised:
        attempts.begin()
    first = Script()
    snapshots = first.attach()
    with pytest.raises(worker.UnrecoverableError, match=ONCE):
        Script().attach()
    assert run(first, snapshots, 2) == [0, 1]


def test_what_has_saved_snapshots_is_followed_by_no_other(attempts: Attempts):
    attempts.begin()
    first = Script()
    snapshots = first.attach()
    run(first, snapshots, AT)
    snapshots.close()
    del first, snapshots
    with pytest.raises(worker.UnrecoverableError, match=ONCE):
        Script().attach()


def test_loops_without_a_supervisor_may_follow_one_another():
    for _ in range(2):
        script = Script()
        snapshots = script.attach()
        assert run(script, snapshots, 3) == [0, 1, 2]
    for _ in range(2):
        snapshots = Script().attach()
        for step in snapshots.steps(3):
            if step == 1:
                break


def test_a_loop_that_failed_before_its_first_step_was_done_may_be_tried_again(attempts: Attempts):
    """As one whose batch was too large for the memory."""
    attempts.begin()

    def train(batch: int) -> Any:
        script = Script()
        snapshots = script.attach()
        for _ in snapshots.steps(AT):
            if batch > 8:
                raise MemoryError
            script.step()
        return snapshots

    with contextlib.suppress(MemoryError):
        train(16)
    assert train(8).step == AT


def test_one_that_could_not_be_attached_may_be_tried_again(attempts: Attempts):
    attempts.begin()
    script = Script()
    script.extra["print"] = print
    with pytest.raises(worker.UnrecoverableError, match="print"):
        script.attach()
    del script.extra["print"]
    script.attach()


@pytest.mark.usefixtures("alone")
def test_an_optimizer_that_shares_its_states_out_by_itself_is_refused(attempts: Attempts):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here, for it takes a second

    attempts.begin()
    model = torch.nn.Linear(2, 2)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    with pytest.raises(worker.UnrecoverableError, match="ZeroRedundancyOptimizer, and must be an optimizer that has"):
        resilient.attach(model=model, optimizer=optimizer)


class Counter:
    """Something that a state can be asked of, and not given to."""

    def state_dict(self) -> dict[str, int]:
        return {"count": 1}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "nope"}, r"model is a builtins\.str, and must be a torch\.nn\.Module"),
        ({"model": [torch.nn.Linear(2, 2)]}, r"model is a builtins\.list, and must be a torch\.nn\.Module"),
        ({"optimizer": "nope"}, r"optimizer is a builtins\.str, and must be an optimizer of torch, or a list of them"),
        ({"optimizer": torch.optim.SGD}, r"optimizer is a builtins\.type, and must be"),
        ({"optimizer": [None]}, r"optimizer\[0\] is a builtins\.NoneType, and must be"),
        ({"scheduler": 3}, r"scheduler is a builtins\.int, and must be something with state_dict and load_state_dict, or a list"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR}, r"scheduler is a builtins\.type, and must be"),
        ({"scheduler": (Counter(),)}, r"scheduler\[0\] is a test_attach\.Counter, and must be"),
        ({"extra": "nope"}, r"extra is a builtins\.str, and must be a dict, or one module, random generator or something with"),
        ({"extra": {"seen": 3, 0: 5}}, r"the key 0 of extra is a builtins\.int, and must be a string$"),
        ({"extra": [1, 2]}, r"extra is a builtins\.list, and must be a dict"),
        ({"loader": "nope"}, r"loader is a builtins\.str, and must be a loader or a sampler"),
        ({"loader": [torch.ones(1)]}, r"loader is a builtins\.list, and must be a loader or a sampler"),
        ({"group": "nope"}, r"group is a builtins\.str, and must be a torch\.distributed\.ProcessGroup"),
    ],
)
def test_what_is_given_and_is_of_no_use_is_said_in_a_sentence(given: dict[str, Any], said: str):
    script = Script()
    with pytest.raises(worker.UnrecoverableError, match=f"^resilient.attach: {said}"):
        resilient.attach(**{"model": script.model, "optimizer": script.optimizer, **given})


@pytest.mark.parametrize("extra", [None, torch.nn.Linear(2, 2), torch.Generator(), np.random.default_rng(1), {"seen": 3}, {}])
def test_one_thing_may_be_given_as_extra(attempts: Attempts, extra: Any):
    attempts.begin()
    script = Script()
    script.extra = extra
    script.attach()
