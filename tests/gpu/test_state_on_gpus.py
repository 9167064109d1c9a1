"""Checkpoints to and from the memory of a GPU, snapshots that it copies, and what a standby holds ready there."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rank_buffers import Buffer, resident_kib, transformer
from trainer_ranks import run_ranks, steps, train, trained, write_config, write_dataset

from checkpoint import LocalShard, load, loading, save, step_path
from checkpoint.device import Cuda

GPU = torch.device("cuda", 0)


def on_gpu(shards: list[LocalShard], value: float | None = None) -> list[LocalShard]:
    """The same of a GPU, or so many numbers in their place; what has no dimensions stays on the CPU."""
    return [
        LocalShard(
            each.array,
            each.shape,
            each.offset,
            (each.data.clone() if value is None else torch.full_like(each.data, value)).to(GPU if each.data.dim() else "cpu"),
            each.unit,
        )
        for each in shards
    ]


@pytest.mark.parametrize("run_bytes", [loading.GPU_RUN_BYTES, 1 << 20])
@pytest.mark.parametrize("stage", [True, False])
def test_a_checkpoint_comes_back_onto_a_gpu_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_bytes: int, stage: bool
):
    monkeypatch.setattr(loading, "GPU_RUN_BYTES", run_bytes)
    if not stage:
        monkeypatch.setattr(Cuda, "stage", lambda self: torch.empty(0, dtype=torch.uint8, device=GPU))
    shards = on_gpu([*transformer(), LocalShard("large", (3000, 1500), (0, 0), torch.randn(3000, 1500), (1, 1500))])
    save(tmp_path, 1, shards, {}, generation=0, keep_last=1)
    found = on_gpu(shards, -1.0)
    load(step_path(tmp_path, 1), found)
    torch.cuda.synchronize()
    for each, right in zip(found, shards, strict=True):
        assert torch.equal(each.data, right.data), each.array


@pytest.fixture
def ram() -> Iterator[Path]:
    """Where buffers are: files of disks are not page-locked."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        yield Path(place)


def test_a_snapshot_that_a_gpu_copies_has_the_bytes_that_the_cpu_writes(ram: Path):
    shards = transformer()
    found = {}
    for name, given, device in (("cpu", shards, None), ("gpu", on_gpu(shards), Cuda(GPU))):
        (ram / name).mkdir()
        buffer = Buffer(ram / name, [given])
        mapped = buffer.mapped(device)  # type: ignore[arg-type]
        if device is not None:
            assert mapped._registered, "page-locked"
            assert resident_kib(ram / name) == 0, "and not in the page tables, which a process that dies has taken down"
        mark = mapped.copy(given, [True] * len(given))
        if device is not None:
            device.wait(mark)
        found[name] = buffer.sealed()
        mapped.close()
    assert found["gpu"] == found["cpu"]


def stood_by(config: Path) -> list[dict[str, object]]:
    """Train in a process that has stood by before."""
    from resilient.worker import load_config
    from trainer import warming

    warming.run(load_config(config), int(os.environ["RANK"]), 1)
    return train(config)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_rank_that_stood_by_computes_what_any_other_does(tmp_path: Path, compiled: bool):
    sections: dict[str, dict[str, object]] = {
        "cluster": {"device": "cuda"},
        "train": {"precision": "bf16", "deterministic": True, "compile": compiled},
        "resilience": {"gpu_standby": True},
        "model": {"attention": "sdpa_flash"},
    }
    dataset = write_dataset(tmp_path / "walks")
    one, other = (write_config(tmp_path / name, dataset, **sections) for name in ("one", "other"))
    (found,) = run_ranks(1, stood_by, one)
    if isinstance(found, Exception):
        raise found
    assert steps(found) == steps(trained(other, 1))
