"""The optimizer's step: bad batches kept out on the device, and no wait for it on the way; counted on the CPU."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from soak import soaked_after
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer_ranks import run_ranks, train, write_config, write_dataset

from trainer.adamw import AdamW
from trainer.gradients import Measured, excess
from trainer.guard import judge, limits
from trainer.local import local
from trainer.update import Update

READS = frozenset({"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero", "__contains__"})
MADE = frozenset({"tensor", "as_tensor", "asarray", "from_numpy"})  # of the host's numbers, which are then copied to the device
NORM_KERNELS = 10


class Waited(Exception):
    """The host waited for the device."""


class _Methods(TorchFunctionMode):
    """Refuses what reads a tensor, and what makes one of the host's numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS | MADE:
            raise Waited(func.__name__)
        return func(*args, **(kwargs or {}))


class _Kernels(TorchDispatchMode):
    """Refuses what reads a tensor, too, and what copies between devices.

    Notes all others but views, for which nothing is launched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if "_local_scalar_dense" in name or "nonzero" in name or _crosses(name, args, kwargs or {}):
            raise Waited(name)
        if not any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def _crosses(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation copies from one device to another, or would where this one were a GPU."""
    if name == "aten::lift_fresh":  # of an index that is a list; one number is handed to the kernel as it is
        return bool(args[0].dim())
    if name == "aten::_to_copy":
        return kwargs.get("device") not in (None, args[0].device)
    return name == "aten::copy_" and args[0].device != args[1].device


@contextmanager
def no_waits() -> Iterator[_Kernels]:
    with _Methods(), _Kernels() as kernels:
        yield kernels


def test_what_waits_is_refused():
    ones = torch.ones(2)
    for wait in (
        ones.tolist,
        ones[0].item,
        lambda: float(ones[0]),
        lambda: bool(ones[0]),
        ones.numpy,
        ones.cpu,
        lambda: torch.tensor([1, 2]),
        lambda: ones[[0, 1]],
        lambda: ones.to("meta"),
        lambda: torch.ones(2, device="meta").copy_(ones),
    ):
        with pytest.raises(Waited), no_waits():
            wait()


# -- whole steps ---------------------------------------------------------------------------------------------------------


def watched(config: Path, overrides: tuple[str, ...]) -> list[list[str]]:
    """Train on this rank, with no wait from the passes to the optimizer's step; kernels of each step's norm."""
    from trainer import gradients
    from trainer.loop import Trainer

    whole, norm, found = Trainer._attempt, gradients._squares, []

    def attempt(self: Trainer, size: int) -> Any:
        begin, read = self.engine.train, gradients.Measured.read
        watch = no_waits()

        def passes(*args: Any) -> torch.Tensor:
            watch.__enter__()
            return begin(*args)

        def ended(measured: gradients.Measured) -> Any:
            watch.__exit__(None, None, None)
            stepped.append(int(next(iter(self.optimizer.state.values()))["step"]))
            return read(measured)

        with mock.patch.object(self.engine, "train", passes), mock.patch.object(gradients.Measured, "read", ended):
            return whole(self, size)

    def counted(*args: Any) -> torch.Tensor:
        with _Kernels() as kernels:
            result = norm(*args)
        found.append(kernels.seen)
        return result

    stepped: list[int] = []
    with mock.patch.object(Trainer, "_attempt", attempt), mock.patch.object(gradients, "_squares", counted):
        train(config, overrides)
    assert stepped == [1, 2, 3]  # the step is asked for before its numbers are read
    return found


@pytest.mark.parametrize(
    ("ranks", "layout"),
    soaked_after(
        2,
        [
            (1, ("data.mask_documents=true", "data.mask_end_of_text=true", "data.end_of_text=7")),
            (2, ("parallel.dp=2", "parallel.zero_stage=1", "train.micro_batch_size=3")),
            (2, ("parallel.dp=2", "parallel.zero_stage=2")),
            (2, ("parallel.dp=2", "parallel.zero_stage=3")),
            (2, ("parallel.tp=2", "parallel.dp=1")),
        ],
    ),
)
def test_from_the_passes_to_the_optimizers_step_nothing_waits_for_the_device(tmp_path: Path, ranks: int, layout: tuple[str, ...]):
    dataset = write_dataset(tmp_path / "walks")
    overrides = (*layout, "train.steps=3", "train.guard.spike=6.0", "train.guard.window=2")
    found = run_ranks(ranks, watched, write_config(tmp_path, dataset), overrides)
    for kernels in found:
        if isinstance(kernels, Exception):
            raise kernels
        assert len(kernels) == 3
        assert all(len(each) <= NORM_KERNELS for each in kernels), kernels


# -- one step ------------------------------------------------------------------------------------------------------------

