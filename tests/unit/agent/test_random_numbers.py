"""Ranks are forked from one process, and draw random numbers as processes do that were each started by themselves."""

import subprocess
import sys
from pathlib import Path

import pytest

RANKS = """
import os
from pathlib import Path

import numpy, torch
from resilient.agent.bootstrap import WorkerSpec, run_rank

here = Path.cwd()
for rank in "01":
    out = here / f"out{rank}"
    out.touch()
    if os.fork() == 0:
        paths = [out, here / "stacks", here / "record", here / "config.yaml"]
        run_rank(WorkerSpec({"RANK": rank, "WORLD_SIZE": "2"}, *paths, entrypoint="script.py"))
    os.wait()
"""


@pytest.mark.parametrize("seeds", [False, True])
def test_ranks_draw_numbers_of_their_own_where_the_script_seeds_nothing(tmp_path: Path, seeds: bool):
    seeding = "torch.manual_seed(1); numpy.random.seed(1); random.seed(1)" if seeds else ""
    drawing = "print(torch.rand(1).item(), numpy.random.rand(), random.random())"
    (tmp_path / "script.py").write_text(f"import numpy, random, torch\n{seeding}\n{drawing}\n")
    subprocess.run([sys.executable, "-c", RANKS], cwd=tmp_path, check=True, timeout=120)
    one, other = ((tmp_path / name).read_text().split() for name in ("out0", "out1"))
    assert len(one) == len(other) == 3, one + other
    assert [a == b for a, b in zip(one, other, strict=True)] == [seeds] * 3
