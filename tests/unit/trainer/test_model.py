"""The model: its weights, its optimizers, and its sizes in numbers."""

import pytest
import torch
from tiny_models import SHAPES, config, gpt
from torch import nn

from trainer.main import plan
from trainer.optimizer import make_optimizer, set_learning_rate
from trainer.shape import GPTShape, flops_per_token, peak_flops, shape_of
from trainer.weights import initialize


@pytest.mark.parametrize("model", SHAPES, ids=str)
def test_the_parameters_are_as_many_as_the_plan_says(model):
    built, size = gpt(config(model=model))
    assert sum(parameter.numel() for parameter in built.parameters()) == size.parameters
    per_layer = {name.split(".", 2)[2] for name, _ in built.named_parameters() if name.startswith("blocks.")}
    outside = {name for name, _ in built.named_parameters() if not name.startswith("blocks.")}
    assert len(per_layer) + len(outside) == size.arrays


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
    assert torch.equal(one.blocks["1"].mlp.up.weight, deeper.blocks["1"].mlp.up.weight)  # no order of drawing
    assert not torch.equal(one.blocks["0"].mlp.up.weight, one.blocks["1"].mlp.up.weight)
    assert one.head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert one.blocks["0"].mlp.down.weight.std().item() == pytest.approx(0.02 / 2, rel=0.05)  # 1 / sqrt(2 × 2 layers)


@pytest.mark.parametrize("name", ["adamw", "adan"])
def test_only_matrices_decay(name):
    built, _ = gpt(config(model={"bias": True, "norm": "layernorm"}))
    by_decay = {
        group["weight_decay"]: group["params"] for group in make_optimizer(config(optimizer={"name": name}), [built]).param_groups
    }
    assert set(by_decay) == {0.0, 0.1}
    assert {parameter.dim() for parameter in by_decay[0.0]} == {1}
    assert {parameter.dim() for parameter in by_decay[0.1]} == {2}


def test_muon_does_what_torch_does_with_matrices_and_adamw_with_the_rest():
    given = config(optimizer={"name": "muon", "momentum": 0.9, "weight_decay": 0.2}, train={"precision": "bf16"})
    built, twin = gpt(given)[0], gpt(given)[0]
    initialize(built, 3)
    initialize(twin, 3)
    ours = make_optimizer(given, [built])
    inner = {weight.name for weight in twin.shape.weights() if weight.kind == "matrix"}
    parameters = dict(twin.named_parameters())
    matrices = [parameter for name, parameter in parameters.items() if name in inner]
    others = [
        {"params": [each], "weight_decay": 0.2 if each.dim() > 1 else 0.0} for name, each in parameters.items() if name not in inner
    ]
    muon = torch.optim.Muon(matrices, weight_decay=0.2, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), eps=given.optimizer.eps, fused=True)
    generator = torch.Generator().manual_seed(5)
    for step in range(1, 7):
        rate = 0.02 / step
        set_learning_rate(ours, rate)
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = rate
        for name, parameter in built.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            parameters[name].grad = parameter.grad.clone()
        ours.step()
        muon.step()
        adamw.step()
        for name, parameter in built.named_parameters():
            torch.testing.assert_close(parameter, parameters[name], rtol=1e-6, atol=1e-7)
    assert {"embedding.weight", "head.weight"} <= parameters.keys() - inner and len(inner) == 14


def test_a_seed_can_start_every_layer_alike():
    built, _ = gpt(config(model={"depth_scaled_init": False, "init_std": 0.01}))
    initialize(built, 7)
    assert built.blocks["0"].mlp.down.weight.std().item() == pytest.approx(0.01, rel=0.05)


def changes(width: int, base: int | None) -> dict[str, float]:
    """By how much a few steps change the activations of a model (root mean square), at each place."""
    given = config(
        model={"hidden": width, "heads": width // 16, "mup_base_hidden": base, "init_std": 0.1, "attention": "math"},
        optimizer={"lr": 0.01, "schedule": "constant", "warmup_samples": 0, "weight_decay": 0.0},
    )
    built, _ = gpt(given)
    initialize(built, 3)
    optimizer = make_optimizer(given, [built])
    set_learning_rate(optimizer, 0.01)
    seen: dict[str, torch.Tensor] = {}
    for name, module in {"attention": built.blocks["1"].attention, "mlp": built.blocks["1"].mlp, "logits": built}.items():
        module.register_forward_hook(lambda _m, _i, output, name=name: seen.__setitem__(name, output.detach()))
    tokens = torch.randint(0, 100, (4, 32), generator=torch.Generator().manual_seed(1))
    first: dict[str, torch.Tensor] = {}
    for _ in range(4):
        logits = built(tokens)
        first = first or dict(seen)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return {name: float((seen[name] - first[name]).square().mean().sqrt()) for name in seen}


def test_the_coordinate_check_of_mup_holds_and_fails_without_it():
    """Yang et al. (2022): how far activations move in a few steps must not depend on the width."""
    narrow, wide = changes(64, 64), changes(512, 64)
    for name, change in narrow.items():
        assert 0.5 < wide[name] / change < 2.0, name
    standard = changes(512, None)
    assert max(standard[name] / change for name, change in changes(64, None).items()) > 3.0


def test_the_flops_of_a_known_model_are_those_of_the_formula():
    # 124 million parameters, as GPT-2 small: 6 N + 12 L H T, N without embeddings and norms but with the head.
    size = GPTShape(50304, 12, 768, 12, 12, 3072, 1024, mlp="gelu", tied=True)
    assert flops_per_token(size) == 6 * (12 * 12 * 768 * 768 + 50304 * 768) + 12 * 12 * 768 * 1024
    assert peak_flops("NVIDIA A100-SXM4-40GB") == 312e12
    assert peak_flops("AMD EPYC") is None


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H100 NVL", 835e12, 60e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA GH200 480GB", 989e12, 67e12),
        ("NVIDIA GB200", 2500e12, None),
        ("NVIDIA B200", 2250e12, None),
        ("AMD Instinct MI250X", 191.5e12, 47.9e12),
        ("AMD Instinct MI300X", 1307e12, 163.4e12),
    ],
)
def test_mfu_is_of_the_device_that_torch_names_in_the_precision_of_the_training(name, bf16, fp32):
    assert (peak_flops(name), peak_flops(name, "fp32")) == (bf16, fp32)


def test_the_plan_names_parameters_memory_and_checkpoint(tmp_path):
    given = config(run_dir=str(tmp_path))
    found = plan(given.model_copy(update={"run_dir": tmp_path}))
    assert set(found) == {"model", "memory per rank", "checkpoint"}
    assert found["model"]["parameters"] == f"{shape_of(given, 4096).parameters:,}"


def test_every_kind_of_parameter_is_in_the_table():  # the table says what initialisation, optimizer and plan make of it
    for model in SHAPES:
        built, shape = gpt(config(model=model))
        table = {weight.name: weight.shape for weight in shape.weights()}
        assert table == {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
