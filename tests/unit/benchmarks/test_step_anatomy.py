"""What the anatomy of a step counts, of steps that are known, and what it says has changed."""

import sys
from pathlib import Path
from unittest import mock

import torch

from resilient.config import Config

FOLDER = str(Path(__file__).parents[3] / "benchmarks")

# Not to be left on the path: benchmarks/trainer.py would be the package `trainer`. The script itself takes it away.
sys.path.insert(0, FOLDER)
try:
    import figures
    import step_anatomy
finally:
    if FOLDER in sys.path:
        sys.path.remove(FOLDER)


def test_operations_waits_and_the_most_memory_are_those_of_the_step():
    x = torch.ones(256)

    def step() -> None:
        y = x.view(2, 128) * 2  # a kernel; the view is none
        z = y + 1
        del y
        float(z.sum() + x[:1].to("meta").numel())  # two kernels, a copy to another device, and a read
        z[0, 0].item()

    found = step_anatomy.counted(step)
    assert found["waits of the host"] == 3
    assert found["operations"] == 4
    assert found["made in the step, at most, bytes"] == 2 * x.nbytes


def test_what_has_changed_is_said_beside_what_is(tmp_path: Path):
    before = step_anatomy.figures_of({"operations": 1234567, "waits of the host": 2, "allreduce, times": 1}, {"operations": 9})
    figures.write(tmp_path / "before.json", figures.measured("step_anatomy", step_anatomy.MEANING, before, (), {}))
    now = step_anatomy.figures_of({"operations": 1234567, "waits of the host": 1}, {"operations": 9})
    head, *rows = step_anatomy.table(now, {"operations": 12}, figures.read(tmp_path / "before.json")).splitlines()
    assert head.split() == ["trainer", "plain", "loop", "torchtitan", "before"]
    assert [row.rsplit(maxsplit=4 if row.startswith(("waits", "all")) else 3) for row in rows] == [
        ["operations", "1,234,567", "9", "12"],
        ["waits of the host", "1", "0", "0", "2"],
        ["allreduce, times", "0", "0", "0", "1"],
    ]


def test_without_torchtitan_its_column_says_so():
    config = Config.model_validate({"model": {"vocab_size": 100}})
    with mock.patch.dict(sys.modules, {"torchtitan": None}):
        said = step_anatomy.of_torchtitan(config)
    assert isinstance(said, str)
    found = step_anatomy.figures_of({"operations": 7}, {"operations": 9})
    _, row, last = step_anatomy.table(found, said, None).splitlines()
    assert row.split() == ["operations", "7", "9", "-"]
    assert last.startswith("torchtitan: not installed")
