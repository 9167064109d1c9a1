"""A training script that is attached, and attempts of it whose snapshots a real daemon holds, in one process."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from lone_daemon import PATIENCE_S, LoneDaemon

import resilient
from checkpoint import Snapshots
from checkpoint.protocol import Held, Retain
from resilient import worker
from resilient.state import announcement

TOTAL, AT, LATE = 12, 7, 4
ENTRY = "." * 16_000  # a few of them are more than there is room for at first


class Counting(torch.optim.SGD):
    """It keeps how many steps it has taken, and the mean of the gradients, under keys of its own; both change what it does."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        count = self.state.get("count", 0)
        grads = [each.grad for group in self.param_groups for each in group["params"] if each.grad is not None]
        mean = torch.stack([each.mean() for each in grads]).mean()
        self.state["means"] = {"newest": mean, "all": [*self.state.get("means", {"all": []})["all"], mean]}
        self.state["count"] = count + 1
        for group in self.param_groups:
            group["lr"] = 1e-2 / (1 + count) * (1 + torch.stack(self.state["means"]["all"]).sum().tanh().item())
        return loss


class Script:
    """A training script, made anew for each attempt."""

    def __init__(self, how: str = "adamw") -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.3)) for _ in range(3)),
            torch.nn.Linear(6, 2),
        )
        parameters = list(self.model.parameters())
        if how == "two":
            self.optimizer: Any = [torch.optim.SGD(parameters[:2], 0.1, momentum=0.9), torch.optim.Adagrad(parameters[2:], 0.1)]
        else:
            made = {
                "adamw": lambda: torch.optim.AdamW(parameters, 1e-2, amsgrad=True),
                "sgd": lambda: torch.optim.SGD(parameters, 1e-2),
                "adafactor": lambda: torch.optim.Adafactor(parameters, 1e-2),
                "counting": lambda: Counting(parameters, 1e-2, momentum=0.9),
                "nadam": lambda: torch.optim.NAdam(parameters, 1e-2),
                "groups": lambda: torch.optim.Adam([{"params": parameters[:3]}, {"params": parameters[3:], "lr": 1e-3}]),
            }
            self.optimizer = made[how]()
        first = self.optimizer[0] if how == "two" else self.optimizer
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            first,
            [torch.optim.lr_scheduler.ConstantLR(first, 0.5, 3), torch.optim.lr_scheduler.CosineAnnealingLR(first, TOTAL)],
            milestones=[3],
        )
        self.average = copy.deepcopy(self.model)
        self.noise = torch.Generator().manual_seed(1)
        self.extra: dict[str, Any] = {"average": self.average, "noise": self.noise, "seen": [0], "best": float("inf")}
        self.losses: list[float] = []

    def attach(self, **more: Any) -> Any:
        return resilient.attach(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, extra=self.extra, **more)

    def step(self, inputs: torch.Tensor | None = None) -> None:
        inputs = torch.randn(8, 6, generator=self.noise) if inputs is None else inputs

        def closure() -> torch.Tensor:
            for each in self._optimizers():
                each.zero_grad()
            loss: torch.Tensor = self.model(inputs).square().mean()
            loss.backward()
            return loss

        loss = torch.stack([each.step(closure).detach() for each in self._optimizers()]).sum()
        self.scheduler.step()
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(now, 0.1)
        self.losses.append(loss.item())
        self.extra["seen"] = [*self.extra["seen"], len(inputs)][-3:]
        self.extra["best"] = min(self.extra["best"], loss.item())

    def _optimizers(self) -> list[Any]:
        return self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]

    def everything(self) -> Any:
        weights = {name: value.tolist() for name, value in [*self.model.state_dict().items(), *self.average.state_dict().items()]}
        rates = [[group["lr"] for group in each.param_groups] for each in self._optimizers()]
        return weights, rates, self.extra["seen"], self.extra["best"], torch.rand(2).tolist()


