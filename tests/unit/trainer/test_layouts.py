"""Every layout trains what one process would: losses and gradient norms of a plain loop, whatever the schedule and the sharding."""

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from trainer_ranks import steps, textbook, trained, write_config, write_dataset

from resilient.worker import load_config

Sections = dict[str, dict[str, object]]

# Large enough at the start that every weight has a gradient worth the name, and a rate that amplifies no rounding.
BASE: Sections = {
    "model": {"layers": 4, "hidden": 32, "heads": 4, "seq_len": 16, "init_std": 0.1, "attention": "math"},
    "train": {"steps": 8, "global_batch_size": 16, "micro_batch_size": 4, "precision": "fp32", "eval_interval": 0},
    "optimizer": {"lr": 2e-3, "clip_grad": 0.3, "warmup_samples": 24, "decay_samples": 400},
    "checkpoint": {"every_steps": 1000},
}
LAYOUTS = list(product((1, 2), repeat=3))  # tp, pp, dp


def merged(*many: Sections) -> Sections:
    found: Sections = {}
    for sections in many:
        for name, values in sections.items():
            found[name] = {**found.get(name, {}), **values}
    return found


def spread(tp: int, pp: int, **more: object) -> Sections:
    return {"parallel": {"tp": tp, "pp": pp, **more}}


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


def name_of(value: object) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return " ".join(str(each) for section in value.values() for each in section.values()) if isinstance(value, dict) else str(value)


def some(layout: tuple[int, int, int], everything: bool) -> list[Sections]:
    """All variants, or of a fair sample each value of each kind at least once."""
    found = list(variants(layout[1]))
    if everything:
        return found
    random.Random(str(layout)).shuffle(found)
    chosen: list[Sections] = []
    seen: set[tuple[str, object]] = set()
    for variant in found:
        values = {item for section in variant.values() for item in section.items()}
        if not values <= seen:
            seen |= values
            chosen.append(variant)
    return chosen


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--rounds") >= 10
        cases = [(layout, variant) for layout in LAYOUTS for variant in some(layout, everything)]
        metafunc.parametrize(("layout", "variant"), cases, ids=name_of)


Lines = list[tuple[int, float, float, float]]  # step, loss, gradient norm, learning rate
Run = Callable[..., Lines]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "walks")


@pytest.fixture(scope="module")
def length(request: pytest.FixtureRequest) -> Sections:
    """How long to train; longer in a soak."""
    return {"train": {"steps": 20 if request.config.getoption("--rounds") >= 10 else 8}}


@pytest.fixture(scope="module")
def run(dataset: Path, tmp_path_factory: pytest.TempPathFactory, length: Sections) -> Run:
    def run(ranks: int, *many: Sections, **options: Any) -> Lines:
        config = write_config(tmp_path_factory.mktemp("run"), dataset, **merged(BASE, length, *many))
        return steps(trained(config, ranks, **options))

    return run


@pytest.fixture(scope="module")
def reference(dataset: Path, tmp_path_factory: pytest.TempPathFactory, length: Sections, run: Run) -> Callable[[str], Any]:
    """What one process gets: in fp32 from a plain loop, in bf16 from this trainer."""

    @cache
    def found(precision: str) -> Any:
        if precision == "bf16":
            return run(1, {"train": {"precision": "bf16"}})
        return textbook(load_config(write_config(tmp_path_factory.mktemp("reference"), dataset, **merged(BASE, length)), []))

    return found


def test_every_layout_trains_like_one_process(run: Run, reference: Callable[[str], Any], layout, variant):
    tp, pp, dp = layout
    found = run(tp * pp * dp, spread(tp, pp), variant)
    assert len(found) >= 8
    assert found == [pytest.approx(line, rel=1e-5) for line in reference("fp32")]


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_every_layout_trains_like_one_process_in_bf16(run: Run, reference: Callable[[str], Any], layout):
    tp, pp, dp = layout
    found = run(tp * pp * dp, spread(tp, pp), {"train": {"precision": "bf16"}})
    assert found == [pytest.approx(line, rel=1e-2) for line in reference("bf16")]


MODELS: list[Sections] = [
    {"model": {"tie_embeddings": True, "kv_heads": 2, "bias": True, "norm": "layernorm", "mlp": "gelu"}},
    {"model": {"position": "learned", "kv_heads": 1}, "data": {"mask_documents": True, "mask_end_of_text": True, "end_of_text": 7}},
    {"model": {"position": "alibi"}, "data": {"mask_documents": True, "end_of_text": 7}},
    {"model": {"mup_base_hidden": 16, "position": "none"}},
    {"optimizer": {"name": "adan"}, "model": {"attention": "auto"}},
    {
        "train": {"batch_rampup": {"start": 8, "increment": 4, "samples": 60}, "micro_batch_size": 1},
        "optimizer": {"schedule": "wsd"},
    },
    {"parallel": {"sequence_parallel": False}, "model": {"kv_heads": 1, "tie_embeddings": True}},
    {"parallel": {"schedule": "interleaved_1f1b", "virtual_stages": 3}, "model": {"layers": 7, "tie_embeddings": True}},
    {"parallel": {"schedule": "zero_bubble", "virtual_stages": 2, "pp_layers": [1, 3, 2, 1]}, "model": {"layers": 7}},
]


