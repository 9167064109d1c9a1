"""Training on one and on several real ranks: the numbers of a textbook loop, and nothing lost between two processes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import zarr
from soak import soaked
from trainer_ranks import STEPS, VOCABULARY, run_ranks, steps, textbook, train, trained, write_config, write_dataset

from resilient.worker import ConfigError, load_config, settle
from trainer.main import prepare
from trainer.model import GPT
from trainer.shape import shape_of
from trainer.weights import initialize

Made = Callable[..., Path]


@pytest.fixture
def made(dataset: Path, tmp_path: Path) -> Made:
    def make(name: str = "run", **sections: dict[str, object]) -> Path:
        return write_config(tmp_path / name, dataset, **sections)

    return make


def saved(told: list[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in told if line["event"] == "committed"]


def arrays(config: Path, step: int) -> dict[str, bytes]:
    """Every array of a checkpoint, read by plain Zarr."""
    root = zarr.open_group(config.parent / f"run/checkpoints/step-{step:08}", mode="r")
    members = root.members(max_depth=None)
    return {name: np.asarray(array[...]).tobytes() for name, array in members if isinstance(array, zarr.Array)}


TIED = {"tie_embeddings": True, "kv_heads": 2}


@pytest.mark.parametrize(
    ("ranks", "micro", "model"),
    [
        *((ranks, micro, {}) for ranks, micro in [(1, 2), (3, 2)]),
        (2, 2, TIED),
        *(soaked(ranks, micro, {}) for ranks, micro in [(1, 12), (2, 6)]),
        soaked(2, 2, {}),
        *(soaked(ranks, micro, TIED) for ranks, micro in [(1, 12), (1, 2), (3, 2), (2, 6)]),
    ],
    ids=str,
)
def test_any_number_of_ranks_and_micro_batches_trains_like_a_textbook(made: Made, ranks: int, micro: int, model: dict[str, object]):
    config = made(
        model={"attention": "math", **model}, train={"precision": "fp32", "micro_batch_size": micro}, optimizer={"clip_grad": 0.3}
    )
    told = trained(config, ranks)
    expected = textbook(load_config(config, []))
    assert max(norm for _, _, norm, _ in expected) > 0.3  # there is something to clip
    assert steps(told) == pytest.approx(np.array(expected), rel=1e-5)


def _weights(config: Path) -> dict[str, bytes]:
    import torch.distributed as dist

    from trainer.attention import Kernel
    from trainer.parallel import build_stages, make_ranks

    dist.init_process_group("gloo")
    loaded = load_config(config, [])
    device = torch.device("cpu")
    ranks = make_ranks(device, settle(loaded, dist.get_world_size()))
    (model,) = build_stages(loaded, shape_of(loaded, VOCABULARY), Kernel.MATH, ranks, device)
    initialize(model, 11)
    return {name: parameter.full_tensor().detach().numpy().tobytes() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("hidden", [32, 4], ids=["uneven shards", "ranks with nothing"])
def test_weights_at_the_start_are_the_same_bits_on_any_number_of_ranks(made: Made, hidden: int):
    config = made(model={"hidden": hidden, "heads": 2, "kv_heads": 1, "ffn_hidden": 40})
    plain = GPT(shape_of(load_config(config, []), VOCABULARY))
    initialize(plain, 11)
    expected = {name: parameter.detach().numpy().tobytes() for name, parameter in plain.named_parameters()}
    for ranks in (1, 3):
        for found in run_ranks(ranks, _weights, config):
            assert found == expected


VARIANTS: list[Any] = [
    soaked({"train": {"precision": "bf16"}}),
    soaked({"train": {"precision": "fp32"}}),
    {"model": {"tie_embeddings": True, "mlp": "gelu", "norm": "layernorm", "kv_heads": 2}},
]


@pytest.mark.parametrize("sections", VARIANTS, ids=["bf16", "fp32", "another shape"])
def test_a_new_process_goes_on_to_the_last_bit(made: Made, sections: dict[str, dict[str, object]]):
    straight, broken = made("straight", **sections), made("broken", **sections)
    whole = steps(trained(straight, 2))
    first, second = trained(broken, 2, "train.steps=3"), trained(broken, 2)
    assert (saved(first), saved(second)) == ([3], [STEPS])
    assert steps(first) + steps(second) == whole
    assert arrays(straight, STEPS) == arrays(broken, STEPS)


def test_asked_to_stop_it_saves_at_that_step_and_returns(made: Made):
    config = made()
    whole = steps(trained(made("straight"), 1))
    stopped = trained(config, 1, stop_at=5)
    assert (saved(stopped), len(steps(stopped))) == ([5], 5)
    assert steps(stopped) + steps(trained(config, 1)) == whole


def test_asked_to_stop_before_the_first_step_it_does_nothing(made: Made):
    config = made()
    told = trained(config, 1, stop_at=0)
    assert (steps(told), saved(told)) == ([], [])


def test_where_the_target_is_reached_no_step_is_done_and_the_last_validation_again(made: Made):
    config = made(train={"eval_interval": 4})
    first, again = trained(config, 1), trained(config, 1)
    assert [line["event"] for line in again] == ["resumed", "validation"]
    assert again[-1]["val_loss"] == [line["val_loss"] for line in first if line["event"] == "validation"][-1]


def test_checkpoints_and_validation_come_when_they_are_due_and_once(made: Made):
    told = trained(made(checkpoint={"every_steps": 3}, train={"eval_interval": 4, "steps": 8}), 1)
    assert saved(told) == [3, 6, 8]
    validations = [line for line in told if line["event"] == "validation"]
    assert [line["step"] for line in validations] == [0, 4, 8]
    assert validations[0]["val_ppl"] == pytest.approx(math.exp(validations[0]["val_loss"]))


@pytest.mark.soak
def test_it_learns_what_can_be_learnt(made: Made):
    told = trained(made(train={"steps": 60, "eval_interval": 60}), 1)
    before, after = (line["val_loss"] for line in told if line["event"] == "validation")
    assert before == pytest.approx(math.log(VOCABULARY), abs=0.1)
    # Nine in ten tokens follow from the one before, the tenth is any: 0.74 nats are left when all is learnt.
    assert after < before - 2.0


def _reductions(config: Path) -> int:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

    counted = mock.Mock(wraps=group.foreach_reduce)
    with mock.patch.object(group, "foreach_reduce", counted):
        train(config)
    return counted.call_count


def test_gradients_travel_once_a_step_however_many_micro_batches_there_are(made: Made):
    counts = {
        micro: run_ranks(2, _reductions, made(f"micro-{micro}", train={"steps": 2, "micro_batch_size": micro})) for micro in (6, 2)
    }
    assert counts[2] == counts[6]
    assert counts[6][0] == 2 * 3  # two steps; two blocks, and what is around them


def test_a_checkpoint_of_another_model_is_refused(made: Made):
    config = made(train={"steps": 1})
    trained(config, 1)
    (error,) = run_ranks(1, train, config, ("train.steps=2", "model.ffn_hidden=64"))
    assert type(error).__name__ == "UnrecoverableError"
    assert "mlp" in str(error)


def test_a_dataset_of_another_tokenizer_is_refused_when_its_token_is_met(tmp_path: Path):
    foreign = write_dataset(tmp_path / "foreign", vocabulary=VOCABULARY + 1)
    (error,) = run_ranks(1, train, write_config(tmp_path, foreign))
    assert isinstance(error, ConfigError)
    assert str(error).startswith("data.path: ")
    assert f"{foreign}.bin has token {VOCABULARY}" in str(error)


@pytest.mark.parametrize("content", ["", "[1]", '{"a": "b"}', '{"model": {}}', "{}"])
def test_what_is_no_tokenizer_is_refused(made: Made, tmp_path: Path, content: str):
    (tmp_path / "vocab.json").write_text(content)
    (tmp_path / "merges.txt").write_text("")
    files = {"vocab_file": str(tmp_path / "vocab.json"), "merges_file": str(tmp_path / "merges.txt")}
    config = load_config(made(data={"tokenizer": files}), [])
    with pytest.raises(ConfigError, match=r"data\.path: .*vocab\.json is no tokenizer"):
        prepare(config, lambda *_: None)


def test_any_number_of_replicas_up_to_one_for_each_sample_makes_a_layout(made: Made):
    config = load_config(made(), [])  # 6 micro batches of 2
    assert [settle(config, world).accumulation for world in range(1, 13)] == [6, 3, 2, 2, 2, *[1] * 7]
    assert [settle(config, world).fuller for world in range(1, 13)] == [1, 2, 3, 2, 1, *[6] * 7]
    with pytest.raises(ConfigError, match=r"train\.global_batch_size = 12: has no sample for each of dp = 13 replicas"):
        settle(config, 13)
    fixed = load_config(made(), ["parallel.dp=2", "cluster.procs_per_node=2"])
    assert settle(fixed, 2).dp == 2
    with pytest.raises(ConfigError, match=r"parallel\.dp = 2: .* is not the world size 3.*; allowed: 3, or auto"):
        settle(fixed, 3)
    assert settle(fixed, 1, fewer=True).dp == 1, "under a supervisor nodes may have been lost"


def test_ranks_that_cannot_share_the_batch_all_say_so(made: Made):
    errors = run_ranks(5, train, made(train={"global_batch_size": 4}))
    assert [type(error) for error in errors] == [ConfigError] * 5
