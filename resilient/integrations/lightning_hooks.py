"""What callbacks and a module of Lightning keep by `on_save_checkpoint`: averages of WeightAveraging, or what a script adds.

Such a hook changes the dictionary that Lightning is about to write. It is given one here that looks the same; what it adds or
exchanges is part of a snapshot, and `on_load_checkpoint` finds it in a dictionary that looks the same again.
"""

from collections.abc import Mapping
from typing import Any

SAVE, LOAD = "on_save_checkpoint", "on_load_checkpoint"


def saved(trainer: Any, fit_loop: Mapping[str, Any], own: object) -> dict[str, Any]:
    """What hooks add to a checkpoint of now, empty without hooks. Args: own: the callback whose hook is not called."""
    hooks = _hooks(trainer, SAVE, own)
    if not hooks:
        return {}
    checkpoint = _checkpoint(trainer, fit_loop)
    before = dict(checkpoint)
    for hook in hooks:
        hook(checkpoint)
    names = {id(value): key for key, value in before.items() if isinstance(value, dict | list)}  # equal numbers are one object
    found = {key: value for key, value in checkpoint.items() if key not in before or value is not before[key]}
    renamed = {key: names[id(value)] for key, value in found.items() if id(value) in names}
    return {"added": {key: value for key, value in found.items() if key not in renamed}, "renamed": renamed}


def load(trainer: Any, fit_loop: Mapping[str, Any], state: Mapping[str, Any], own: object) -> None:
    """Give hooks what they had saved. Model and optimizers are restored already."""
    if not state:
        return
    now = _checkpoint(trainer, fit_loop)
    checkpoint = {**now, **state["added"], **{key: now[name] for key, name in state["renamed"].items()}}
    for hook in reversed(_hooks(trainer, LOAD, own)):  # the module's first, as Lightning does
        hook(checkpoint)


def _hooks(trainer: Any, name: str, own: object) -> list[Any]:
    """Hooks that somebody has written, each to be called with a checkpoint; the module's is the last."""
    module = trainer.lightning_module
    found = [_of_callback(each, name, trainer) for each in trainer.callbacks if each is not own and _overridden(each, name)]
    return [*found, getattr(module, name)] if _overridden(module, name) else found


def _of_callback(callback: Any, name: str, trainer: Any) -> Any:
    return lambda checkpoint: getattr(callback, name)(trainer, trainer.lightning_module, checkpoint)


def _overridden(owner: object, name: str) -> bool:
    """Whether a class outside of Lightning's own bases has the hook."""
    bases = ("CheckpointHooks", "Callback")
    holder = next((each for each in type(owner).__mro__ if name in vars(each)), None)
    return holder is not None and holder.__name__ not in bases


def _checkpoint(trainer: Any, fit_loop: Mapping[str, Any]) -> dict[str, Any]:
    """What Lightning gives to hooks: see `CheckpointConnector.dump_checkpoint`."""
    module = trainer.lightning_module
    found: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "state_dict": trainer.strategy.lightning_module_state_dict(),
        "loops": {"fit_loop": fit_loop},
        "callbacks": {each.state_key: each.state_dict() for each in trainer.callbacks},
        "optimizer_states": [each.state_dict() for each in trainer.optimizers],
        "lr_schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
    }
    if module.hparams:
        found[module.CHECKPOINT_HYPER_PARAMS_KEY] = dict(module.hparams)
    return found
