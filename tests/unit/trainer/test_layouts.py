"""Every layout trains what one process would: losses and gradient norms of a plain loop, whatever the schedule and the sharding."""

from collections.abc import Callable, Hashable, Iterator
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from combining import meeting
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from layouts import BASE, STEPS, Lines, Sections, deep, fewest_layers, merged, moved, name_of, spread
from soak import soaked, soaked_after
from trainer_ranks import steps, textbook, trained, write_config

from resilient.worker import load_config

LAYOUTS = list(product((1, 2), repeat=3))  # tp, pp, dp


def variants(pp: int) -> Iterator[Sections]:
    """Every schedule, ZeRO stage and way to compute again that go together."""
    schedules = ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] if pp > 1 else ["1f1b"]
    again: list[dict[str, object]] = [
        {"recompute": "none"},
        {"recompute": "selective"},
        {"recompute": "full"},
        {"recompute": "full", "recompute_every": 2},
    ]
    for schedule, stage, train in product(schedules, (1, 2, 3), again):
        if schedule == "zero_bubble" and stage == 3:
            continue
        yield {"parallel": {"schedule": schedule, "zero_stage": stage}, "train": train}


def variant(schedule: str, stage: int, recompute: str, every: int = 1) -> Sections:
    again: dict[str, object] = {"recompute": recompute} if every == 1 else {"recompute": recompute, "recompute_every": every}
    return {"parallel": {"schedule": schedule, "zero_stage": stage}, "train": again}


# Any two dimensions, and each schedule, ZeRO stage and way to compute again on a layout where it makes a difference.
SAMPLE = [
    ((1, 1, 1), variant("1f1b", 1, "full")),
    ((2, 1, 1), variant("1f1b", 1, "selective")),
    ((1, 1, 2), variant("1f1b", 3, "full", 2)),
    ((2, 1, 2), variant("1f1b", 1, "none")),
    ((1, 2, 1), variant("gpipe", 1, "full")),
    ((1, 2, 2), variant("zero_bubble", 2, "selective")),
    ((1, 2, 2), variant("interleaved_1f1b", 3, "selective")),
]
THREE_DIMENSIONS = (2, 2, 2), variant("1f1b", 2, "full")
EVERYTHING = [(layout, each) for layout in LAYOUTS for each in variants(layout[1])]


def choices(case: tuple[tuple[int, int, int], Sections]) -> list[Hashable]:
    """What a case has of each dimension: sizes, schedule, ZeRO stage, and what is computed again."""
    layout, each = case
    return [*layout, *map(str, each["parallel"].values()), str(each["train"])]


ANY_THREE = meeting(EVERYTHING, choices)


def test_the_sample_of_the_first_tier_has_each_value_where_it_matters():
    def values(cases: list[tuple[tuple[int, int, int], Sections]]) -> set[object]:
        stages = {each["parallel"]["zero_stage"] for layout, each in cases if layout[2] > 1}
        schedules = {each["parallel"]["schedule"] for layout, each in cases if layout[1] > 1}
        again = {tuple(each["train"].items()) for _, each in cases}
        sizes = {pair for layout, _ in cases for pair in combinations(zip(("tp", "pp", "dp"), layout, strict=True), 2)}
        three = {layout for layout, _ in cases if 1 not in layout}
        return sizes | three | stages | schedules | again

    first = [*SAMPLE, THREE_DIMENSIONS]
    assert all(case in EVERYTHING for case in first)
    assert values(first) == values(EVERYTHING)


Run = Callable[..., Lines]


