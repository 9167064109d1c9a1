"""Final weights against those of the reference run: how far apart they are, whatever type they have."""

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
