"""Hybrid sharding: groups of ranks that hold the same shards train what one process would, and their checkpoints go anywhere."""

from collections.abc import Callable, Hashable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from combining import meeting
from layouts import Lines, Sections, merged, name_of
from soak import soaked, soaked_after
from trainer_ranks import VOCABULARY, run_ranks, steps, textbook, trained, write_config

from resilient.worker import load_config, settle
from trainer.parallel.data import REDUCE_SCATTER

STEPS = 2  # the second one's loss shows the first one's update
BASE: Sections = {
    "model": {"layers": 2, "hidden": 32, "heads": 4, "seq_len": 16, "init_std": 0.1, "attention": "math"},
    "train": {"steps": STEPS, "global_batch_size": 16, "micro_batch_size": 2, "precision": "fp32", "eval_interval": 0},
    "optimizer": {"lr": 2e-3, "clip_grad": 0.3, "warmup_samples": 24, "decay_samples": 400},
    "checkpoint": {"every_steps": 1000},
}


Spread = tuple[int, int, int, int]  # pp, dp_replicate, dp_shard, tp


def parallel(spread: Spread, **more: object) -> Sections:
    pp, replicate, shard, tp = spread
    return {"parallel": {"tp": tp, "pp": pp, "dp_replicate": replicate, "dp_shard": shard, **more}}


def ranks_of(spread: Spread) -> int:
    pp, replicate, shard, tp = spread
    return pp * replicate * shard * tp


@pytest.fixture(scope="module")
def run(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Lines]:
    def run(ranks: int, *many: Sections) -> Lines:
        return steps(trained(write_config(tmp_path_factory.mktemp("run"), dataset, **merged(BASE, *many)), ranks))

    return run


@pytest.fixture(scope="module")
def textbook_lines(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Lines]:
    @cache
    def found() -> Lines:
        return textbook(load_config(write_config(tmp_path_factory.mktemp("reference"), dataset, **BASE), []))

    return found


# Every ZeRO stage and way to reduce, each other dimension beside hybrid sharding, and groups of one rank.
SAMPLE: list[tuple[Spread, Sections]] = [
    ((1, 2, 2, 1), {"parallel": {"zero_stage": 1}}),
    ((1, 2, 2, 1), {"parallel": {"zero_stage": 3}}),
    ((1, 2, 1, 2), {"parallel": {"zero_stage": 2}}),
    ((2, 2, 1, 1), {"parallel": {"zero_stage": 2, "reduce_gradients": "every"}}),
]


def everything() -> Iterator[tuple[Spread, Sections]]:
    spreads: list[Spread] = [(1, 2, 2, 1), (1, 4, 1, 1), (1, 2, 1, 2), (1, 2, 2, 2), (2, 2, 1, 1), (2, 2, 2, 1), (2, 2, 2, 2)]
    for spread, stage, reduce in product(spreads, (1, 2, 3), ("last", "every")):
        schedules = ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] if spread[0] > 1 else ["1f1b"]
        for schedule in schedules:
            if (schedule, stage) != ("zero_bubble", 3):
                layers = {"model": {"layers": 4}} if schedule in ("interleaved_1f1b", "zero_bubble") else {}
                yield spread, {"parallel": {"zero_stage": stage, "reduce_gradients": reduce, "schedule": schedule}, **layers}


def choices(case: tuple[Spread, Sections]) -> list[Hashable]:
    """What a case has of each dimension: sizes, ZeRO stage, when gradients are reduced, and the schedule."""
    spread, sections = case
    return [*spread, *map(str, sections["parallel"].values())]


@pytest.mark.parametrize(("spread", "sections"), soaked_after(1, SAMPLE), ids=name_of)
def test_groups_that_hold_the_same_shards_train_like_one_process(run, textbook_lines, spread: Spread, sections: Sections):
    found = run(ranks_of(spread), parallel(spread), sections)
    assert found == [pytest.approx(line, rel=1e-5) for line in textbook_lines()]


@pytest.mark.soak
@pytest.mark.parametrize(("spread", "sections"), meeting(list(everything()), choices), ids=name_of)
def test_all_that_goes_together_with_hybrid_sharding_trains_like_one_process(run, spread: Spread, sections: Sections):
    alone: Sections = {"model": sections.get("model", {})}
    found = run(ranks_of(spread), parallel(spread), sections)
    assert found == [pytest.approx(line, rel=1e-5) for line in run(1, alone)]


MUON: Sections = {"optimizer": {"name": "muon", "lr": 5e-3}, "model": {"kv_heads": 1}}
# Five micro batches of four replicas.
UNEVEN: Sections = {"train": {"global_batch_size": 10}, "data": {"mask_end_of_text": True, "end_of_text": 7}}
MODELS: list[Any] = [
    ((1, 2, 2, 1), merged(MUON, UNEVEN)),
    ((2, 2, 1, 1), {"model": {"tie_embeddings": True}, "optimizer": {"name": "adan"}}),
    soaked((1, 2, 2, 1), MUON),
    soaked((1, 2, 2, 1), UNEVEN),
]


