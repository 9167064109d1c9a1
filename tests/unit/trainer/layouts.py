"""Configs of a tiny model on any layout, and what training on it gives."""

from pathlib import Path

from trainer_ranks import steps, trained, write_config

Sections = dict[str, dict[str, object]]
Lines = list[tuple[int, float, float, float]]  # step, loss, gradient norm, learning rate

STEPS = 3

# Large enough at the start that every weight has a gradient worth the name, and a rate that amplifies no rounding.
BASE: Sections = {
    "model": {"layers": 4, "hidden": 32, "heads": 4, "seq_len": 16, "init_std": 0.1, "attention": "math"},
    "train": {"steps": STEPS, "global_batch_size": 16, "micro_batch_size": 4, "precision": "fp32", "eval_interval": 0},
    "optimizer": {"lr": 2e-3, "clip_grad": 0.3, "warmup_samples": 24, "decay_samples": 400},
    "checkpoint": {"every_steps": 1000},
}


def merged(*many: Sections) -> Sections:
    """One config of several: of a key that more than one of them has, the last value."""
    found: Sections = {}
    for sections in many:
        for name, values in sections.items():
            found[name] = {**found.get(name, {}), **values}
    return found


def spread(tp: int, pp: int, **more: object) -> Sections:
    """A layout; all other ranks are replicas."""
    return {"parallel": {"tp": tp, "pp": pp, **more}}


def name_of(value: object) -> str:
    """The id of a parameter: a layout's sizes, or the values of a config."""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if isinstance(value, list):
        return " ".join(map(name_of, value))
    return " ".join(str(each) for section in value.values() for each in section.values()) if isinstance(value, dict) else str(value)


def deep(layers: int) -> Sections:
    return {"model": {"layers": layers}}


def fewest_layers(variant: Sections) -> int:
    """One for each of two stages, of which these two schedules have two on each of two ranks."""
    return 4 if variant["parallel"]["schedule"] in ("interleaved_1f1b", "zero_bubble") else 2


def reduction(reduce: str, dtype: str = "fp32", schedule: str = "1f1b", stage: int = 1) -> Sections:
    """When gradients are reduced, and in which type they add up."""
    return {
        "parallel": {"reduce_gradients": reduce, "schedule": schedule, "zero_stage": stage},
        "train": {"grad_dtype": dtype},
    }


def moved(dataset: Path, directory: Path, layouts: list[tuple[int, int, int]], each: int, sections: Sections) -> Lines:
    """Train on one layout after another, `each` steps on each."""
    config = write_config(directory, dataset, **merged(BASE, sections))
    found = []
    for number, (tp, pp, dp) in enumerate(layouts, 1):
        overrides = [f"parallel.tp={tp}", f"parallel.pp={pp}", f"train.steps={each * number}"]
        found += steps(trained(config, tp * pp * dp, *overrides))
    return found
