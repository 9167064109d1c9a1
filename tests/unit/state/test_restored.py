"""Values of `extra` that the script has in variables of its own, too."""

from typing import Any

import numpy as np
import torch
from attempts import Attempts, Script, goes_on_to_the_last_bit

from resilient.state.restored import Restoring


class OwnVariables(Script):
    """It keeps its state in variables of its own, which `extra` names, and trains with them."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []
        self.counts = {"steps": 0, "kinds": {"even": 0}, "sums": torch.zeros(2)}
        self.lately = {-1}
        self.queue, self.array = torch.zeros(4), np.zeros(3)
        self.shadow = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.extra.update(
            history=self.history, counts=self.counts, lately=self.lately, queue=self.queue, array=self.array, shadow=self.shadow
        )

    def step(self, inputs: torch.Tensor | None = None) -> None:
        super().step(inputs)
        counts: Any = self.counts
        counts["steps"] += 1
        counts["kinds"]["even"] += counts["steps"] % 2 == 0
        counts["sums"] += torch.tensor([1.0, self.losses[-1]])
        self.history.append(self.losses[-1])
        self.lately.add(counts["steps"])
        self.queue[counts["steps"] % 4] = self.losses[-1]
        self.array += self.losses[-1]
        for name, value in self.model.named_parameters():
            self.shadow[name].lerp_(value.detach(), 0.1)
        all_of_them = [self.queue, self.array, counts["sums"], *self.shadow.values()]
        self.losses[-1] += sum(float(each.sum()) for each in all_of_them) + len(self.history) + sum(self.lately)
        self.losses[-1] += counts["steps"] + counts["kinds"]["even"]


def test_variables_of_a_script_that_extra_names_go_on(attempts: Attempts):
    goes_on_to_the_last_bit(attempts, OwnVariables)


def test_what_is_named_twice_or_shared_with_the_model_is_replaced():
    weight, row = torch.zeros(2, 3), [0, 0]
    extra: dict[str, Any] = {"best": {"weight": weight[:1]}, "rows": [row, row], "one": torch.zeros(2)}
    extra["other"] = extra["one"][:1]
    restoring = Restoring(extra, [weight])
    assert restoring.restored(extra["best"], {"weight": torch.ones(1, 3)})["weight"].tolist() == [[1.0] * 3]
    assert restoring.restored(extra["rows"], [[1, 2], [3, 4]]) == [[1, 2], [3, 4]]
    assert restoring.restored(extra["one"], torch.ones(2)).tolist() == [1.0, 1.0]
    assert restoring.restored(extra["other"], torch.full((1,), 2.0)).tolist() == [2.0]
    assert (weight.sum(), row, extra["one"].tolist()) == (0, [0, 0], [0.0, 0.0])


def test_what_has_another_shape_or_kind_by_now_is_replaced():
    value, view = torch.zeros(2), torch.zeros(2, 2).t()[:1]
    restoring = Restoring({"value": value, "view": view}, [])
    assert restoring.restored(value, torch.ones(3)).tolist() == [1.0] * 3
    assert restoring.restored(view, torch.ones(1, 2)).tolist() == [[1.0] * 2]
    assert restoring.restored([1], (2, 3)) == (2, 3) and restoring.restored(1, 2) == 2
    assert value.tolist() == [0.0, 0.0] and view.sum() == 0
