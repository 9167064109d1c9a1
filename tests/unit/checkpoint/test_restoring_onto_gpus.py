"""Reading a checkpoint onto a GPU: page-locked memory, halves of which are read into and copied from by turns."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from checkpoint import DamagedCheckpoint, LocalShard, load, loading, save, step_path
from checkpoint.device import StandIn


def shards(values: torch.Tensor, count: torch.Tensor) -> list[LocalShard]:
    """Rows of layers, of which a GPU copies runs of chunks, and a number that stays on the CPU."""
    return [
        *(
            LocalShard("w", tuple(values.shape), (layer, 0, 0), values[layer : layer + 1], (1, *values.shape[1:]))
            for layer in range(len(values))
        ),
        LocalShard("count", (), (), count, ()),
    ]


@pytest.fixture(params=[8 << 20, 0], ids=["by the GPU's memory", "chunk by chunk"])
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[StandIn]:
    """Those that were asked for; with room for a run, or none."""
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
    (gpu,) = gpus  # one stream, on which copies through one piece of its memory are in order, whoever asks
    assert gpu.mark()
    assert gpu.tries == 4, "two halves for each thread"
    assert not gpu.registered, "given back when all copies are there"


def test_runs_begin_where_layers_do_so_that_a_run_is_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    values = torch.randn(3, 1024, 1024)  # each layer has the bytes of two runs
    save(tmp_path, 1, shards(values, torch.tensor(7.0)), {}, generation=0, keep_last=1)
    copies: list[int] = []

    class Counting(StandIn):
        def unpack(self, host: torch.Tensor, stage: torch.Tensor, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]):
            copies.append(len(targets))
            super().unpack(host, stage, targets, sources)

    monkeypatch.setattr(loading, "device_of", lambda data: Counting(stage_bytes=8 << 20))
    monkeypatch.setattr(loading, "GPU_RUN_BYTES", 2 << 20)
    found = torch.full_like(values, -1.0)
    load(step_path(tmp_path, 1), shards(found, torch.tensor(-1.0)), threads=2)
    assert torch.equal(found, values)
    assert copies == [1] * 6


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
