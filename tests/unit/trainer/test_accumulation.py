"""How gradients add up over the micro batches of a step: in the last backward pass or in every one, in fp32 or bf16."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from layouts import BASE, Lines, Sections, merged, name_of, reduction, spread
from soak import soaked, soaked_after
from trainer_ranks import GATHER, VOCABULARY, run_ranks, steps, textbook, train, trained, write_config

from resilient.worker import load_config, settle
from trainer.memory import memory
from trainer.parallel.data import REDUCE_SCATTER, sharded_groups
from trainer.shape import shape_of

Layout = tuple[int, int, int]  # tp, pp, dp

SMALL: Sections = merged(BASE, {"model": {"layers": 2}, "train": {"micro_batch_size": 2, "steps": 3}})


@pytest.fixture(scope="module")
def expected(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Lines]:
    """What one process gets from a plain loop."""

    @cache
    def found(layers: int) -> Lines:
        sections = merged(SMALL, {"model": {"layers": layers}})
        return textbook(load_config(write_config(tmp_path_factory.mktemp("reference"), dataset, **sections), []))

    return found


EVERY = [
    ((1, 1, 3), reduction("every")),  # which do not divide the eight micro batches
    ((1, 2, 2), reduction("every")),
    ((1, 2, 2), reduction("every", schedule="zero_bubble")),
    soaked((1, 1, 2), reduction("every")),
    soaked((1, 2, 2), reduction("every", schedule="interleaved_1f1b", stage=3)),
    soaked((1, 2, 3), reduction("every", schedule="gpipe")),
    soaked((2, 2, 2), reduction("every", stage=3)),
    soaked((1, 2, 3), reduction("every", schedule="zero_bubble", stage=2)),
    soaked((1, 1, 3), reduction("last", stage=3)),
    soaked((1, 1, 3), reduction("last", stage=2)),
    soaked((2, 1, 2), reduction("every")),
]


@pytest.mark.parametrize(("layout", "sections"), soaked_after(2, EVERY), ids=name_of)
def test_gradients_reduced_in_every_pass_are_those_of_one_process(
    dataset: Path, tmp_path: Path, expected: Callable[[int], Lines], layout: Layout, sections: Sections
):
    tp, pp, dp = layout
    layers = 4 if sections["parallel"]["schedule"] in ("interleaved_1f1b", "zero_bubble") else 2
    config = write_config(tmp_path, dataset, **merged(SMALL, {"model": {"layers": layers}}, spread(tp, pp), sections))
    found = steps(trained(config, tp * pp * dp))
    assert found == [pytest.approx(line, rel=1e-5) for line in expected(layers)]


BF16 = {"train": {"precision": "bf16"}}
PATTERNS: list[Any] = [((1, 2, 2), "last"), soaked((1, 1, 2), "last"), soaked((1, 2, 2), "every"), soaked((2, 2, 2), "last")]


@pytest.mark.parametrize(("layout", "reduce"), PATTERNS, ids=name_of)
def test_bf16_gradients_are_close_to_one_process_on_any_layout(dataset: Path, tmp_path: Path, layout: Layout, reduce: str):
    tp, pp, dp = layout
    alone = steps(trained(write_config(tmp_path / "alone", dataset, **merged(SMALL, BF16)), 1))
    config = write_config(tmp_path / "many", dataset, **merged(SMALL, spread(tp, pp), reduction(reduce, "bf16"), BF16))
    assert steps(trained(config, tp * pp * dp)) == [pytest.approx(line, rel=1e-2) for line in alone]


@pytest.mark.soak
@pytest.mark.parametrize("count", [40, soaked(200)])
def test_bf16_gradients_train_like_fp32_ones(dataset: Path, tmp_path: Path, count: int):
    long: Sections = {
        "model": {"layers": 1, "attention": "math"},
        "train": {"steps": count, "global_batch_size": 16, "micro_batch_size": 4, "precision": "bf16"},
        "optimizer": {"lr": 1e-3, "decay_samples": 3200},
    }
    found = {}
    for dtype in ("fp32", "bf16"):
        config = write_config(tmp_path / dtype, dataset, **merged(long, reduction("last", dtype)))
        found[dtype] = [line[1] for line in steps(trained(config, 1))]
    assert found["bf16"] == pytest.approx(found["fp32"], rel=1e-2)
    assert found["bf16"] != found["fp32"]  # they are added up in another type
    assert found["fp32"][-1] < 0.95 * found["fp32"][0]


# -- what is held --------------------------------------------------------------------------------------------------------


def held(config: Path) -> tuple[int, int]:
    """This pipeline rank, and the most bytes of gradients that it holds between two backward passes of a step."""
    from torch.distributed.pipelining import PipelineStage

    most = 0
    backward = PipelineStage.backward_one_chunk

    def bytes_of(parameter: Any) -> int:
        whole = getattr(parameter, "_unsharded_param", None)
        grads = [parameter.unsharded_accumulated_grad, None if whole is None else whole.grad, parameter.sharded_param.grad]
        return sum((each.to_local() if hasattr(each, "to_local") else each).nbytes for each in grads if each is not None)

    def measured(self: PipelineStage, *args: Any, **options: Any) -> Any:
        nonlocal most
        found = backward(self, *args, **options)
        most = max(most, sum(bytes_of(parameter) for group in sharded_groups(self.submod) for parameter in group.fsdp_params))
        return found

    with mock.patch.object(PipelineStage, "backward_one_chunk", measured):
        train(config)
    return load_config(config, []).parallel.pp * int(os.environ["RANK"]) // int(os.environ["WORLD_SIZE"]), most


TWIN: Sections = merged(
    SMALL,
    spread(1, 2),
    {"train": {"micro_batch_size": 2, "precision": "bf16", "steps": 2}, "model": {"layers": 4}},
)  # as the 13.6B run: two pipeline stages, six micro batches for each replica
COMBINATIONS = [
    ("every", "fp32", 2),
    ("last", "bf16", 2),
    soaked("every", "fp32", 4),
    soaked("last", "fp32", 4),
    soaked("last", "bf16", 4),
    soaked("every", "bf16", 4),
]


@pytest.mark.parametrize(("reduce", "dtype", "dp"), soaked_after(1, COMBINATIONS))
def test_between_micro_batches_gradients_cost_what_the_plan_says(dataset: Path, tmp_path: Path, reduce: str, dtype: str, dp: int):
    path = write_config(tmp_path, dataset, **merged(TWIN, {"train": {"global_batch_size": 12 * dp}}, reduction(reduce, dtype)))
    config = load_config(path, [])
    layout = settle(config, 2 * dp)
    assert (layout.pp, layout.dp, layout.accumulation) == (2, dp, 6)
    found = run_ranks(2 * dp, held, path)
    for pp_rank in (0, 1):
        planned = memory(config, shape_of(config, VOCABULARY), layout, pp_rank)
        kept = planned.accumulated or planned.gradients
        assert max(size for rank, size in found if rank == pp_rank) == pytest.approx(kept, rel=0.05)


# -- what is exchanged ---------------------------------------------------------------------------------------------------


def exchanged(config: Path) -> list[tuple[int, int]]:
    """On this rank, of each step: all-gathers of parameters, and reductions of gradients."""
    from trainer.loop import Trainer

    found: list[tuple[int, int]] = []
    counts = {"gather": 0, "reduce": 0}
    whole, gather, reduce = Trainer._gradients, getattr(dist, GATHER), getattr(dist, REDUCE_SCATTER)

    def counted(kind: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            counts[kind] += 1
            return collective(*args, **options)

        return call

    def step(self: Trainer, size: int) -> Any:
        counts.update(gather=0, reduce=0)
        result = whole(self, size)
        found.append((counts["gather"], counts["reduce"]))
        return result

    with (
        mock.patch.object(dist, GATHER, counted("gather", gather)),
        mock.patch.object(dist, REDUCE_SCATTER, counted("reduce", reduce)),
        mock.patch.object(Trainer, "_gradients", step),
    ):
        train(config)
    return found


LAYERS, PASSES = 2, 4
GROUPS = LAYERS + 1  # each layer, and what is around them

EXCHANGES = [
    (reduction("last", stage=1), 1, GROUPS, GROUPS),
    (reduction("every", stage=1), 1, GROUPS, PASSES * GROUPS),
    soaked(reduction("auto", stage=2), 1, GROUPS, PASSES * GROUPS),
    soaked(reduction("last", "bf16", stage=1), 1, GROUPS, GROUPS),
    soaked(reduction("last", stage=1), 2, LAYERS // 2 + 1, LAYERS // 2 + 1),
    (reduction("every", stage=2), 2, LAYERS // 2 + 1, PASSES * (LAYERS // 2 + 1)),
]


@pytest.mark.parametrize(("sections", "pp", "gathers", "reductions"), soaked_after(2, EXCHANGES), ids=name_of)
def test_parameters_are_gathered_once_a_step_whatever_the_accumulation(
    dataset: Path, tmp_path: Path, sections: Sections, pp: int, gathers: int, reductions: int
):
    small = merged(SMALL, {"train": {"precision": "bf16", "steps": 2}}, spread(1, pp), sections)
    for counts in run_ranks(2 * pp, exchanged, write_config(tmp_path, dataset, **small)):
        assert counts[1:] == [(gathers, reductions)]  # in the first step, a pipeline also tries out what its stages hand on


def reduced(config: Path) -> list[tuple[int, int]]:
    """On this rank of a pipeline, of each step: reductions of gradients, and those of them that begin within a backward pass."""
    from torch.distributed.pipelining import PipelineStage

    from trainer.engine import Pipelined

    found: list[tuple[int, int]] = []
    whole, reduce = Pipelined.train, getattr(dist, REDUCE_SCATTER)
    passes = ("backward_one_chunk", "backward_weight_one_chunk")
    inside, begun = 0, []

    def within(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal inside
            inside += 1
            result = run(*args, **options)
            inside -= 1
            return result

        return call

    def counted(*args: Any, **options: Any) -> Any:
        begun.append(inside > 0)
        return reduce(*args, **options)

    def step(self: Pipelined, *args: Any) -> Any:
        begun.clear()
        result = whole(self, *args)
        found.append((len(begun), sum(begun)))
        return result

    with ExitStack() as patches:
        for name in passes:
            patches.enter_context(mock.patch.object(PipelineStage, name, within(getattr(PipelineStage, name))))
        patches.enter_context(mock.patch.object(dist, REDUCE_SCATTER, counted))
        patches.enter_context(mock.patch.object(Pipelined, "train", step))
        train(config)
    return found


OVERLAPPED = [
    (reduction("last", schedule="1f1b"), 1),
    (reduction("last", schedule="zero_bubble", stage=2), 1),
    soaked(reduction("last", schedule="interleaved_1f1b"), 1),
    soaked(reduction("last", schedule="interleaved_1f1b", stage=3), 1),
    soaked(reduction("last", schedule="gpipe"), 1),
    soaked(reduction("every", schedule="zero_bubble"), PASSES),
]


@pytest.mark.parametrize(("sections", "passes"), soaked_after(1, OVERLAPPED), ids=name_of)
def test_under_a_pipeline_reductions_begin_within_the_last_backward_pass(
    dataset: Path, tmp_path: Path, sections: Sections, passes: int
):
    model: Sections = {"model": {"layers": 4}, "train": {"steps": 2}}
    config = write_config(tmp_path, dataset, **merged(SMALL, model, spread(1, 2), sections))
    times = passes * 3  # of each of a rank's two layers, and of the embedding or the head
    assert run_ranks(4, reduced, config) == [[(times, times)] * 2] * 4