@pytest.fixture(scope="module")
def run(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    def run(ranks: int, *many: Sections, **options: Any) -> Lines:
        config = write_config(tmp_path_factory.mktemp("run"), dataset, **merged(BASE, *many))
        return steps(trained(config, ranks, **options))

    return run


@pytest.fixture(scope="module")
def textbook_lines(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Lines]:
    """What one process gets in so many steps in fp32 with so many layers, from a plain loop; computed once."""

    @cache
    def found(count: int, layers: int) -> Lines:
        config = write_config(tmp_path_factory.mktemp("reference"), dataset, **merged(BASE, long(count), deep(layers)))
        return textbook(load_config(config, []))

    return found


@pytest.fixture(scope="module")
def bf16_lines(run: Run) -> Lines:
    """What one process of this trainer gets in bf16."""
    return run(1, {"train": {"precision": "bf16"}}, deep(2))


def long(count: int) -> Sections:
    return {"train": {"steps": count}}


@pytest.mark.parametrize(("layout", "variant"), SAMPLE, ids=name_of)
def test_every_layout_trains_like_one_process(run: Run, textbook_lines: Callable[[int, int], Lines], layout, variant):
    tp, pp, dp = layout
    layers = fewest_layers(variant)
    found = run(tp * pp * dp, spread(tp, pp), variant, deep(layers))
    assert len(found) == STEPS
    assert found == [pytest.approx(line, rel=1e-5) for line in textbook_lines(STEPS, layers)]


@pytest.fixture(scope="module")
def in_three_dimensions(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Lines, Path]:
    """What eight ranks get, and the checkpoint that they have written at the end."""
    (tp, pp, dp), each = THREE_DIMENSIONS
    directory = tmp_path_factory.mktemp("three")
    config = write_config(directory, dataset, **merged(BASE, spread(tp, pp), each, deep(2)))
    found = steps(trained(config, tp * pp * dp))
    return found, directory / f"run/checkpoints/step-{STEPS:08}"


def test_three_dimensions_together_train_like_one_process(in_three_dimensions: tuple[Lines, Path], textbook_lines):
    found, _ = in_three_dimensions
    assert len(found) == STEPS
    assert found == [pytest.approx(line, rel=1e-5) for line in textbook_lines(STEPS, 2)]


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "variant"), ANY_THREE, ids=name_of)
def test_all_that_goes_together_trains_like_one_process_for_long(run: Run, textbook_lines, layout, variant):
    tp, pp, dp = layout
    found = run(tp * pp * dp, spread(tp, pp), variant, long(20))
    assert len(found) == 20
    assert found == [pytest.approx(line, rel=1e-5) for line in textbook_lines(20, 4)]


BF16 = [(2, 1, 1)]  # the other dimensions, with gradients in bf16 as well, are in test_accumulation.py


@pytest.mark.soak
@pytest.mark.parametrize("layout", [*BF16, *(soaked(each) for each in LAYOUTS if each not in BF16)], ids=name_of)
def test_every_layout_trains_like_one_process_in_bf16(run: Run, bf16_lines: Lines, layout):
    tp, pp, dp = layout
    found = run(tp * pp * dp, spread(tp, pp), {"train": {"precision": "bf16"}}, deep(2))
    assert found == [pytest.approx(line, rel=1e-2) for line in bf16_lines]


TWO_MICRO_BATCHES: Sections = {"train": {"global_batch_size": 8}}
TIED: Sections = {"model": {"tie_embeddings": True, "kv_heads": 2, "bias": True, "norm": "layernorm", "mlp": "gelu"}}
ADAN: Sections = {"optimizer": {"name": "adan"}, "model": {"attention": "auto"}}
LEARNED: Sections = {
    "model": {"position": "learned", "kv_heads": 1},
    "data": {"mask_documents": True, "mask_end_of_text": True, "end_of_text": 7},
}
WSD: Sections = {"optimizer": {"schedule": "wsd"}}


def rising(**ramp: int) -> Sections:
    """Batches that grow."""
    return {"train": {"batch_rampup": ramp}}


# Several kinds at once in the first tier, each by itself and larger in the second.
MODELS: list[Any] = [
    merged(deep(2), TWO_MICRO_BATCHES, TIED, ADAN),
    merged(deep(2), LEARNED, WSD, rising(start=8, increment=4, samples=24), long(4)),  # 8, 8, 12 and 16 samples
    {
        "parallel": {"schedule": "zero_bubble", "virtual_stages": 2, "pp_layers": [1, 2, 1, 1]},
        "model": {"layers": 5},
        "train": {"global_batch_size": 12, "steps": 2},
    },
    soaked(TIED),
    soaked(LEARNED),
    soaked({"model": {"position": "alibi"}, "data": {"mask_documents": True, "end_of_text": 7}}),
    soaked({"model": {"mup_base_hidden": 16, "position": "none"}}),
    soaked(ADAN),
    soaked(merged(WSD, rising(start=8, increment=4, samples=60), {"train": {"micro_batch_size": 2, "steps": 8}})),
    soaked({"parallel": {"sequence_parallel": False}, "model": {"kv_heads": 1, "tie_embeddings": True}}),
    soaked({"parallel": {"schedule": "interleaved_1f1b", "virtual_stages": 3}, "model": {"layers": 7, "tie_embeddings": True}}),
    soaked({"parallel": {"schedule": "zero_bubble", "virtual_stages": 2, "pp_layers": [1, 3, 2, 1]}, "model": {"layers": 7}}),
]


