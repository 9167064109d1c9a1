"""What hooks of Lightning add to a checkpoint and exchange in it comes back to the same hooks in another process's trainer."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def hooked() -> Any:
    """Imports Lightning, which takes seconds, in the processes that run these tests alone."""
    return importlib.import_module("hooked")


def test_what_hooks_add_and_exchange_is_saved_and_what_only_has_another_name_is_not_saved_twice(hooked: Any, tmp_path: Path):
    state, weights, averaged = hooked.saved_at(tmp_path, 3)
    assert state["renamed"] == {"current_model_state": "state_dict"}
    assert (state["added"]["seen"], state["added"]["count"]) == (3, 3)
    assert {"state_dict", "averaging_state", "seen", "count", "best"} == state["added"].keys()
    for name, value in state["added"]["state_dict"].items():
        assert torch.equal(value, averaged[f"module.{name}"]) and not torch.equal(value, weights[name])


def test_hooks_find_it_again_and_the_weights_stay_those_that_were_restored(hooked: Any, tmp_path: Path):
    state, weights, averaged = hooked.saved_at(tmp_path, 3)
    hooked.ORDER.clear()
    module, counting, ema = hooked.Line(), hooked.Counting(), hooked.EMAWeightAveraging(decay=0.5)

    def restore(trainer: Any) -> None:
        trainer.lightning_module.load_state_dict(weights)
        hooked.lightning_hooks.load(trainer, trainer.fit_loop.state_dict(), state, own)
        assert (module.seen, counting.count) == (3, 3)
        assert all(torch.equal(value, averaged[name]) for name, value in hooked.average(ema).items())
        assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())

    own = hooked.Own(0, restore)
    hooked.fit(module, tmp_path, counting, ema, own, steps=1)
    assert hooked.ORDER == ["module", "callback"]
    assert (module.seen, counting.count) == (4, 4)


def test_without_hooks_nothing_is_saved_and_nothing_is_called(hooked: Any, tmp_path: Path):
    found: list[dict[str, Any]] = []

    def take(trainer: Any) -> None:
        found.append(hooked.lightning_hooks.saved(trainer, trainer.fit_loop.state_dict(), own))
        hooked.lightning_hooks.load(trainer, trainer.fit_loop.state_dict(), {}, own)

    own = hooked.Own(1, take)
    hooked.fit(hooked.Plain(), tmp_path, own, steps=2)
    assert found == [{}]
