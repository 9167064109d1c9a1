"""How gradients are kept so that a rank fits on its GPU, and what is said where it does not."""

from pathlib import Path
from typing import Any

import pytest

from resilient.config import Config, layout, load, settle
from trainer import fit
from trainer.memory import memory, most
from trainer.plan import sections
from trainer.shape import shape_of

EXAMPLE = Path(__file__).parents[3] / "examples/13b-juwels.yaml"
VOCABULARY = 100_352


@pytest.fixture(autouse=True)
def _places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.setenv("PROJECT", "/project")
    monkeypatch.setenv("USER", "me")


def settled(*overrides: str) -> Config:
    config = load(EXAMPLE, list(overrides))
    spread = layout(config, cpu_count=1, gpu_count=1)
    return fit.settled(config, shape_of(config, VOCABULARY), spread, fit.gpu_bytes_of(config))


def way(config: Config) -> tuple[str, str]:
    return config.parallel.reduce_gradients, config.train.grad_dtype


def row(name: str, *overrides: str) -> str:
    (found,) = (
        rows for title, rows in sections(load(EXAMPLE, list(overrides)), VOCABULARY, known=True).items() if "memory" in title
    )
    return str(found.get(name))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], ("every", "fp32")),
        (["cluster.gpu_memory_gib=80"], ("last", "fp32")),
        (["cluster.gpu_memory_gib=none"], ("last", "fp32")),
        (["cluster.gpu_memory_gib=auto"], ("last", "fp32")),  # which ranks know
        (["cluster.gpu_memory_gib=2"], ("every", "fp32")),  # nothing fits: the least
        (["parallel.reduce_gradients=last"], ("last", "bf16")),
        (["parallel.reduce_gradients=last", "train.precision=fp32"], ("last", "fp32")),
        (["parallel.reduce_gradients=last", "train.grad_dtype=fp32"], ("last", "fp32")),
        (["train.grad_dtype=bf16"], ("last", "bf16")),
        (["parallel.reduce_gradients=every", "cluster.gpu_memory_gib=80"], ("every", "fp32")),
        (["parallel.zero_stage=2", "cluster.gpu_memory_gib=80"], ("last", "fp32")),  # under a pipeline
        (["parallel.zero_stage=3", "parallel.pp=1", "parallel.dp=160", "cluster.gpu_memory_gib=80"], ("every", "fp32")),
    ],
)
def test_exact_gradients_come_first_then_speed(overrides: list[str], expected: tuple[str, str]):
    assert way(settled(*overrides)) == expected


def test_the_run_of_13_billion_parameters_fits_as_it_did():
    config = settled()
    shape = shape_of(config, VOCABULARY)
    assert round(shape.parameters / 1e9, 1) == 13.6
    assert most(config, shape, layout(config, cpu_count=1, gpu_count=1))[1].peak <= 36 * fit.GIB
    assert row("GPU") == "fits: of 40.00 GiB, 36.44 GiB are left to tensors"
    assert row("snapshots") == "64.0 MiB of the GPU, in which copies are gathered"
    assert "every backward pass adds" in row("gradients")


def test_the_peak_is_of_one_time_and_not_the_sum():
    config = load(EXAMPLE, ["cluster.gpu_memory_gib=none"])
    held = memory(config, shape_of(config, VOCABULARY), layout(config, cpu_count=1, gpu_count=1), 1)
    always = held.parameters + held.gathered + held.optimizer + held.accumulated
    assert held.peak == always + max(held.activations, held.gradients + held.reducing)


def test_each_change_that_is_named_makes_it_fit_and_none_is_named_that_is_needless():
    text = row("GPU", "cluster.gpu_memory_gib=24", "train.micro_batch_size=4")
    assert text.startswith("does not fit: pipeline rank ")
    changes = [each.split() for each in text.partition("it fits with ")[2].replace(" or with ", " ").split(",")]
    assert changes
    for change in changes:
        assert row("GPU", "cluster.gpu_memory_gib=24", "train.micro_batch_size=4", *change).startswith("fits: "), change


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (["cluster.gpu_memory_gib=24", "train.micro_batch_size=4"], ["parallel.tp=2", "parallel.dp=auto", "train.compile=auto"]),
        (
            ["cluster.gpu_memory_gib=36", "model.seq_len=128", "parallel.pp=1", "parallel.dp=160", "parallel.schedule=zero_bubble"],
            ["parallel.pp=2", "parallel.dp=auto", "parallel.pp_layers=auto", "train.compile=auto"],
        ),
    ],
)
def test_a_layout_that_cannot_be_compiled_is_named_for_compiled_layers_and_compiling_with_it(words: list[str], change: list[str]):
    given = ["train.compile=true", *words]
    shown = row("GPU", *given)
    assert " ".join(change) in shown.partition("it fits with ")[2].split(", or with "), shown
    assert row("GPU", *given, *change).startswith("fits: ")


def test_with_hybrid_sharding_what_helps_leaves_groups_as_large_as_the_ranks_make_them():
    given = ["cluster.gpu_memory_gib=24", "train.micro_batch_size=4", "parallel.dp_replicate=2", "parallel.dp_shard=40"]
    change = ["parallel.tp=2", "parallel.dp=auto", "parallel.dp_shard=auto"]
    assert " ".join(change) in (shown := row("GPU", *given)), shown
    assert row("GPU", *given, *change).startswith("fits: ")


def test_where_nothing_helps_that_is_said():
    assert "no change of the layout that is known makes it fit" in row("GPU", "cluster.gpu_memory_gib=2")


def test_without_a_gpus_memory_nothing_is_compared():
    assert row("GPU", "cluster.gpu_memory_gib=none") == row("GPU", "cluster.gpu_memory_gib=auto") == "None"


@pytest.mark.parametrize("value", [0, -1, "many"])
def test_a_memory_that_is_none_is_refused(value: Any):
    from resilient.worker import ConfigError

    with pytest.raises(ConfigError, match="gpu_memory_gib"):
        load(EXAMPLE, [f"cluster.gpu_memory_gib={value}"])


def test_the_profile_of_a_site_knows_its_gpus():
    config = load(EXAMPLE, ["slurm.profile=juwels-booster", "name=x"])
    assert fit.gpu_bytes_of(config) == 40 * fit.GIB


def test_what_would_help_is_found_for_as_many_ranks_as_there_are_where_the_config_leaves_them_open():
    words = ["cluster.nodes=1", "cluster.procs_per_node=8", "parallel.dp=auto", "parallel.pp=1", "train.global_batch_size=64"]
    config = load(EXAMPLE, ["cluster.gpu_memory_gib=none", *words])
    left_open = config.model_copy(update={"cluster": config.cluster.model_copy(update={"procs_per_node": "auto"})})
    shape, spread = shape_of(config, VOCABULARY), settle(config, 8)
    gpu_bytes = int(0.8 * most(config, shape, spread)[1].peak)
    said = fit.too_much(config, shape, spread, gpu_bytes)
    assert said is not None and "it fits with" in said
    assert fit.too_much(left_open, shape, spread, gpu_bytes) == said
