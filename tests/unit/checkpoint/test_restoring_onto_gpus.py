"""Reading a checkpoint onto a GPU: page-locked memory, halves of which are read into and copied from by turns."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from checkpoint import DamagedCheckpoint, LocalShard, load, loading, save, step_path
from checkpoint.device import StandIn


def shards(values: torch.Tensor, count: torch.Tensor) -> list[LocalShard]:
    """Rows of two layers, of which a GPU copies runs of chunks, and a number that stays on the CPU."""
    return [
        *(
            LocalShard("w", tuple(values.shape), (layer, 0, 0), values[layer : layer + 1], (1, *values.shape[1:]))
            for layer in (0, 1)
        ),
        LocalShard("count", (), (), count, ()),
    ]


@pytest.fixture(params=[8 << 20, 0], ids=["by the GPU's memory", "chunk by chunk"])
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[StandIn]:
    """One for each thread that reads, as each has a stream of its own; with room for two runs, or none."""
    made: list[StandIn] = []

    def device_of(data: Sequence[torch.Tensor]) -> StandIn:
        made.append(StandIn(stage_bytes=request.param))
        return made[-1]

    monkeypatch.setattr(loading, "device_of", device_of)
    monkeypatch.setattr(loading, "GPU_RUN_BYTES", 2 << 20)
    return made


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    values = torch.randn(2, 1500, 1024)  # 12 MiB: several runs of each thread
    save(tmp_path, 1, shards(values, torch.tensor(7.0)), {}, generation=0, keep_last=1)
    return step_path(tmp_path, 1), values


def test_threads_read_into_one_half_while_a_gpu_copies_from_the_other(saved: tuple[Path, torch.Tensor], gpus: list[StandIn]):
    path, values = saved
    found, count = torch.full_like(values, -1.0), torch.tensor(-1.0)
    load(path, shards(found, count), threads=2)
    assert torch.equal(found, values)
    assert count == 7.0
    copied = [gpu for gpu in gpus if gpu.mark()]
    assert len(copied) == 2, "two threads, and a stream for each"
    assert sum(gpu.tries for gpu in gpus) == 4, "two halves for each"
    assert not any(gpu.registered for gpu in gpus), "given back when all copies are there"


def test_a_gpu_that_refuses_to_lock_pages_is_copied_to_all_the_same(
    saved: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loading, "device_of", lambda data: StandIn(grants=0))
    path, values = saved
    found = torch.full_like(values, -1.0)
    load(path, shards(found, torch.tensor(-1.0)))
    assert torch.equal(found, values)


def test_nothing_is_under_way_when_a_damaged_checkpoint_is_given_up(saved: tuple[Path, torch.Tensor], gpus: list[StandIn]):
    path, values = saved
    largest = max((each for each in path.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size * 3 // 4)
        file.write(b"\xff" * 64)
    found = torch.full_like(values, -1.0)
    with pytest.raises(DamagedCheckpoint):
        load(path, shards(found, torch.tensor(-1.0)), threads=2)
    before = found.clone()
    for gpu in gpus:
        gpu.wait(gpu.mark())
    assert torch.equal(found, before)
    assert not any(gpu.registered for gpu in gpus)