@pytest.mark.parametrize("dp", [1, soaked(2)])
@pytest.mark.parametrize("sections", soaked_after(1, MODELS), ids=name_of)
def test_every_kind_of_model_trains_the_same_in_two_and_three_dimensions(run: Run, sections, dp: int):
    sections = merged(long(STEPS if dp == 1 else 8), sections)
    alone = merged(sections, {"parallel": {"schedule": "1f1b", "virtual_stages": "auto", "pp_layers": "auto"}})
    assert run(4 * dp, spread(2, 2), sections) == [pytest.approx(line, rel=1e-5) for line in run(1, alone)]


@pytest.mark.parametrize(("tp", "ranks"), [(3, 3), soaked(3, 6)])
def test_any_divisor_of_the_heads_is_a_tensor_parallel_size(run: Run, tp: int, ranks: int):
    shape: Sections = {"model": {"hidden": 48, "heads": 12, "kv_heads": 4, "ffn_hidden": 96, "seq_len": 18, "layers": 1}}
    model = merged(shape, TWO_MICRO_BATCHES)
    assert run(ranks, spread(tp, 1), model) == [pytest.approx(line, rel=1e-5) for line in run(1, model)]


@st.composite
def _shapes_and_layouts(draw: st.DrawFn) -> tuple[int, Sections]:
    tp, pp, dp = draw(st.sampled_from([(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 3, 1)]))
    heads = draw(st.sampled_from([2, 4, 6]))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zero_bubble"]))
    model = {
        "heads": heads,
        "kv_heads": draw(st.sampled_from([each for each in (1, 2, 3, 6) if heads % each == 0])),
        "hidden": heads * draw(st.sampled_from([4, 6, 10])),
        "ffn_hidden": 2 * draw(st.integers(8, 30)),
        "layers": draw(st.integers(pp, 6)),
        "seq_len": 2 * draw(st.integers(2, 12)),
        "vocab_multiple": draw(st.sampled_from([1, 7, 64])),
        "tie_embeddings": draw(st.booleans()),
        "norm": draw(st.sampled_from(["rmsnorm", "layernorm"])),
        "mlp": draw(st.sampled_from(["swiglu", "gelu"])),
    }
    stage = draw(st.sampled_from([1, 2] if schedule == "zero_bubble" else [1, 2, 3]))
    train = {"steps": STEPS, "micro_batch_size": draw(st.sampled_from([2, 4]))}
    parallel = {"tp": tp, "pp": pp, "schedule": schedule, "zero_stage": stage, "sequence_parallel": draw(st.booleans())}
    return tp * pp * dp, {"model": model, "train": train, "parallel": parallel}


@pytest.mark.parametrize("count", [2, soaked(30)])
def test_drawn_shapes_and_layouts_train_like_a_textbook(dataset: Path, tmp_path_factory: pytest.TempPathFactory, count: int):
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]

    @settings(max_examples=count, deadline=None, suppress_health_check=checks, derandomize=True, phases=[Phase.generate])
    @given(_shapes_and_layouts())
    def check(case: tuple[int, Sections]) -> None:
        ranks, sections = case
        config = write_config(tmp_path_factory.mktemp("drawn"), dataset, **merged(BASE, sections))
        expected = [pytest.approx(line, rel=1e-5) for line in textbook(load_config(config, ["parallel={}"]))]
        assert steps(trained(config, ranks)) == expected

    check()


# -- checkpoints ---------------------------------------------------------------------------------------------------------


TIED_ADAN: Sections = {"model": {"tie_embeddings": True, "kv_heads": 1}, "optimizer": {"name": "adan"}}
MUON: Sections = {"optimizer": {"name": "muon", "lr": 5e-3}, "model": {"kv_heads": 1}}
SHORTEST_WAY = [(1, 1, 2), (2, 1, 1), (1, 2, 1), (1, 1, 1), (1, 1, 2), (1, 1, 1)]  # what an update takes in shows in the next step
SHORT_WAY = [(1, 2, 2), (4, 1, 1), (1, 1, 1), (1, 2, 2)]
LONG_WAY = [(2, 2, 2), (1, 1, 1), (2, 2, 2), (4, 1, 2), (2, 2, 2), (1, 4, 1), (2, 2, 2)]


