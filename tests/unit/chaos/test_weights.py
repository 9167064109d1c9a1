"""Final weights against those of the reference run: how far apart they are, whatever type they have."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chaos.verdict.gathering import weights
from checkpoint.local_shard import LocalShard
from checkpoint.saving import save


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_weights_are_as_far_apart_as_their_numbers_are(tmp_path: Path, kind: torch.dtype):
    for name, values in (("one", [3.0, 4.0, 0.0]), ("other", [3.0, 4.0, -0.5])):
        data = torch.tensor(values).to(kind)
        save(tmp_path / name, 1, [LocalShard("model/a", (3,), (0,), data, (1,))], {}, generation=0)
    found = weights(tmp_path / "one", tmp_path / "other")
    assert found is not None
    assert found.differing == ("model/a",)
    assert found.largest == pytest.approx(0.5 / 25.25**0.5)


@pytest.mark.soak
def test_weights_are_compared_where_python_leaves_out_its_asserts(tmp_path: Path):
    for name, last in (("one", 0.0), ("other", 5.0)):
        data = torch.tensor([3.0, 4.0, last])
        save(tmp_path / name, 1, [LocalShard("model/a", (3,), (0,), data, (1,))], {}, generation=0)
    code = "import sys, pathlib, chaos.verdict.gathering as found; print(found.weights(*map(pathlib.Path, sys.argv[1:])))"
    words = (sys.executable, "-OO", "-c", code, tmp_path / "one", tmp_path / "other")
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "('model/a',)" in done.stdout, done.stderr
