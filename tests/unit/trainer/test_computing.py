"""How long a GPU computes, without what it waits for others; a stand-in checks the order of use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from layouts import BASE, merged, spread
from trainer_ranks import GATHER, run_ranks, train, write_config, write_dataset

from resilient.config import Config
from resilient.worker import settle
from trainer import engine
from trainer.computing import Computing, computing_of
from trainer.device import Host, StandIn
from trainer.parallel.data import REDUCE_SCATTER

FORWARD_S, BACKWARD_S, WAITING_S = 1.0, 2.0, 100.0


def step(under_test: Computing, gpu: StandIn, count: int) -> None:
    under_test.begin(count)
    for number in range(count):
        with under_test.forward(number):
            gpu.launch(FORWARD_S + (WAITING_S if number == 0 else 0.0))
        with under_test.backward(number):
            gpu.launch(BACKWARD_S + (WAITING_S if number == count - 1 else 0.0))
    gpu.launch(WAITING_S)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_what_a_gpu_computes_in_a_step_is_told_with_the_next_without_its_waiting(count: int):
    gpu, told = StandIn(), list[float]()
    under_test = Computing(gpu, told.append)
    step(under_test, gpu, count)
    assert not told, "nothing is waited for"
    step(under_test, gpu, count)
    assert told == [pytest.approx(count * (FORWARD_S + BACKWARD_S))]


def test_of_a_step_with_one_micro_batch_nothing_is_told():
    gpu, told = StandIn(), list[float]()
    under_test = Computing(gpu, told.append)
    for count in (1, 1, 2, 1, 1):
        step(under_test, gpu, count)
    assert told == [pytest.approx(2 * (FORWARD_S + BACKWARD_S))]


CASES: list[tuple[dict[str, Any], str, bool]] = [
    ({}, "cuda", True),
    ({}, "cpu", False),
    ({"tp": 2}, "cuda", False),
    ({"pp": 2}, "cuda", False),
    ({"zero_stage": 3}, "cuda", False),
    ({"reduce_gradients": "every"}, "cuda", False),
]


@pytest.mark.parametrize(("parallel", "kind", "told"), CASES)
def test_a_gpu_is_timed_where_there_are_passes_without_exchanges(parallel: dict[str, Any], kind: str, told: bool):
    config = Config.model_validate({"parallel": parallel, "train": {"global_batch_size": 32, "micro_batch_size": 1}})
    found = computing_of(config, settle(config, 4), torch.device(kind), StandIn())
    assert (found is not None) == told


class Marking(Host):
    """The CPU, which notes when there is an odd number of marks: a pass is being timed."""

    def __init__(self) -> None:
        self.marks = 0

    def mark(self) -> object:
        self.marks += 1
        return super().mark()


def exchanged(config: Path) -> tuple[int, int, int]:
    """On this rank: passes that were timed, and collectives inside of them and outside."""
    meter, counts = Marking(), [0, 0]

    def counted(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            counts[meter.marks % 2 == 0] += 1
            return collective(*args, **options)

        return call

    names = (GATHER, REDUCE_SCATTER, "all_reduce")
    with (
        mock.patch.multiple(dist, **{name: counted(getattr(dist, name)) for name in names}),
        mock.patch.object(engine, "computing_of", lambda *_: Computing(meter)),
    ):
        train(config)
    return meter.marks // 2, *counts  # type: ignore[return-value]


def test_nothing_is_exchanged_in_the_passes_that_are_timed(tmp_path: Path):
    dataset = write_dataset(tmp_path / "walks")
    small = merged(BASE, {"model": {"layers": 2}, "train": {"micro_batch_size": 2, "steps": 2}}, spread(1, 1))
    for timed, inside, outside in run_ranks(2, exchanged, write_config(tmp_path, dataset, **small)):
        assert timed == 2 * 2 * 3, "of four micro batches three forward and three backward passes, in each of two steps"
        assert inside == 0
        assert outside > 0