@pytest.mark.parametrize(
    ("layouts", "each", "sections"),
    [
        (SHORTEST_WAY, 1, merged(TIED_ADAN, deep(2), TWO_MICRO_BATCHES)),
        soaked(SHORT_WAY, 2, TIED_ADAN),
        soaked(SHORT_WAY, 2, MUON),
        soaked(LONG_WAY, 4, {}),
        soaked(LONG_WAY, 4, TIED_ADAN),
    ],
    ids=name_of,
)
def test_a_checkpoint_moves_to_other_layouts_and_back(dataset: Path, tmp_path: Path, layouts, each: int, sections: Sections):
    straight = moved(dataset, tmp_path / "straight", [(1, 1, 1)], each * len(layouts), sections)
    found = moved(dataset, tmp_path / "moved", layouts, each, sections)
    assert len(found) == each * len(layouts)
    assert found == [pytest.approx(line, rel=1e-5) for line in straight]


def test_the_checkpoint_of_a_3d_layout_is_open_to_any_zarr_client(in_three_dimensions: tuple[Lines, Path]):
    """Plain zarr and tensorstore, with nothing of this project's, read what eight ranks have written."""
    import tensorstore

    _, path = in_three_dimensions
    group = zarr.open_group(path, mode="r")
    names = [name for name, member in group.members(max_depth=None) if isinstance(member, zarr.Array)]
    assert len(names) > 20
    assert {name.split("/")[0] for name in names} == {"model", "optimizer", "random"}
    for name in names:
        ours = group[name][...]
        where = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path / name)}}
        theirs = tensorstore.open(where, open=True).result().read().result()
        assert np.array_equal(ours, theirs), name
        assert ours.any() or "exp_avg" in name, name
    assert group["model/blocks.attention.query.weight"].shape[0] == 2  # both stages' layers are one array


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "stage", "layers", "count"),
    [
        ((2, 1, 2), 3, 1, 3),
        soaked((2, 1, 2), 3, 4, 6),
        soaked((1, 1, 2), 1, 4, 6),
        soaked((1, 1, 3), 3, 4, 6),  # the rows of no matrix come out even
        soaked((2, 1, 1), 1, 4, 6),
        soaked((2, 2, 2), 2, 4, 6),
        soaked((1, 2, 2), 1, 4, 6),
    ],
    ids=name_of,
)
def test_muon_orthogonalises_whole_matrices_however_they_are_spread(run: Run, layout, stage, layers: int, count: int):
    tp, pp, dp = layout
    batch: Sections = {"train": {"global_batch_size": 12 * dp if dp == 3 else 16, "micro_batch_size": 4}}
    sections = merged(MUON, long(count), deep(layers), batch)
    found = run(tp * pp * dp, sections, spread(tp, pp, zero_stage=stage))
    assert found == [pytest.approx(line, rel=1e-5) for line in run(1, sections)]
    assert found != run(1, merged(sections, {"optimizer": {"name": "adamw"}}))


@pytest.mark.parametrize(
    ("ranks", "tp", "pp", "sections"),
    [
        soaked(2, 1, 1, {}),
        soaked(4, 2, 1, {"optimizer": {"name": "muon"}}),
        (2, 2, 1, {"parallel": {"sequence_parallel": False}, "model": {"layers": 1}}),
        soaked(2, 2, 1, {"parallel": {"sequence_parallel": False}}),
        soaked(2, 1, 2, {"train": {"recompute": "full"}}),
        soaked(8, 2, 2, {}),
        soaked(4, 2, 1, {"parallel": {"sequence_parallel": False}}),
        soaked(4, 1, 2, {"train": {"recompute": "full"}}),
    ],
    ids=name_of,
)
def test_on_the_same_layout_a_new_process_goes_on_to_the_last_bit_with_dropout(
    dataset: Path, tmp_path: Path, ranks: int, tp: int, pp: int, sections: Sections
):
    model: Sections = {"model": {"layers": 2, "dropout": 0.1, "attention_dropout": 0.1}}
    dropout = merged(model, TWO_MICRO_BATCHES, sections, spread(tp, pp))
    straight = write_config(tmp_path / "straight", dataset, **merged(BASE, dropout))
    broken = write_config(tmp_path / "broken", dataset, **merged(BASE, dropout))
    whole = steps(trained(straight, ranks))
    first = steps(trained(broken, ranks, "train.steps=2"))
    assert first + steps(trained(broken, ranks)) == whole
    without: Sections = {"model": {"dropout": 0.0, "attention_dropout": 0.0}}
    plain = write_config(tmp_path / "without", dataset, **merged(BASE, dropout, without, long(1)))
    assert steps(trained(plain, ranks)) != first[:1]
