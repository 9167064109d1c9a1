"""What a script trains with and did not give to `attach`: it is told, once, and what it gave is not."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attempts import AT, LATE, Attempts, Script, Unfrozen, run
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import resilient
from resilient import worker
from resilient.state.modules import ModelTensors
from resilient.state.unsaved import TEXTS, Unsaved, _named


class LessGiven(Script):
    """It gives `attach` what `given` says, and nothing else."""

    given: Callable[[Any], dict[str, Any]] = staticmethod(lambda script: {"optimizer": script.optimizer})

    def attach(self, **more: Any) -> Any:
        return resilient.attach(model=self.model, **self.given(self))


class HasScheduler(LessGiven):
    said = "optimizer 0 has a scheduler that resilient.attach was not given"


class HasOptimizers(LessGiven):
    given = staticmethod(lambda script: {"optimizer": script.optimizer[0], "scheduler": script.scheduler})
    said = "an optimizer that resilient.attach was not given, torch.optim.adagrad.Adagrad, trains parameters that are saved"

    def __init__(self) -> None:
        super().__init__("two")


class Around(torch.optim.Optimizer):
    """As implementations of SAM, it has another optimizer, which has the momentum."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr, momentum=0.9)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        self.base.step()
        return loss


class HasAnotherInside(HasOptimizers):
    given = staticmethod(lambda script: {"optimizer": script.optimizer, "scheduler": script.scheduler})
    said = "an optimizer that resilient.attach was not given, torch.optim.sgd.SGD, trains parameters that are saved"

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = Around(self.model.parameters(), 1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)


class Scales(Script):
    said = "stepped by a torch.amp.grad_scaler.GradScaler that resilient.attach was not given"

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu")

    def step(self, inputs: torch.Tensor | None = None) -> None:
        self.scaler.scale(self.model(torch.ones(8, 6)).mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class HasBuffer(Script):
    said = "something else than in the first step in model/3.queue. Where"

    def __init__(self) -> None:
        super().__init__()
        self.model[3].register_buffer("queue", torch.zeros(4), persistent=False)
        self.model[3].register_buffer("cache", torch.zeros(4), persistent=False)

    def step(self, inputs: torch.Tensor | None = None) -> None:
        super().step(inputs)
        self.model[3].queue[len(self.losses) % 4] = len(self.losses)
        self.model[3].cache = torch.zeros(len(self.losses))


class HasFreeParameters(Script):
    said = "no optimizer that resilient.attach was given has model/3.weight and 1 other, and gradients are kept there"

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.model[:3].parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)


class HasSecondModel(Script):
    said = "an optimizer that resilient.attach was not given, torch.optim.sgd.SGD, trains parameters that no snapshot has"

    def __init__(self) -> None:
        super().__init__()
        self.second = torch.nn.Linear(2, 2)
        self.its_optimizer = torch.optim.SGD(self.second.parameters(), 1e-2)

    def step(self, inputs: torch.Tensor | None = None) -> None:
        super().step(inputs)
        self.second(torch.ones(1, 2)).sum().backward()
        self.its_optimizer.step()


