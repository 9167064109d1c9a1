"""What ranks compute on: one decision for all of them, and a rank that cannot is a fault of its node."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from resilient import worker
from resilient.config import Config, layout
from resilient.config.timeouts import timeouts
from resilient.driver.agents import agent_command
from resilient.recovery.faults import Raised, WorkerEnd, from_ends
from trainer import device, loop, state
from trainer.batches import Batches
from trainer.device import onto


def context(local_rank: int = 0, decided: str | None = None) -> worker.Context:
    return worker.Context(local_rank, local_rank, 2, 2, 1, None, True, device=decided)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """As many GPUs as torch sees, and the one that was chosen."""
    seen = {"count": 0, "set": -1}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen["count"] > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen["count"])
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: seen.update(set=index))
    return seen


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_rank_whose_gpu_does_not_work_fails_and_its_node_is_to_blame(gpus: dict[str, int], wanted: str):
    config = Config.model_validate({"cluster": {"device": wanted}})
    with pytest.raises(RuntimeError, match="No CUDA GPUs are available") as caught:
        device.device_of(config, context(decided="cuda"))  # the others compute on theirs
    raised = Raised("RuntimeError", str(caught.value), "Traceback", 1.0)
    assert from_ends("f", [WorkerEnd(1, 1, 7, 1, 1.0, -1, "load", raised)], resumed_step=0, now=2.0).verdict == "node"
    gpus["count"] = 1
    assert device.device_of(config, context(decided="cuda")) == torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match="local rank 1: torch sees 1"):
        device.device_of(config, context(local_rank=1, decided="cuda"))


def test_the_supervisor_decides_for_all_ranks_alike(gpus: dict[str, int]):
    gpus["count"] = 4
    assert device.kind(Config(), "cpu") == "cpu", "the driver's machine has none, this one has"
    assert device.kind(Config(), None) == "cuda", "without a supervisor"
    assert device.kind(Config.model_validate({"cluster": {"device": "cpu"}}), "cuda") == "cpu"


@pytest.mark.parametrize(("visible", "decided", "health_s"), [("", "cpu", 30.0), ("0,1", "cuda", 120.0)])
def test_agents_tell_all_ranks_what_they_compute_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, decided: str, health_s: float
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = Config.model_validate({"run_dir": str(tmp_path)})
    command = agent_command(config, layout(config, cpu_count=2, gpu_count=0), None, "secret", "127.0.0.1:1")
    assert (command.environ[worker.DEVICE_VARIABLE], command.device, command.health_s) == (decided, decided, health_s)


def test_the_check_of_cold_gpus_may_take_longer_unless_somebody_says_how_long():
    def limits(**given: object) -> tuple[float, float]:
        found = timeouts(Config.model_validate({"resilience": given}))
        return found.health_s, found.health_on_gpus_s

    assert limits() == (30.0, 120.0)
    assert limits(health_check=45) == (45.0, 45.0)
    assert limits(health_check=False) == (0.0, 0.0)


def test_nccl_is_told_its_gpu(monkeypatch: pytest.MonkeyPatch):
    asked: list[dict[str, object]] = []
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **options: asked.append(options))
    for kind in ("cuda:1", "cpu"):
        loop._join(torch.device(kind), context())
    assert [each.get("device_id") for each in asked] == [torch.device("cuda", 1), None]


def test_the_random_numbers_of_a_gpu_are_kept_only_where_it_is_used(gpus: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    gpus["count"] = 1
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    numbers = state.random_state()  # it is there, and asking it would make a context on it
    assert len(numbers) == len(torch.get_rng_state())
    state.set_random_state(torch.cat([numbers, numbers[:16]]))  # of a run that had used one


def test_batches_reach_a_gpu_by_page_locked_memory_and_nobody_waits(monkeypatch: pytest.MonkeyPatch):
    """Stands for a GPU that cannot be copied to from here."""
    asked: list[tuple[torch.device, bool, bool]] = []
    locked: set[int] = set()

    def pin(data: torch.Tensor) -> torch.Tensor:
        copy = data.clone()
        locked.add(copy.data_ptr())
        return copy

    def to(data: torch.Tensor, where: torch.device | torch.dtype, non_blocking: bool = False) -> torch.Tensor:
        if isinstance(where, torch.dtype):
            return data.type(where)
        asked.append((where, data.data_ptr() in locked, non_blocking))
        return data

    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(devices.append(device)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    gpu, documents = torch.device("cuda", 0), {"mask_documents": True, "mask_end_of_text": True}
    config = Config.model_validate(
        {"data": documents, "model": {"seq_len": 4}, "train": {"micro_batch_size": 1, "global_batch_size": 1}}
    )
    ranks = SimpleNamespace(layout=SimpleNamespace(dp=1, cp=1), dp_rank=0)
    samples = SimpleNamespace(get=lambda numbers: np.arange(5 * len(numbers)).reshape(len(numbers), 5))
    batch, counted = Batches(config, ranks, gpu, 3).read(samples, 0, 1)
    assert not asked and devices == [gpu] * 5, "a thread of its own must not begin to use another GPU"
    batch.to(gpu)
    onto(counted, gpu)
    assert asked == [(gpu, True, True)] * 5, "tokens, targets, their number, and the documents' numbers and bounds"
