"""What a process that stands by holds ready on a GPU, and whether there is room for it beside the rank."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from soak import soaked_after
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer_ranks import VOCABULARY, run_ranks, train, write_config, write_dataset

from resilient.worker import DEVICE_VARIABLE, Config, layout, load_config, settle
from trainer import device, fit, kernels, warming
from trainer.attention import Kernel
from trainer.loop import Trainer
from trainer.memory import most, warming_bytes
from trainer.plan import sections
from trainer.shape import GPTShape, shape_of

SIZES: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "ffn_hidden": 128, "vocab_size": 64, "seq_len": 16}
FP32 = {"precision": "fp32", "grad_dtype": "fp32"}


def config_of(gpu_standby: object = "auto", **sections: Any) -> Config:
    return Config.model_validate({"model": SIZES, "train": FP32, "resilience": {"gpu_standby": gpu_standby}, **sections})


def peak(config: Config) -> int:
    return most(config, shape(config), layout(config, cpu_count=1, gpu_count=1))[1].peak


def shape(config: Config) -> GPTShape:
    return shape_of(config, 64)


def gpu_of(config: Config, spare_bytes: int) -> int:
    """The smallest GPU that leaves so much beside a rank."""
    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fit.budget(middle) >= peak(config) + spare_bytes else (middle + 1, high)
    return low


@pytest.mark.parametrize(
    ("gpu_standby", "spare_bytes", "holds"),
    [("auto", fit.STANDBY, True), ("auto", fit.STANDBY - 1, False), (True, 0, True), (False, fit.STANDBY, False)],
)
def test_auto_holds_a_gpu_ready_where_there_is_room_beside_the_rank(gpu_standby: object, spare_bytes: int, holds: bool):
    config = config_of(gpu_standby)
    spread = layout(config, cpu_count=1, gpu_count=1)
    assert fit.holds_standby(config, shape(config), spread, gpu_of(config, spare_bytes)) == holds


def test_where_the_memory_of_gpus_is_not_known_there_is_no_room():
    config = config_of()
    assert not fit.holds_standby(config, shape(config), layout(config, cpu_count=1, gpu_count=1), None)


@pytest.mark.parametrize(("gib", "words"), [(80, "768.0 MiB beside the rank"), (1.7, "has no room")])
def test_the_plan_says_what_a_standby_takes_of_a_gpu(gib: float, words: str):
    found = sections(config_of(cluster={"gpu_memory_gib": gib}), 64, known=True)
    (memory,) = [lines for title, lines in found.items() if title.startswith("memory per rank")]
    assert words in str(memory["standby on the GPU"])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a GPU is asked for, in order; tensors are the CPU's."""
    order: list[str] = []
    chosen, ready = kernels.choose, device.make_ready
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(warming, "memory_of", lambda gpu: 80 << 30)

    def make_ready(gpu: torch.device, dtype: torch.dtype) -> None:
        order.append(f"{gpu} {dtype} {os.environ.get('CUBLAS_WORKSPACE_CONFIG')}")
        ready(torch.device("cpu"), dtype)

    def choose(wanted: str, shape: GPTShape, gpu: torch.device, dtype: torch.dtype, **how: Any) -> Kernel:
        order.append("attention")
        return chosen(wanted, shape, torch.device("cpu"), dtype, **how)

    monkeypatch.setattr(warming, "make_ready", make_ready)
    monkeypatch.setattr(warming, "connect_alone", lambda gpu: order.append(f"NCCL on {gpu}"))
    monkeypatch.setattr(warming.kernels, "choose", choose)
    monkeypatch.setattr(warming, "give_back", lambda gpu: order.append(f"{gpu} is given back"))
    return order


def test_a_standby_has_the_context_cublas_nccl_and_attention_of_its_own_gpu_and_gives_memory_back(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fit, "warming_bytes", lambda *_: 1 << 40)  # without room for more
    warming.run(config_of(train={**FP32, "deterministic": True}), 7, 8)
    assert asked == ["cuda:3 torch.float32 :4096:8", "NCCL on cuda:3", "attention", "cuda:3 is given back"]


@pytest.mark.parametrize("gpu_standby", [False, "auto"])
def test_a_standby_that_is_not_to_or_has_no_room_asks_a_gpu_for_nothing(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, gpu_standby: object
):
    monkeypatch.setattr(warming, "memory_of", lambda gpu: 1 << 30)
    warming.run(config_of(gpu_standby), 7, 8)
    assert not asked


def test_a_standby_whose_gpu_refuses_ends_and_becomes_no_rank(asked: list[str], monkeypatch: pytest.MonkeyPatch):
    def refuses(gpu: torch.device, dtype: torch.dtype) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")

    monkeypatch.setattr(warming, "make_ready", refuses)
    with pytest.raises(SystemExit):
        warming.run(config_of(True), 7, 8)


# -- kernels of a step -------------------------------------------------------------------------------------------------

COMPILED = {**FP32, "compile": True}