class Averages(Script):
    """It has an average of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.optim.swa_utils.AveragedModel(self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    def step(self, inputs: torch.Tensor | None = None) -> None:
        super().step(inputs)
        self.average.update_parameters(self.model)


class HasAverage(Averages, LessGiven):
    given = staticmethod(lambda script: {"optimizer": script.optimizer, "scheduler": script.scheduler})
    said = "an average of weights that resilient.attach was not given, torch.optim.swa_utils.AveragedModel, is updated"


class GivesAverage(Averages, LessGiven):
    given = staticmethod(
        lambda script: {"optimizer": script.optimizer, "scheduler": script.scheduler, "extra": {"average": script.average}}
    )


KINDS = [HasSecondModel, HasScheduler, HasAverage, HasOptimizers, HasAnotherInside, Scales, HasBuffer, HasFreeParameters]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records if record.name == "resilient.state.unsaved"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_in_no_snapshot_is_told_once(attempts: Attempts, kind: Any, warnings: Callable[[], list[str]]):
    attempts.begin()
    script = kind()
    snapshots = script.attach()
    for step in snapshots.steps(AT):
        script.step()
        assert step not in (1, LATE) or snapshots.save()
    (said,) = warnings()
    assert kind.said in said


class Clears(HasFreeParameters):
    def step(self, inputs: torch.Tensor | None = None) -> None:
        self.model.zero_grad()
        super().step(inputs)


class GivesScaler(Scales):
    def __init__(self) -> None:
        super().__init__()
        self.extra["scaler"] = self.scaler


class GivesBoth(HasAnotherInside):
    given = staticmethod(lambda script: {"optimizer": [script.optimizer, script.optimizer.base], "extra": {"lr": script.scheduler}})


class Everything:
    """As frameworks have it: who knows what is in there."""

    def __init__(self, script: Any) -> None:
        self._script = script

    def state_dict(self) -> dict[str, Any]:
        return {"scheduler": self._script.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._script.scheduler.load_state_dict(state["scheduler"])


class GivesSomethingElse(HasScheduler):
    given = staticmethod(lambda script: {"optimizer": script.optimizer, "extra": {"all": Everything(script)}})


class TrainsAside(Script):
    """A model that it does not keep, as for an attack on the other one."""

    def step(self, inputs: torch.Tensor | None = None) -> None:
        super().step(inputs)
        aside = torch.nn.Parameter(torch.ones(1))
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(aside.square().sum()).backward()
        scaler.step(torch.optim.SGD([aside]))


@pytest.mark.parametrize("kind", [Script, Unfrozen, Clears, GivesScaler, GivesBoth, GivesSomethingElse, GivesAverage, TrainsAside])
def test_nothing_is_told_where_all_is_given_or_nobody_knows(attempts: Attempts, kind: Any, warnings: Callable[[], list[str]]):
    attempts.begin()
    script = kind()
    run(script, script.attach(), AT)
    attempts.held(AT)
    attempts.begin(AT)
    script = kind()
    run(script, script.attach(), AT + 2)
    assert not warnings()


def test_parameters_that_were_trained_before_a_restart_and_are_frozen_after_it_are_told(
    attempts: Attempts, warnings: Callable[[], list[str]]
):
    attempts.begin()
    first = Unfrozen()
    run(first, first.attach(), AT)
    attempts.held(AT)
    attempts.begin(AT)
    second = Unfrozen()
    snapshots = second.attach()
    second.done = LATE - 2  # it counts anew, and has not come to that step
    run(second, snapshots, AT + 1)
    (said,) = warnings()
    assert "requires_grad of model/0.0.weight and 7 others was on when the snapshot was taken, and is off in the first step" in said


@pytest.mark.parametrize(("count", "named"), [(1, "a"), (2, "a and 1 other"), (9, "a and 8 others")])
@pytest.mark.parametrize("what", ["frozen", "trained", "gradients", "buffers"])
def test_a_text_is_grammatical_for_one_name_for_two_and_for_many(what: str, count: int, named: str):
    names = "abcdefghi"[:count]
    said = TEXTS[what] % _named(names)
    assert f" {named} was" in said or f" {named}, and gradients are" in said or f" in {named}. Where" in said


@pytest.mark.usefixtures("alone")
def test_a_state_of_a_communication_hook_is_told(warnings: Callable[[], list[str]]):
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    state = PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    for extra in ({"hook": state}, {}):
        Unsaved([ModelTensors(model)], [], [], extra, None).close()
    (said,) = warnings()
    assert "powerSGD_hook of DistributedDataParallel has a state" in said


def test_a_module_without_any_state_may_be_in_extra(attempts: Attempts):
    attempts.begin()
    script = Script()
    script.extra["criterion"] = torch.nn.CrossEntropyLoss()
    run(script, script.attach(), AT)
    attempts.held(AT)
    attempts.begin(AT)
    again = Script()
    again.extra["criterion"] = torch.nn.CrossEntropyLoss()
    assert again.attach().step == AT


def test_what_steps_after_the_loop_is_not_looked_at(attempts: Attempts, warnings: Callable[[], list[str]]):
    attempts.begin()
    script = Script()
    run(script, script.attach(), 3)
    torch.optim.SGD(script.model.parameters()).step()
    assert not warnings() and worker.should_stop() is None
