"""In which phase a rank is whose loop is the runtime's own: what is inferred of it, and what its script says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import watched_loops
from forked import forked
from soak import soaked

READ_IN_STEPS = {"computes": ["step"], "reads": ["data"], "is done": ["start"]}


@pytest.mark.parametrize(
    ("loop", "phases"),
    [
        (
            watched_loops.turned,
            {
                "computes": ["step"],
                "reads": ["data", "told eval"],
                "saves": ["snapshot"],
                "says that it evaluates": ["told eval"],
                "saves in an evaluation": ["told eval"],
                "goes on": ["step"],
                "is done": ["start"],
                "saves at the end": ["start"],
            },
        ),
        (watched_loops.in_words, {"computes": ["step"], "goes on": ["step"], "is done": ["start"]}),
        (watched_loops.left, {"computes": ["step"], "computes again": ["step"], "is done": ["start"]}),
        (watched_loops.caught, {"computes": ["step"], "reads": ["told data"], "evaluates": ["told eval"], "is done": ["start"]}),
        (watched_loops.read_in_vain, {"is done": ["start"], "reads behind it": ["data"], "goes on": ["start"]}),
        (watched_loops.fails, {"has failed in a step": ["step"], "has failed behind the loop": ["start"]}),
        (watched_loops.accelerated, READ_IN_STEPS),
        soaked(
            watched_loops.trained,
            {
                **READ_IN_STEPS,
                "evaluates": ["eval"],
                "reads to evaluate": ["eval"],
                "saves": ["snapshot"],
                "evaluates at the end": ["eval", "start"],
                "reads at the end": ["start"],
            },
        ),
        soaked(
            watched_loops.fitted,
            {
                **READ_IN_STEPS,
                "evaluates": ["eval"],
                "ends an epoch": ["step"],
                "saves": ["snapshot"],
                "tests": ["start"],
                "evaluates at the end": ["start"],
            },
        ),
    ],
)
def test_phases_of_a_loop_are_inferred_up_to_its_end(
    loop: Callable[[Any, Path], None], phases: dict[str, list[str]], tmp_path: Path
):
    process = forked(watched_loops.told, loop, tmp_path)
    process.join(120.0)
    assert process.exitcode == 0
    assert json.loads((tmp_path / "phases.json").read_text()) == phases
