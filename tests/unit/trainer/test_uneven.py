"""Replicas that do not divide the global batch: the same numbers as one process gets, and the same bits each time."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from bad_batches import broken
from layouts import BASE, Lines, Sections, deep, fewest_layers, merged, moved, name_of, spread
from soak import soaked
from trainer_ranks import run_ranks, steps, textbook, trained, write_config

from resilient.worker import load_config

Layout = tuple[int, int, int]  # tp, pp, dp

EIGHT: Sections = merged(BASE, {"train": {"micro_batch_size": 2}})  # micro batches
STEPS = 2  # the second one's loss shows the first one's update


def parallel(schedule: str, stage: int) -> Sections:
    return {"parallel": {"schedule": schedule, "zero_stage": stage}}


def everything() -> Iterator[tuple[Layout, Sections]]:
    """3, 5, 6 and 7 replicas, at every ZeRO stage, in two dimensions and in each schedule."""
    for dp, stage in product((3, 5, 6, 7), (1, 2, 3)):
        yield (1, 1, dp), parallel("1f1b", stage)
        if dp == 3:
            yield (2, 1, dp), parallel("1f1b", stage)
            yield (2, 2, dp), parallel("1f1b", stage)
        for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"):
            if schedule != "zero_bubble" or stage < 3:
                yield (1, 2, dp), parallel(schedule, stage)


EVERYTHING = list(everything())
SAMPLE = [
    ((1, 1, 3), parallel("1f1b", 1)),
    ((1, 2, 3), parallel("gpipe", 3)),
    ((1, 2, 3), parallel("interleaved_1f1b", 1)),
    ((1, 2, 3), parallel("zero_bubble", 2)),
]


@pytest.fixture(scope="module")
def expected(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Lines]:
    """What one process gets in so many steps with so many layers, from a plain loop."""

    @cache
    def found(count: int, layers: int) -> Lines:
        sections = merged(EIGHT, {"train": {"steps": count}}, deep(layers))
        return textbook(load_config(write_config(tmp_path_factory.mktemp("reference"), dataset, **sections), []))

    return found


def test_the_sample_of_the_first_tier_is_of_everything_and_has_each_schedule_and_zero_stage():
    assert all(case in EVERYTHING for case in SAMPLE)
    for key in ("schedule", "zero_stage"):
        assert {each["parallel"][key] for _, each in SAMPLE} == {each["parallel"][key] for _, each in EVERYTHING}


def check(dataset: Path, directory: Path, layout: Layout, sections: Sections, expected: Lines) -> None:
    tp, pp, dp = layout
    count: Sections = {"train": {"steps": len(expected)}}
    config = write_config(directory, dataset, **merged(EIGHT, spread(tp, pp), sections, count))
    assert steps(trained(config, tp * pp * dp)) == [pytest.approx(line, rel=1e-5) for line in expected]


@pytest.mark.parametrize(("layout", "sections"), SAMPLE, ids=name_of)
def test_replicas_that_do_not_divide_the_batch_train_like_one_process(
    dataset: Path, tmp_path: Path, expected: Callable[[int, int], Lines], layout: Layout, sections: Sections
):
    layers = fewest_layers(sections)
    check(dataset, tmp_path, layout, merged(sections, deep(layers)), expected(STEPS, layers))


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "sections"), EVERYTHING, ids=name_of)
def test_any_number_of_replicas_trains_like_one_process_for_long(
    dataset: Path, tmp_path: Path, expected: Callable[[int, int], Lines], layout: Layout, sections: Sections
):
    check(dataset, tmp_path, layout, sections, expected(20, 4))


def told(config: Path, ranks: int) -> list[tuple[str, int, float]]:
    """Losses of training and of validation."""
    lines = [line for line in trained(config, ranks) if line["event"] in ("step", "validation")]
    return [(line["event"], line["step"], line.get("val_loss", line.get("loss"))) for line in lines]


@pytest.mark.parametrize("stage", [2, soaked(1), soaked(3)])
@pytest.mark.parametrize("pp", [1, soaked(2)])
def test_tokens_without_a_target_and_validation_weigh_the_same(dataset: Path, tmp_path: Path, stage: int, pp: int):
    ragged: Sections = {
        "data": {"mask_documents": True, "mask_end_of_text": True, "end_of_text": 0},
        "train": {"steps": 3, "global_batch_size": 8, "eval_interval": 2, "eval_iters": 2},
    }
    sections = merged(EIGHT, deep(2), ragged)
    alone = told(write_config(tmp_path / "alone", dataset, **sections), 1)
    config = write_config(tmp_path / "three", dataset, **merged(sections, spread(1, pp, zero_stage=stage)))
    found = told(config, 3 * pp)
    assert [line[:2] for line in found] == [line[:2] for line in alone]
    assert [line[2] for line in found] == pytest.approx([line[2] for line in alone], rel=1e-5)


@pytest.mark.parametrize("stage", [1, soaked(2), soaked(3)])
@pytest.mark.parametrize("pp", [1, soaked(2)])
def test_a_replica_without_a_micro_batch_takes_part(dataset: Path, tmp_path: Path, stage: int, pp: int):
    ramp: Sections = {"train": {"steps": 4, "batch_rampup": {"start": 2 * pp, "increment": 2, "samples": 12}}}
    sections = merged(EIGHT, deep(2), ramp)
    alone = steps(trained(write_config(tmp_path / "alone", dataset, **sections), 1))
    config = write_config(tmp_path / "three", dataset, **merged(sections, spread(1, pp, zero_stage=stage)))
    assert steps(trained(config, 3 * pp)) == [pytest.approx(line, rel=1e-5) for line in alone]


WAY = [(1, 1, 4), (1, 1, 3), (1, 1, 4)]
LONG_WAY = [(1, 1, 4), (1, 1, 3), (1, 1, 4), (1, 1, 1), (1, 1, 4), (1, 1, 3), (1, 1, 4)]
WITH_PIPELINES = [(1, 2, 4), (1, 2, 3), (1, 2, 4)]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layouts", "stage", "each"),
    [(WAY, 1, 1), *(soaked(way, stage, 2) for way in (WAY, LONG_WAY, WITH_PIPELINES) for stage in (1, 2, 3))],
    ids=str,
)
def test_a_checkpoint_goes_to_fewer_replicas_and_back_with_the_same_bits_each_time(
    dataset: Path, tmp_path: Path, expected: Callable[[int, int], Lines], layouts: list[Layout], stage: int, each: int
):
    sections = merged(EIGHT, deep(2), spread(1, 1, zero_stage=stage))
    found = moved(dataset, tmp_path / "moved", layouts, each, sections)
    assert found == [pytest.approx(line, rel=1e-5) for line in expected(each * len(layouts), 2)]
    assert moved(dataset, tmp_path / "again", layouts, each, sections) == found


@pytest.mark.parametrize("zero_stage", [1, soaked(2), soaked(3)])
def test_a_new_process_of_uneven_replicas_goes_on_to_the_last_bit_with_dropout(dataset: Path, tmp_path: Path, zero_stage: int):
    dropout = merged(EIGHT, spread(1, 1, zero_stage=zero_stage), {"model": {"layers": 2, "dropout": 0.1}})
    whole = steps(trained(write_config(tmp_path / "straight", dataset, **dropout), 3))
    config = write_config(tmp_path / "broken", dataset, **dropout)
    first = steps(trained(config, 3, "train.steps=2"))
    assert first + steps(trained(config, 3)) == whole


def test_a_bad_batch_is_skipped_by_uneven_replicas_alike(dataset: Path, tmp_path: Path):
    config = write_config(tmp_path, dataset, **merged(EIGHT, deep(2)))
    lines = [line for line in run_ranks(3, broken, config, {2: 2})[0] if line["event"] == "step"]
    assert [line.get("skipped") for line in lines] == [None, "not_finite", None]
    assert [line["samples"] for line in lines] == [16, 32, 48]
