"""Training on one and on several real ranks: the numbers of a textbook loop, and nothing lost between two processes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zarr
from trainer_ranks import STEPS, VOCABULARY, run_ranks, train, write_config, write_dataset

from resilient.worker import Config, ConfigError, load_config
from trainer.data import open_split
from trainer.layout import settle
from trainer.main import prepare
from trainer.model import GPT
from trainer.parallel import initialize
from trainer.schedule import for_config
from trainer.shape import GPTShape, shape_of

Made = Callable[..., Path]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "walks")


@pytest.fixture
def made(dataset: Path, tmp_path: Path) -> Made:
    def make(name: str = "run", **sections: dict[str, object]) -> Path:
        return write_config(tmp_path / name, dataset, **sections)

    return make


def trained(config: Path, ranks: int, *overrides: str, stop_at: int | None = None) -> list[dict[str, Any]]:
    """What rank 0 reported; the others report nothing but what all do."""
    first, *others = run_ranks(ranks, train, config, overrides, stop_at)
    for told in (first, *others):
        if isinstance(told, Exception):
            raise told
    assert all(line["event"] not in {"step", "validation"} for told in others for line in told)
    return first  # type: ignore[no-any-return]


def steps(told: list[dict[str, Any]]) -> list[tuple[int, float, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in told if line["event"] == "step"]


def saved(told: list[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in told if line["event"] == "committed"]


def arrays(config: Path, step: int) -> dict[str, bytes]:
    """Every array of a checkpoint, read by plain Zarr."""
    root = zarr.open_group(config.parent / f"run/checkpoints/step-{step:08}", mode="r")
    members = root.members(max_depth=None)
    return {name: np.asarray(array[...]).tobytes() for name, array in members if isinstance(array, zarr.Array)}


def textbook(config: Config) -> list[tuple[int, float, float, float]]:
    """The same training as a person would write it for one process: no mesh, no shards, no accumulation."""
    torch.set_num_threads(1)
    model = GPT(shape_of(config, VOCABULARY))
    initialize(model, config.seed)
    wanted = config.optimizer
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": wanted.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(wanted.beta1, wanted.beta2), eps=wanted.eps, foreach=False)
    assert isinstance(config.data.path, Path)
    data = open_split([(config.data.path, 1.0)], config.data.split, "train", config.model.seq_len, config.seed)
    batch = config.train.global_batch_size
    found = []
    for step in range(1, config.train.steps + 1):
        window = torch.from_numpy(data.get(np.arange((step - 1) * batch, step * batch)))
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in model.parameters() if p.grad is not None))
        rate = for_config(config, step * batch)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= min(1.0, wanted.clip_grad / norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        found.append((step, float(loss.detach()), norm, rate))
    return found


@pytest.mark.parametrize(("ranks", "micro"), [(1, 12), (1, 2), (2, 2), (3, 2), (2, 6)], ids=lambda number: str(number))
@pytest.mark.parametrize("model", [{}, {"tie_embeddings": True, "kv_heads": 2}], ids=["plain", "tied"])
def test_any_number_of_ranks_and_micro_batches_trains_like_a_textbook(made: Made, ranks: int, micro: int, model: dict[str, object]):
    config = made(
        model={"attention": "math", **model}, train={"precision": "fp32", "micro_batch_size": micro}, optimizer={"clip_grad": 0.3}
    )
    told = trained(config, ranks)
    expected = textbook(load_config(config, []))
    assert max(norm for _, _, norm, _ in expected) > 0.3  # there is something to clip
    assert steps(told) == pytest.approx(np.array(expected), rel=1e-5)


def _weights(shape: GPTShape) -> dict[str, bytes]:
    import torch.distributed as dist

    from trainer.parallel import build_model, make_ranks

    dist.init_process_group("gloo")
    world = dist.get_world_size()
    model = build_model(shape, make_ranks(torch.device("cpu"), world), "bf16", torch.device("cpu"))
    initialize(model, 11)
    return {name: parameter.full_tensor().detach().numpy().tobytes() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("hidden", [32, 4], ids=["uneven shards", "ranks with nothing"])
def test_weights_at_the_start_are_the_same_bits_on_any_number_of_ranks(hidden: int):
    shape = GPTShape(vocab=64, layers=2, hidden=hidden, heads=2, kv_heads=1, ffn_hidden=40, seq_len=8)
    plain = GPT(shape)
    initialize(plain, 11)
    expected = {name: parameter.detach().numpy().tobytes() for name, parameter in plain.named_parameters()}
    for ranks in (1, 3):
        for found in run_ranks(ranks, _weights, shape):
            assert found == expected


VARIANTS = [
    {"train": {"precision": "bf16"}},
    {"train": {"precision": "fp32"}},
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


def test_where_the_target_is_reached_nothing_is_done(made: Made):
    config = made(train={"eval_interval": 4})
    trained(config, 1)
    again = trained(config, 1)
    assert {line["event"] for line in again} == {"resumed"}


def test_checkpoints_and_validation_come_when_they_are_due_and_once(made: Made):
    told = trained(made(checkpoint={"every_steps": 3}, train={"eval_interval": 4, "steps": 8}), 1)
    assert saved(told) == [3, 6, 8]
    validations = [line for line in told if line["event"] == "validation"]
    assert [line["step"] for line in validations] == [0, 4, 8]
    assert validations[0]["val_ppl"] == pytest.approx(math.exp(validations[0]["val_loss"]))


def test_it_learns_what_can_be_learnt(made: Made):
    told = trained(made(train={"steps": 60, "eval_interval": 60}), 1)
    before, after = (line["val_loss"] for line in told if line["event"] == "validation")
    assert before == pytest.approx(math.log(VOCABULARY), abs=0.1)
    # Nine in ten tokens follow from the one before, the tenth is any: 0.74 nats are left when all is learnt.
    assert after < before - 2.0


def _reductions(config: Path) -> int:
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as mode:
        train(config)
    return sum(count for name, count in mode.get_comm_counts().items() if "reduce_scatter" in str(name))


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


def test_layouts_come_out_even_or_are_refused(made: Made):
    config = load_config(made(), [])
    assert [settle(config, world).accumulation for world in (1, 2, 3, 6)] == [6, 3, 2, 1]
    with pytest.raises(ConfigError, match=r"train\.global_batch_size = 12: must be a multiple of .* 2 × 5 = 10"):
        settle(config, 5)
    fixed = load_config(made(), ["parallel.dp=2", "cluster.procs_per_node=2"])
    assert settle(fixed, 2).dp == 2
    with pytest.raises(ConfigError, match=r"parallel\.dp = 2: there are 3 ranks; allowed: 3, or auto"):
        settle(fixed, 3)


def test_ranks_that_cannot_share_the_batch_all_say_so(made: Made):
    errors = run_ranks(5, train, made())
    assert [type(error) for error in errors] == [ConfigError] * 5