@pytest.mark.parametrize(("spread", "sections"), MODELS, ids=name_of)
def test_other_optimizers_tied_embeddings_and_uneven_shares_come_to_the_same(run, spread: Spread, sections: Sections):
    alone = run(1, sections)
    assert run(ranks_of(spread), parallel(spread), sections) == [pytest.approx(line, rel=1e-5) for line in alone]


def _reduced(config: Path) -> set[tuple[str, str]]:
    """What is summed up over two ranks in a step, and in which type."""
    from unittest import mock

    import torch.distributed as dist

    from trainer.loop import run

    found: set[tuple[str, str]] = set()

    def watched(name: str) -> Callable[..., Any]:
        function = getattr(dist, name)

        def call(*args: Any, **options: Any) -> Any:
            if options.get("group") is not None and dist.get_world_size(options["group"]) == 2:
                found.add((name, str(args[0].dtype)))
            return function(*args, **options)

        return call

    names = ("all_reduce", REDUCE_SCATTER)
    with mock.patch.multiple(dist, **{name: watched(name) for name in names}):
        run(load_config(config, []))
    return found


def test_gradients_of_bf16_are_summed_up_in_fp32_within_groups_and_between_them(dataset: Path, tmp_path: Path):
    sections: Sections = {"train": {"precision": "bf16", "grad_dtype": "bf16", "steps": 1}}
    config = write_config(tmp_path, dataset, **merged(BASE, parallel((1, 2, 2, 1)), sections))
    for found in run_ranks(4, _reduced, config):
        assert found == {(REDUCE_SCATTER, "torch.float32"), ("all_reduce", "torch.float32")}


def _kept(config: Path) -> dict[str, tuple[int, bytes]]:
    """Of each parameter, how many numbers of it this rank keeps, and all of them."""
    import torch
    import torch.distributed as dist

    from trainer.attention import Kernel
    from trainer.parallel import build_stages, make_ranks
    from trainer.shape import shape_of
    from trainer.weights import initialize

    dist.init_process_group("gloo")
    loaded = load_config(config, [])
    device = torch.device("cpu")
    ranks = make_ranks(device, settle(loaded, dist.get_world_size()))
    (model,) = build_stages(loaded, shape_of(loaded, VOCABULARY), Kernel.MATH, ranks, device)
    initialize(model, 11)
    return {
        name: (parameter.to_local().numel(), parameter.full_tensor().detach().numpy().tobytes())
        for name, parameter in model.named_parameters()
    }


def test_a_rank_keeps_what_its_group_of_shards_leaves_it(dataset: Path, tmp_path: Path):
    config = write_config(tmp_path, dataset, **merged(BASE, parallel((1, 2, 2, 1))))
    first, *others = run_ranks(4, _kept, config)
    assert all(2 * kept * 4 == len(whole) for kept, whole in first.values())
    assert all(each == first for each in others)


# -- checkpoints ---------------------------------------------------------------------------------------------------------

ZERO_3: tuple[Spread, int] = ((1, 1, 4, 1), 3)
HYBRID: tuple[Spread, int] = ((1, 2, 2, 1), 2)
TP_PP: tuple[Spread, int] = ((2, 1, 1, 2), 1)
HYBRID_TP: tuple[Spread, int] = ((1, 2, 1, 2), 3)


@pytest.mark.soak
@pytest.mark.parametrize(
    "way", [(HYBRID, ZERO_3, HYBRID_TP), soaked((TP_PP, HYBRID, ZERO_3, HYBRID_TP, TP_PP))], ids=["short", "long"]
)
def test_a_checkpoint_goes_from_hybrid_sharding_to_other_layouts_and_back(dataset: Path, tmp_path: Path, way):
    sections: Sections = {"model": {"tie_embeddings": True, "kv_heads": 2}, "train": {"global_batch_size": 8}}
    config = write_config(tmp_path / "moved", dataset, **merged(BASE, sections))
    found: Lines = []
    for number, (spread, stage) in enumerate(way, 1):
        keys = {**parallel(spread)["parallel"], "zero_stage": stage}
        overrides = [f"parallel.{key}={value}" for key, value in keys.items()]
        found += steps(trained(config, ranks_of(spread), *overrides, f"train.steps={number}"))
    straight = write_config(tmp_path / "straight", dataset, **merged(BASE, sections, {"train": {"steps": len(way)}}))
    assert found == [pytest.approx(line, rel=1e-5) for line in steps(trained(straight, 1))]


@pytest.mark.soak
def test_a_new_process_goes_on_to_the_last_bit_with_dropout(dataset: Path, tmp_path: Path):
    sections = merged(BASE, parallel((1, 2, 2, 1)), {"model": {"dropout": 0.1}, "train": {"steps": 4}})
    straight = write_config(tmp_path / "straight", dataset, **sections)
    broken = write_config(tmp_path / "broken", dataset, **sections)
    first = steps(trained(broken, 4, "train.steps=2"))
    assert first + steps(trained(broken, 4)) == steps(trained(straight, 4))