class Unfrozen(Script):
    """Its first layers are trained from step `LATE` on."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0
        self._train(False)

    def _train(self, trained: bool) -> None:
        for parameter in self.model[:2].parameters():
            parameter.requires_grad_(trained)

    def attach(self, **more: Any) -> Any:
        snapshots = super().attach(**more)
        self.done = snapshots.step
        return snapshots

    def step(self, inputs: torch.Tensor | None = None) -> None:
        self._train(self.done >= LATE)
        super().step(inputs)
        self.done += 1


class Growing(Script):
    """It keeps what it has seen."""

    def step(self, inputs: torch.Tensor | None = None) -> None:
        super().step(inputs)
        found = self.extra.setdefault("all", [])
        found.append(f"{len(found)}{ENTRY if found else ''}")  # nothing much yet when the first room is made


def session_of_two(
    daemon: LoneDaemon,
    *,
    generation: int = 1,
    step: int | None = None,
    older: int | None = None,
    ram_every: int = TOTAL,
    ranks: int = 2,
) -> str:
    """The path of a session of two ranks on one node, or of so many, with a step to go on from, and an older one."""
    path = daemon.begin(generation, ranks=ranks)
    found = json.loads(path.read_text())
    found["tiers"] = [{"name": "ram", "every_steps": ram_every}]
    found["durable"] = {"name": "durable", "path": str(daemon.durable)}
    steps = tuple(each for each in (step, older) if each is not None)
    holdings = {each: [{"directory": str(daemon.held_path(each).resolve())}] for each in steps}
    found["candidates"] = [{"step": each, "tier": "ram", "holdings": held} for each, held in holdings.items()]
    path.write_text(json.dumps(found))
    daemon.send(Retain(generation=generation, tier="ram", steps=steps, upto=1 << 30))
    return str(path)


def in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is attached yet."""
    monkeypatch.setattr(resilient.Attached, "_open", WeakSet())
    monkeypatch.setattr(resilient.Attached, "_saved", False)


class Attempts:
    """Attempts of one script, whose snapshots a daemon holds. They end with the test, as processes would."""

    def __init__(self, daemon: LoneDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
        self._daemon, self._monkeypatch, self.generation = daemon, monkeypatch, 0
        daemon.start()
        self._made: list[Snapshots] = []
        init = Snapshots.__init__

        def made(snapshots: Snapshots, *arguments: Any, **more: Any) -> None:
            init(snapshots, *arguments, **more)
            self._made.append(snapshots)

        monkeypatch.setattr(Snapshots, "__init__", made)
        monkeypatch.setattr(announcement, "READY_S", PATIENCE_S)  # or a busy machine leaves the next snapshot out

    def __enter__(self) -> "Attempts":
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._made:
            each.close()

    def begin(self, step: int | None = None) -> None:
        """An attempt begins, with a step to go on from; from now on `attach` is supervised."""
        self.generation += 1
        in_a_new_process(self._monkeypatch)
        path = self._daemon.begin(self.generation)
        if step is not None:  # as the driver does: buffers of what came before may be overwritten
            self._daemon.send(Retain(generation=self.generation, tier="ram", steps=(step,), upto=TOTAL))
        found = json.loads(path.read_text())
        found["tiers"] = [{"name": "ram", "every_steps": AT}]
        found["durable"] = {"name": "durable", "path": str(self._daemon.durable)}
        if step is not None:
            held = str(self._daemon.held_path(step).resolve())
            found["candidates"] = [{"step": step, "tier": "ram", "holdings": [{"directory": held}]}]
        path.write_text(json.dumps(found))
        self._monkeypatch.setenv(worker.SESSION_VARIABLE, str(path))
        self._monkeypatch.setenv(worker.GENERATION_VARIABLE, str(self.generation))

    def path(self, step: int) -> Path:
        return self._daemon.held_path(step)

    def release(self, step: int) -> None:
        """Buffers of all steps before this one may be overwritten."""
        self._daemon.send(Retain(generation=self.generation, tier="ram", steps=(step,), upto=step))

    def held(self, step: int) -> None:
        """Wait until a step is sealed."""
        while self._daemon.wait_for(Held).shard.key.step != step:
            pass


def run(script: Script, snapshots: Any, total: int = TOTAL) -> list[int]:
    """The steps that it took."""
    taken = []
    for step in snapshots.steps(total):
        script.step()
        taken.append(step)
    return taken


def loses_no_step(attempts: Attempts, trained: Callable[[Script, int], None]) -> None:
    """Assert that an attempt up to step `AT`, and one that goes on from there, have the losses of one that runs through."""
    expected = Script()
    trained(expected, TOTAL)
    attempts.begin()
    first = Script()
    trained(first, AT)
    attempts.held(AT)
    attempts.begin(AT)
    second = Script()
    trained(second, TOTAL)
    assert first.losses + second.losses == expected.losses


def goes_on_to_the_last_bit(attempts: Attempts, make: Callable[[], Script]) -> None:
    """Assert that an attempt, and a second one that goes on from step `AT`, come to what a script comes to that runs through."""
    expected = make()
    assert run(expected, expected.attach()) == list(range(TOTAL)), "without a supervisor a loop is a loop"
    whole = expected.everything()
    attempts.begin()
    first = make()
    assert run(first, first.attach(), AT) == list(range(AT))
    attempts.held(AT)
    attempts.begin(AT)
    second = make()
    assert run(second, second.attach()) == list(range(AT, TOTAL))
    assert first.losses + second.losses == expected.losses
    assert second.everything() == whole
