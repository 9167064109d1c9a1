"""The model, its sizes in numbers, and its attention kernels."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from resilient.worker import Config, ConfigError
from trainer import attention
from trainer.main import check, plan
from trainer.model import GPT, rotary_table, rotate
from trainer.optimizer import make_optimizer
from trainer.parallel import initialize
from trainer.shape import GPTShape, activation_bytes, flops_per_token, peak_flops, shape_of


def config(**sections: dict[str, object]) -> Config:
    small = {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 32, **sections.pop("model", {})}
    return Config.model_validate({"model": small, **sections})


def gpt(given: Config, vocab: int = 100) -> tuple[GPT, GPTShape]:
    shape = shape_of(given, vocab)
    return GPT(shape), shape


SHAPES = [{}, {"mlp": "gelu"}, {"norm": "layernorm"}, {"kv_heads": 2}, {"tie_embeddings": True}, {"ffn_hidden": 96}]


@pytest.mark.parametrize("model", SHAPES, ids=str)
def test_the_parameters_are_as_many_as_the_plan_says(model):
    built, size = gpt(config(model=model))
    assert sum(parameter.numel() for parameter in built.parameters()) == size.parameters
    per_layer = {name.split(".", 2)[2] for name, _ in built.named_parameters() if name.startswith("blocks.")}
    outside = {name for name, _ in built.named_parameters() if not name.startswith("blocks.")}
    assert len(per_layer) + len(outside) == size.arrays


@pytest.mark.parametrize("model", SHAPES, ids=str)
def test_no_token_sees_the_ones_after_it(model):
    built, size = gpt(config(model=model))
    initialize(built, 1)
    tokens = torch.arange(32).reshape(1, 32) % size.vocab
    changed = tokens.clone()
    changed[0, 20:] += 1
    with torch.no_grad():
        before, after = built(tokens), built(changed)
    assert before.shape == (1, 32, size.vocab)
    assert torch.equal(before[0, :20], after[0, :20])
    assert not torch.equal(before[0, 20:], after[0, 20:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", [{}, {"kv_heads": 2}], ids=str)
def test_flash_and_math_attention_agree_forward_and_backward(model, dtype):
    tokens = torch.randint(0, 100, (2, 32), generator=torch.Generator().manual_seed(0))
    found = []
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        built, _ = gpt(config(model=model))
        initialize(built, 1)
        built.to(dtype)
        with sdpa_kernel(kernel):
            logits = built(tokens)
        logits.float().logsumexp(-1).sum().backward()
        found.append([logits.detach().float(), *(parameter.grad.float() for parameter in built.parameters())])
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.1, "atol": 0.05}
    for flash, math in zip(*found, strict=True):
        torch.testing.assert_close(flash, math, **near)


def test_rotations_keep_lengths_and_depend_on_distance_alone():
    cos, sin = rotary_table(16, 8, 10_000.0, torch.device("cpu"))
    x = torch.randn(8, generator=torch.Generator().manual_seed(0)).expand(1, 1, 16, 8)
    turned = rotate(x, cos, sin)[0, 0]
    torch.testing.assert_close(turned.norm(dim=-1), x[0, 0].norm(dim=-1))
    products = turned @ turned.T
    torch.testing.assert_close(products.diagonal(3), products.diagonal(3)[:1].expand(13), rtol=1e-4, atol=1e-5)


def test_weights_are_what_seed_and_name_say():
    one, two, other = (gpt(config())[0] for _ in range(3))
    deeper = gpt(config(model={"layers": 3}))[0]
    initialize(one, 7)
    torch.manual_seed(99)
    initialize(two, 7)
    initialize(other, 8)
    initialize(deeper, 7)
    state = two.state_dict()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert not torch.equal(one.head.weight, other.head.weight)
    assert torch.equal(one.blocks[1].mlp.up.weight, deeper.blocks[1].mlp.up.weight)  # no order of drawing
    assert not torch.equal(one.blocks[0].mlp.up.weight, one.blocks[1].mlp.up.weight)
    assert one.head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert one.blocks[0].mlp.down.weight.std().item() == pytest.approx(0.02 / 2, rel=0.05)  # 1 / sqrt(2 × 2 layers)


def test_only_matrices_decay():
    built, _ = gpt(config())
    matrices, vectors = make_optimizer(config(), built).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert {parameter.dim() for parameter in vectors["params"]} == {1}
    assert {parameter.dim() for parameter in matrices["params"]} == {2}


def test_the_flops_of_a_known_model_are_those_of_the_formula():
    # 124 million parameters, as GPT-2 small: 6 N + 12 L H T, N without embeddings and norms but with the head.
    size = GPTShape(50304, 12, 768, 12, 12, 3072, 1024, mlp="gelu", tied=True)
    assert flops_per_token(size) == 6 * (12 * 12 * 768 * 768 + 50304 * 768) + 12 * 12 * 768 * 1024
    assert peak_flops("NVIDIA A100-SXM4-40GB") == 312e12
    assert peak_flops("AMD EPYC") is None


def test_more_micro_batch_keeps_more_activations():
    size = shape_of(config(), 100)
    assert activation_bytes(size, 4, bytes_per_number=2) == 4 * activation_bytes(size, 1, bytes_per_number=2)


@pytest.mark.parametrize(("key", "value"), [("parallel.tp", 2), ("parallel.pp", 2), ("parallel.zero_stage", 3)], ids=str)
def test_a_layout_that_is_not_built_yet_is_refused(key, value):
    with pytest.raises(ConfigError) as error:
        check(config(parallel={key.partition(".")[2]: value}))
    assert str(error.value).startswith(f"{key} = {value}: not in this version")


def test_the_plan_names_parameters_memory_and_checkpoint(tmp_path):
    given = config(run_dir=str(tmp_path))
    found = plan(given.model_copy(update={"run_dir": tmp_path}))
    assert set(found) == {"model", "memory per rank", "checkpoint"}
    assert found["model"]["parameters"] == f"{shape_of(given, 4096).parameters:,}"


def test_asking_for_flash_where_it_does_not_run_is_an_error_and_auto_falls_back(monkeypatch):
    def broken(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("No available kernel. Aborting execution.")

    cpu = torch.device("cpu")
    assert attention.choose("auto", cpu, torch.bfloat16, 32) is SDPBackend.FLASH_ATTENTION
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", broken)
    assert attention.choose("auto", cpu, torch.bfloat16, 32) is SDPBackend.MATH
    assert attention.choose("math", cpu, torch.bfloat16, 32) is SDPBackend.MATH
    with pytest.raises(ConfigError, match=r"model\.attention = sdpa_flash"):
        attention.choose("sdpa_flash", cpu, torch.bfloat16, 32)