@pytest.mark.parametrize("sections", MODELS, ids=name_of)
def test_every_kind_of_model_trains_the_same_in_three_dimensions(run: Run, sections):
    alone = merged(sections, {"parallel": {"schedule": "1f1b", "virtual_stages": "auto", "pp_layers": "auto"}})
    assert run(8, spread(2, 2), sections) == [pytest.approx(line, rel=1e-5) for line in run(1, alone)]


@pytest.mark.parametrize(("tp", "ranks"), [(3, 3), (3, 6)])
def test_any_divisor_of_the_heads_is_a_tensor_parallel_size(run: Run, tp: int, ranks: int):
    model: Sections = {"model": {"hidden": 48, "heads": 12, "kv_heads": 4, "ffn_hidden": 96, "seq_len": 18}, "train": {"steps": 6}}
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
    train = {"steps": 3, "micro_batch_size": draw(st.sampled_from([2, 4]))}
    parallel = {"tp": tp, "pp": pp, "schedule": schedule, "zero_stage": stage, "sequence_parallel": draw(st.booleans())}
    return tp * pp * dp, {"model": model, "train": train, "parallel": parallel}


def test_drawn_shapes_and_layouts_train_like_a_textbook(dataset: Path, tmp_path_factory: pytest.TempPathFactory, request):
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    count = 3 * request.config.getoption("--rounds")

    @settings(max_examples=count, deadline=None, suppress_health_check=checks, derandomize=True, phases=[Phase.generate])
    @given(_shapes_and_layouts())
    def check(case: tuple[int, Sections]) -> None:
        ranks, sections = case
        config = write_config(tmp_path_factory.mktemp("drawn"), dataset, **merged(BASE, sections))
        expected = [pytest.approx(line, rel=1e-5) for line in textbook(load_config(config, ["parallel={}"]))]
        assert steps(trained(config, ranks)) == expected

    check()


# -- checkpoints ---------------------------------------------------------------------------------------------------------


def moved(
    dataset: Path, directory: Path, layouts: list[tuple[int, int, int]], sections: Sections
) -> list[tuple[int, float, float, float]]:
    """Train on one layout after another, four steps on each."""
    config = write_config(directory, dataset, **merged(BASE, sections))
    found = []
    for number, (tp, pp, dp) in enumerate(layouts, 1):
        overrides = [f"parallel.tp={tp}", f"parallel.pp={pp}", f"train.steps={4 * number}"]
        found += steps(trained(config, tp * pp * dp, *overrides))
    return found


@pytest.mark.parametrize(
    "sections", [{}, {"model": {"tie_embeddings": True, "kv_heads": 1}, "optimizer": {"name": "adan"}}], ids=name_of
)
def test_a_checkpoint_moves_to_other_layouts_and_back(dataset: Path, tmp_path: Path, sections: Sections):
    layouts = [(2, 2, 2), (1, 1, 1), (2, 2, 2), (4, 1, 2), (2, 2, 2), (1, 4, 1), (2, 2, 2)]
    straight = moved(dataset, tmp_path / "straight", [(1, 1, 1)] * len(layouts), sections)
    found = moved(dataset, tmp_path / "moved", layouts, sections)
    assert len(found) == 4 * len(layouts)
    assert found == [pytest.approx(line, rel=1e-5) for line in straight]


@pytest.mark.parametrize(
    ("tp", "pp", "sections"),
    [(1, 1, {}), (2, 2, {}), (2, 1, {"parallel": {"sequence_parallel": False}}), (1, 2, {"train": {"recompute": "full"}})],
    ids=name_of,
)
def test_on_the_same_layout_a_new_process_goes_on_to_the_last_bit_with_dropout(dataset: Path, tmp_path: Path, tp, pp, sections):
    dropout: Sections = merged(
        {"model": {"dropout": 0.1, "attention_dropout": 0.1}, "train": {"steps": 8}}, sections, spread(tp, pp)
    )
    straight = write_config(tmp_path / "straight", dataset, **merged(BASE, dropout))
    broken = write_config(tmp_path / "broken", dataset, **merged(BASE, dropout))
    whole = steps(trained(straight, 2 * tp * pp))
    assert steps(trained(broken, 2 * tp * pp, "train.steps=3")) + steps(trained(broken, 2 * tp * pp)) == whole
    without = write_config(
        tmp_path / "without", dataset, **merged(BASE, dropout, {"model": {"dropout": 0.0, "attention_dropout": 0.0}})
    )
    assert steps(trained(without, 2 * tp * pp)) != whole