@pytest.mark.parametrize(
    ("gpu_standby", "train", "spare_bytes", "warms"),
    [
        ("auto", COMPILED, 0, True),
        ("auto", COMPILED, -1, False),
        (True, COMPILED, -fit.STANDBY, True),
        (False, COMPILED, 0, False),
        ("auto", FP32, 0, True),
    ],
)
def test_kernels_of_a_step_are_made_ready_where_there_is_room_for_a_layer(
    gpu_standby: object, train: dict[str, object], spare_bytes: int, warms: bool
):
    config = config_of(gpu_standby, train=train)
    spread = layout(config, cpu_count=1, gpu_count=1)
    gpu_bytes = gpu_of(config, fit.STANDBY + warming_bytes(config, shape(config), spread) + spare_bytes)
    assert fit.has_room_to_warm_kernels(config, shape(config), spread, gpu_bytes) == warms


def test_the_plan_says_what_making_kernels_ready_takes():
    def row(spare_bytes: int) -> str:
        config = config_of(train=COMPILED)
        size_bytes = fit.STANDBY + warming_bytes(config, shape(config), layout(config, cpu_count=1, gpu_count=1)) + spare_bytes
        gib = gpu_of(config, size_bytes) / fit.GIB
        found = sections(config_of(train=COMPILED, cluster={"gpu_memory_gib": gib}), 64, known=True)
        return str(next(lines for title, lines in found.items() if title.startswith("memory per rank"))["standby on the GPU"])

    assert "more while it computes a layer" in row(4096)
    assert "there is no room" in row(-4096)


def test_a_standby_computes_a_layer_after_cublas_is_there_and_before_memory_is_given_back(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(warming.kernels, "foreseen", lambda *_: asked.append("the kernel of the ranks"))
    monkeypatch.setattr(warming, "compute_layer", lambda config, *_: asked.append(f"layers in {config.train.grad_dtype}"))
    monkeypatch.setattr(warming.kernels, "ran", lambda *_: asked.append("and need not be tried"))
    warming.run(config_of(train={"precision": "bf16", "grad_dtype": "auto", "compile": True}), 7, 8)
    assert asked[2:] == ["the kernel of the ranks", "layers in fp32", "and need not be tried", "cuda:3 is given back"]


def captured_by(config: Path) -> tuple[int, int]:
    """Graphs that a process captures while it stands by, and then as a rank; they run without kernels."""
    from torch._dynamo.backends.debugging import aot_eager  # takes seconds, in each process that collects tests

    whole, graphs = torch.compile, 0

    def backend(graph: fx.GraphModule, inputs: list[torch.Tensor], **_: object) -> Any:
        nonlocal graphs
        graphs += 1
        return aot_eager(graph, inputs)

    with mock.patch.object(torch, "compile", lambda given, fullgraph: whole(given, backend=backend, fullgraph=fullgraph)):
        stand_by(config)
        before = graphs
        train(config)
    return before, graphs - before


def stand_by(path: Path) -> None:
    """Do what a standby does, but on the CPU."""
    config, device = load_config(path), torch.device("cpu")
    torch.set_num_threads(1)
    shape, spread = shape_of(config, VOCABULARY), settle(config, 1)
    config = fit.settled(config, shape, spread, None)
    kernel = kernels.foreseen(config, shape, spread, device, torch.float32)
    warming.compute_layer(config, shape, spread, kernel, device, 0)


@pytest.mark.parametrize(("recompute", "every", "kinds"), soaked_after(1, [("none", 1, 1), ("selective", 2, 2)]))
def test_the_first_step_of_a_rank_that_stood_by_compiles_nothing(tmp_path: Path, recompute: str, every: int, kinds: int):
    sizes = {"precision": "fp32", "steps": 1, "compile": True, "recompute": recompute, "recompute_every": every}
    config = write_config(tmp_path, write_dataset(tmp_path / "walks"), train=sizes, data={"split": [1, 0, 0]})
    ((before, then),) = run_ranks(1, captured_by, config)
    assert (before, then) == (kinds + 2, 0), "layers of each kind and the two of the loss, and none"


class Operations(TorchDispatchMode):
    """Notes which operations run, and of what types: those that are new to a process have CUDA load kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = sorted({str(each.dtype) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)})
        self.seen.add(f"{func.name()} of {', '.join(given)}")
        return func(*args, **(kwargs or {}))


# Of the batch, which is read on the host, and of the random numbers' state.
OF_THE_HOST = {
    "aten::cat of torch.uint8",
    "aten::fill_.Tensor of torch.int64",
    "aten::lift_fresh of torch.int64",
    "aten::ne.Scalar of torch.int64",
    "aten::split.Tensor of torch.int64",
    "aten::sum of torch.bool",
}


def new_to(config: Path) -> list[str]:
    """Operations of a rank's first step that it did not run while it stood by."""
    with Operations() as before:
        stand_by(config)
    step = Trainer._step

    def noted(trainer: Trainer) -> None:
        with then:
            step(trainer)

    then = Operations()
    with mock.patch.object(Trainer, "_step", noted):
        train(config)
    return sorted(then.seen - before.seen)


def test_the_first_step_of_a_rank_that_stood_by_runs_no_operation_for_the_first_time(tmp_path: Path):
    sizes = {"precision": "fp32", "steps": 1}
    config = write_config(tmp_path, write_dataset(tmp_path / "walks"), train=sizes, data={"split": [1, 0, 0]})
    (found,) = run_ranks(1, new_to, config)
    assert set(found) <= OF_THE_HOST
