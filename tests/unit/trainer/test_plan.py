"""What the plan says of a rank, against what a rank then holds; and the arithmetic under it."""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from layouts import BASE, Sections, deep, merged, name_of, spread
from soak import soaked, soaked_after
from torch.distributed.pipelining.schedules import (
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from trainer_ranks import run_ranks, train, trained, write_config

from resilient.worker import Config, load_config, settle
from trainer.attention import Kernel
from trainer.main import plan
from trainer.memory import in_flight, memory, recomputed_bytes
from trainer.model import GPT
from trainer.parallel import recompute
from trainer.plan import checkpoint_files
from trainer.shape import shape_of
from trainer.stages import of_rank, stages

VOCABULARY = 61


def held(config: Path) -> tuple[int, int, int, int]:
    """Pipeline rank, and the bytes of parameters, gradients and optimizer that this rank really holds before an update."""
    from torch.distributed.tensor import DTensor

    from trainer.loop import Trainer

    found: list[tuple[int, int, int, int]] = []

    def measured(trainer: Trainer) -> None:
        trainer._gradients(16)
        parameters = [parameter for stage in trainer.stages for parameter in stage.parameters()]
        moments = [each for state in trainer.optimizer.state.values() for name, each in state.items() if name != "step"]

        def size(tensors) -> int:
            local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
            return sum(each.numel() * each.element_size() for each in local)

        gradients = size(parameter.grad for parameter in parameters)
        found.append((trainer.ranks.pp_rank, size(parameters), gradients, size(moments)))

    original, Trainer.train = Trainer.train, measured
    try:
        train(config)
    finally:
        Trainer.train = original
    return found[0]


LAYOUTS: list[Any] = [
    (1, {}),
    (2, spread(1, 1, zero_stage=3)),
    soaked(2, spread(2, 1)),
    (2, spread(1, 2)),
    (4, spread(1, 1, zero_stage=2, dp_replicate=2)),
    soaked(8, spread(2, 2)),
    soaked(4, merged(spread(2, 1, zero_stage=3), {"model": {"kv_heads": 1}, "optimizer": {"name": "muon"}})),
    (4, merged(spread(2, 2), {"model": {"tie_embeddings": True, "kv_heads": 1}, "optimizer": {"name": "adan"}})),
    (3, {"model": {"hidden": 40, "bias": True, "norm": "layernorm", "position": "learned"}, "train": {"global_batch_size": 12}}),
]


@pytest.mark.parametrize(("ranks", "sections"), soaked_after(3, LAYOUTS), ids=name_of)
def test_the_plan_is_what_ranks_hold(dataset: Path, tmp_path: Path, ranks: int, sections: Sections):
    path = write_config(tmp_path, dataset, **merged(BASE, sections))
    config = load_config(path, [])
    spread_out = settle(config, ranks)
    shape = shape_of(config, VOCABULARY)
    measured = run_ranks(ranks, held, path)
    for error in measured:
        if isinstance(error, Exception):
            raise error
    for pp_rank in range(spread_out.pp):
        planned = memory(config, shape, spread_out, pp_rank)
        most = [max(each[number] for each in measured if each[0] == pp_rank) for number in (1, 2, 3)]
        assert [planned.parameters, planned.gradients, planned.optimizer] == pytest.approx(most, rel=0.02)


@pytest.mark.parametrize(
    "sections",
    [
        {"optimizer": {"name": "adan"}, "model": {"bias": True, "position": "learned"}},
        soaked({}),
        soaked({"optimizer": {"name": "muon"}}),
    ],
    ids=name_of,
)
def test_a_checkpoint_has_the_files_that_the_plan_says_on_any_layout(dataset: Path, tmp_path: Path, sections: Sections):
    for ranks, layout in ((1, {}), (4, spread(2, 2))):
        small: Sections = {"train": {"steps": 1, "global_batch_size": 8}}
        path = write_config(tmp_path / str(ranks), dataset, **merged(BASE, sections, layout, small, deep(2)))
        trained(path, ranks)
        (step,) = (tmp_path / str(ranks) / "run" / "checkpoints").glob("step-*")
        files = [each for each in step.rglob("*") if each.is_file()]
        config = load_config(path, [])
        assert len(files) == checkpoint_files(config, shape_of(config, VOCABULARY))[1]


MODELS: list[dict[str, object]] = [
    {"norm": "rmsnorm", "mlp": "swiglu"},
    {"norm": "layernorm", "mlp": "gelu", "bias": True, "position": "learned"},
    {"kv_heads": 2},
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: " ".join(map(str, model.values())))
@pytest.mark.parametrize("precision", ["bf16", soaked("fp32")])
@pytest.mark.parametrize("kernel", soaked_after(1, [Kernel.SDPA_FLASH, Kernel.MATH]), ids=lambda kernel: kernel.value)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_what_layers_keep_for_their_backward_pass_is_planned(
    mode: Literal["none", "selective", "full"], kernel: Kernel, precision: str, model: dict[str, object]
):
    config = Config.model_validate(
        {
            "cluster": {"device": "cpu"},
            "model": {"layers": 3, "hidden": 128, "heads": 4, "seq_len": 96, "vocab_size": 64, "attention": kernel.value, **model},
            "train": {"recompute": mode, "precision": precision},
        }
    )
    shape, compute = shape_of(config, 64), 2 if precision == "bf16" else 4
    built = GPT(shape, kernel).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    recompute.apply(built, mode, 1)
    tokens = torch.randint(64, (2, 96))
    x = built.embed(tokens, None).detach().requires_grad_()
    gc.collect()  # what an earlier measurement has left in cycles is not to be freed in this one
    with torch.autograd.profiler.profile(profile_memory=True) as found:
        for block in built.blocks.values():
            x = block(x)
    measured = sum(event.self_cpu_memory_usage for event in found.function_events)  # allocated, and still there
    planned = 3 * tokens.numel() * recomputed_bytes(config, shape, settle(config, 1), compute)
    assert planned == pytest.approx(measured, rel=0.15)


def test_stages_go_round_and_share_the_layers_as_evenly_as_can_be():
    assert [list(stage.layers) for stage in stages(7, 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [list(stage.layers) for stage in stages(4, 2, [1, 3])] == [[0], [1, 2, 3]]
    config = Config.model_validate({"model": {"layers": 9}, "parallel": {"pp": 2, "schedule": "interleaved_1f1b"}})
    layout = settle(config, 2)
    assert [[list(stage.layers) for stage in of_rank(config, layout, rank)] for rank in (0, 1)] == [
        [[0, 1, 2], [5, 6]],
        [[3, 4], [7, 8]],
    ]


def test_what_a_pipeline_keeps_in_flight():
    def flight(schedule: str, rank: int) -> float:
        config = Config.model_validate(
            {"parallel": {"pp": 4, "schedule": schedule}, "model": {"layers": 8}, "train": {"global_batch_size": 64}}
        )
        return in_flight(config, settle(config, 4), rank)

    assert [flight("1f1b", rank) for rank in range(4)] == [4, 3, 2, 1]
    assert flight("gpipe", 0) == 16
    assert flight("interleaved_1f1b", 0) == 5.5


ROUNDS: list[tuple[str, Any, int]] = [
    ("zero_bubble", ScheduleInterleavedZeroBubble, 1),
    ("zero_bubble", ScheduleInterleavedZeroBubble, 2),
    ("interleaved_1f1b", ScheduleInterleaved1F1B, 2),
]


@pytest.mark.parametrize("count", [4, 6, 7, 16])
@pytest.mark.parametrize(("schedule", "kind", "virtual"), ROUNDS)
def test_what_a_pipeline_keeps_in_flight_is_what_the_schedule_has_begun_and_not_ended(
    schedule: str, kind: Any, virtual: int, count: int
):
    config = Config.model_validate(
        {
            "parallel": {"pp": 4, "schedule": schedule, "virtual_stages": virtual},
            "model": {"layers": 8},
            "train": {"global_batch_size": count, "micro_batch_size": 1},
        }
    )
    a_round = count // max(1, count // 4)
    made = SimpleNamespace(n_local_stages=virtual, pp_group_size=4, microbatches_per_round=a_round, _n_microbatches=count)
    made.number_of_rounds = count // a_round
    for rank in range(4):
        under_way, most = 0, 0
        for action in kind._calculate_single_rank_operations(made, rank):
            what = None if action is None else action.computation_type
            under_way += (what is FORWARD) - (what in (FULL_BACKWARD, BACKWARD_WEIGHT))
            most = max(most, under_way)
        assert in_flight(config, settle(config, 4), rank) == most / virtual


@pytest.mark.parametrize("parallel", [{"schedule": "interleaved_1f1b"}, {"schedule": "zero_bubble"}, {}], ids=str)
def test_without_a_pipeline_a_rank_has_all_layers_in_one_stage_whatever_its_schedule_is(parallel: dict[str, object]):
    config = Config.model_validate({"parallel": {"pp": 1, "virtual_stages": 2, **parallel}, "model": {"layers": 8}})
    found = settle(config, 2)
    assert (found.virtual_stages, [each.layers for each in of_rank(config, found, 0)]) == (1, [range(8)])


EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_can_be_planned(path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("SCRATCH", "PROJECT", "USER", "TMPDIR"):
        monkeypatch.setenv(name, f"/{name.lower()}")
    found = plan(load_config(path, []))
    assert "parameters" in found["model"]


def test_the_example_for_large_gpus_fits_with_nothing_computed_again(monkeypatch: pytest.MonkeyPatch):
    for name in ("SCRATCH", "PROJECT"):
        monkeypatch.setenv(name, f"/{name.lower()}")
    config = load_config(EXAMPLES[0].with_name("opengptx-800m-h200.yaml"), ["train.precision=bf16"])
    assert (config.train.micro_batch_size, config.train.recompute) == (16, "none")
    assert str(plan(config)["memory per rank"]["GPU"]).startswith("fits")
    plain = load_config(EXAMPLES[0].with_name("opengptx-800m.yaml"), [])
    assert (config.model, config.optimizer) == (plain.model, plain.optimizer)