FLAT = [2.0, 2.1] * 4
CASES = [
    (2.0, 1.0, [], False),
    (math.nan, 1.0, [], True),
    (2.0, math.inf, [], True),
    (9.0, 1.0, FLAT, True),
    (2.3, 1.0, FLAT, False),
    (9.0, 1.0, FLAT[:7], False),
]


def measured(loss: float, norm: float) -> Measured:
    return Measured(*(torch.tensor(number, dtype=torch.float64) for number in (loss, norm, 0.0)))


def made() -> tuple[nn.Parameter, AdamW, Update]:
    torch.manual_seed(3)
    parameter = nn.Parameter(torch.randn(64))
    optimizer = AdamW([parameter], lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    with_state(optimizer)
    return parameter, optimizer, Update(optimizer, [], 1.0)


def with_state(optimizer: torch.optim.Optimizer) -> None:
    """As before the first step."""
    for each in optimizer.param_groups[0]["params"]:
        optimizer.state[each].update(step=torch.zeros(()), exp_avg=torch.zeros_like(each), exp_avg_sq=torch.zeros_like(each))


def everything(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> list[bytes]:
    state = optimizer.state[parameter]
    return [x.detach().numpy().tobytes() for x in (parameter, state["exp_avg"], state["exp_avg_sq"], state["step"])]


@pytest.mark.parametrize(("loss", "norm", "history", "bad"), CASES)
def test_a_bad_batch_leaves_weights_moments_and_their_count_as_if_it_had_never_been(loss, norm, history, bad):
    """To the last bit, also of the steps behind it; the verdict of the device is that of the host."""
    judged_by = limits(history, not_finite=True, spike=6.0, window=8)
    assert (judge(loss, norm, judged_by) is not None) == bad
    torch.manual_seed(5)
    good = [torch.randn(64) for _ in range(2)]
    parameter, optimizer, update = made()
    twin, twins, others = made()
    for number, gradient in enumerate(good):
        if number == 1:
            before = everything(parameter, optimizer)
            parameter.grad = torch.full((64,), loss * norm)
            found, verdict = update.step(measured(loss, norm), judged_by)
            assert (verdict is not None) == bad
            assert repr((found.loss, found.norm)) == repr((loss, norm))
            assert (everything(parameter, optimizer) == before) == bad
        for each, one in ((parameter, update), (twin, others)):
            each.grad = gradient.clone()
            one.step(measured(2.0, float(gradient.norm())), judged_by)
    assert (everything(parameter, optimizer) == everything(twin, twins)) == bad


def test_gradients_are_divided_down_to_the_limit_and_no_further():
    norms = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    assert excess(norms, 1.0).tolist() == pytest.approx([1.0, 1.0, 4.0], rel=1e-5)
    assert float(excess(norms[0], 1.0)) == 1.0
    parameter, _, update = made()
    twin, twins, _ = made()
    gradient = torch.randn(64)
    parameter.grad, twin.grad = gradient.clone(), gradient / excess(gradient.norm().double(), 1.0)
    update.step(measured(2.0, float(gradient.norm())), limits([], not_finite=True, spike=None, window=8))
    twins.step()
    assert parameter.detach().numpy() == pytest.approx(twin.detach().numpy(), rel=1e-6)


class _Sharded(TorchDispatchMode):
    """Notes operations over distributed tensors: how one is sharded is worked out when it is first asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(each, DTensor) for each in tree_leaves((args, kwargs))):
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of two ranks, of which this process is the first and the other is none."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("skipped", [None, 0.0, 1.0])
def test_adamw_is_that_of_torch_and_asks_for_no_operation_over_distributed_tensors(mesh: DeviceMesh, skipped: float | None):
    torch.manual_seed(3)
    placements = [Shard(0), Shard(1), Replicate()]

    def part(of: Tensor, placement: Any) -> Tensor:
        return distribute_tensor(of, mesh, [placement], src_data_rank=None)  # by nothing that the other rank would send

    parameters, twins = ([nn.Parameter(part(torch.ones(4, 6), each)) for each in placements] for _ in "ab")
    ours = AdamW(parameters, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    theirs = torch.optim.AdamW(twins, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    with_state(ours)
    with_state(theirs)
    theirs.found_inf = ours.found_inf = None if skipped is None else torch.tensor(skipped)  # type: ignore[attr-defined]
    theirs.grad_scale = ours.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    for _ in range(3):
        for each, twin, placement in zip(parameters, twins, placements, strict=True):
            gradient = torch.randn(4, 6)
            each.grad, twin.grad = (part(gradient.clone(), placement) for _ in "ab")
        with _Sharded() as sharded:
            ours.step()
        theirs.step()
        assert sharded.seen == []
    for each, twin in zip(parameters, twins, strict=True):
        assert torch.equal(each.to_local(), twin.to_local()) and bool((each.to_local() == 1).all()) == (skipped == 1.0)
        assert all(torch.equal(local(ours.state[each][name]), local(theirs.state[twin][name])) for name in ("step", "exp_avg"))
