"""The model, its sizes in numbers, and its attention kernels."""

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from resilient.worker import Config, ConfigError
from trainer import attention, kernels
from trainer.attention import Apart, Kernel, alibi_bias, alibi_slopes
from trainer.data.bounds import Documents
from trainer.main import plan
from trainer.model import GPT, Block, attended, rotary_table, rotate
from trainer.optimizer import make_optimizer, set_learning_rate
from trainer.parallel import recompute
from trainer.parallel.tensor import kv_shares
from trainer.shape import GPTShape, flops_per_token, peak_flops, shape_of
from trainer.weights import initialize


def config(**sections: dict[str, object]) -> Config:
    small = {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 32, **sections.pop("model", {})}
    return Config.model_validate({"model": small, **sections})


def gpt(given: Config, vocab: int = 100) -> tuple[GPT, GPTShape]:
    shape = shape_of(given, vocab)
    return GPT(shape), shape


SHAPES = [
    {},
    {"mlp": "gelu"},
    {"norm": "layernorm"},
    {"kv_heads": 2},
    {"tie_embeddings": True},
    {"ffn_hidden": 96},
    {"bias": True, "norm": "layernorm", "position": "learned"},
]


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


KERNEL_MODELS = [{}, {"kv_heads": 2}, {"position": "alibi"}, {"position": "alibi", "kv_heads": 1}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("model", KERNEL_MODELS, ids=str)
def test_flash_and_math_attention_agree_forward_and_backward(model, documents, dtype):
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 100, (2, 32), generator=random)
    apart = torch.randint(0, 2, (2, 32), generator=random).cumsum(1)
    apart = Documents.of(apart) if documents else None
    found = []
    for kernel in (Kernel.SDPA_FLASH, Kernel.MATH):
        built = GPT(shape_of(config(model=model), 100), kernel)
        initialize(built, 1)
        built.to(dtype)
        logits = built(tokens, documents=apart)
        torch.autograd.backward(logits.float().logsumexp(-1).sum())
        found.append([logits.detach().float(), *(parameter.grad.float() for parameter in built.parameters())])
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.1, "atol": 0.05}
    for flash, math in zip(*found, strict=True):
        torch.testing.assert_close(flash, math, **near)


class Graphs:
    """A backend of torch.compile that keeps what it was given, and runs it as it is."""

    def __init__(self) -> None:
        self.operations: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        self.operations.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward


def each_model_once_and_every_way_in_the_soak() -> Iterator[Any]:
    """Parameters: models with documents and ways to compute again, of which each is in the first tier with some model."""
    ways = list(product((False, True), ("none", "selective", "full")))
    for number, model in enumerate([*SHAPES, *KERNEL_MODELS[2:], {"dropout": 0.1, "attention_dropout": 0.1}]):
        for way, (documents, recomputed) in enumerate(ways):
            name = f"{model}-{'documents' if documents else 'one document'}-{recomputed}"
            marks = () if way == number % len(ways) else pytest.mark.soak
            yield pytest.param(model, documents, recomputed, id=name, marks=marks)


@pytest.mark.parametrize(("model", "documents", "recomputed"), list(each_model_once_and_every_way_in_the_soak()))
def test_a_compiled_layer_is_one_graph_that_computes_no_rotations(model, documents, recomputed):
    built, size = gpt(config(model=model))
    initialize(built, 1)
    recompute.apply(built, recomputed, 1)
    block = built.blocks["0"]
    assert isinstance(block, Block)
    block.attention.keep_rotations(torch.device("cpu"))
    numbers = torch.arange(32).expand(2, 32) // 9
    apart = Apart.of(Documents.of(numbers), Kernel.MATH, torch.float32)
    given = (torch.arange(32).expand(2, 32) % 9, apart) if documents else (None, None)
    x = torch.randn(2, 32, size.hidden, requires_grad=True)
    torch.manual_seed(1)
    eager = block(x, *given)
    graphs = Graphs()
    torch._dynamo.reset()
    block.compile(backend=graphs, fullgraph=True)
    torch.manual_seed(1)
    torch.testing.assert_close(block(x, *given), eager)
    assert len(graphs.operations) == 1
    assert not {"cos", "sin", "pow"} & set(graphs.operations[0])


@pytest.mark.parametrize("position", ["rope", "alibi", "learned", "none"])
def test_a_masked_document_is_computed_as_if_it_were_alone(position):
    built, _ = gpt(config(model={"position": position}))
    initialize(built, 1)
    tokens = torch.arange(32).reshape(1, 32)
    documents = Documents.of(torch.tensor([[0] * 12 + [1] * 20]))
    positions = torch.cat([torch.arange(12), torch.arange(20)])[None] if position == "learned" else None
    with torch.no_grad():
        together = built(tokens, positions, documents)
        alone = built(tokens[:, 12:])
    torch.testing.assert_close(together[:, 12:], alone, rtol=1e-4, atol=1e-5)


def test_alibi_bends_scores_by_distance_and_by_head():
    assert alibi_slopes(4).tolist() == [0.25, 0.0625, 0.015625, 0.00390625]
    assert alibi_slopes(6).tolist() == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    bias = alibi_bias((0.5, 0.25), 3, torch.float32, torch.device("cpu"))
    inf = float("inf")
    assert bias[0, 0].tolist() == [[0, -inf, -inf], [-0.5, 0, -inf], [-1, -0.5, 0]]


def test_the_flash_attn_package_is_asked_for_the_same_attention(monkeypatch):
    """The package runs on CUDA alone: here a stand-in that computes what its documentation says, in its own layout."""

    asked: list[bool] = []

    def plain(q, k, v, dropout_p, softmax_scale, causal, deterministic, alibi_slopes=None):  # (batch, seq, heads, head_dim)
        assert causal and not dropout_p
        asked.append(deterministic)
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * softmax_scale
        distance = (torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])[None]).float()
        if alibi_slopes is not None:
            scores = scores - alibi_slopes[:, None, None] * distance
        return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(distance < 0, -torch.inf).softmax(-1), v)

    def varlen(q, k, v, bounds, bounds_k, longest, longest_k, **options):
        assert torch.equal(bounds, bounds_k) and longest == longest_k >= int(bounds.diff().max()) and bounds.dtype == torch.int32
        parts = [(int(a), int(b)) for a, b in pairwise(bounds)]
        return torch.cat([plain(q[None, a:b], k[None, a:b], v[None, a:b], **options)[0] for a, b in parts])

    package = SimpleNamespace(flash_attn_func=plain, flash_attn_varlen_func=varlen)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    documents = Documents.of(torch.randint(0, 2, (2, 32), generator=torch.Generator().manual_seed(0)).cumsum(1))
    for model in KERNEL_MODELS:
        for apart in (None, documents):
            found = []
            for kernel in (Kernel.FLASH_ATTN, Kernel.MATH):
                built = GPT(shape_of(config(model=model), 100), kernel)
                initialize(built, 1)
                with torch.no_grad():
                    found.append(built(torch.arange(64).reshape(2, 32), documents=apart))
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert asked and not any(asked)
    asked.clear()
    torch.use_deterministic_algorithms(True)
    try:
        GPT(shape_of(config(), 100), Kernel.FLASH_ATTN)(torch.arange(64).reshape(2, 32))
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked and all(asked), "train.deterministic holds for this package, too"


class NoWaiting(TorchDispatchMode):
    """What makes the CPU wait for a GPU is an error."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "masked_select", "unique_dim"), func
        return func(*args, **(kwargs or {}))


class NoIndex(TorchDispatchMode):
    """An index, which is copied to a GPU from the CPU, is an error."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "index" not in func.overloadpacket.__name__, func
        return func(*args, **(kwargs or {}))


def test_attention_to_documents_waits_for_no_gpu(monkeypatch):
    def varlen(q, k, v, bounds, bounds_k, longest, longest_k, **options):
        assert type(longest) is int
        return q * 1.0

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=varlen))
    documents = Documents.of(torch.randint(0, 2, (2, 32), generator=torch.Generator().manual_seed(0)).cumsum(1))
    for kernel in (Kernel.FLASH_ATTN, Kernel.MATH):
        built = GPT(shape_of(config(), 100), kernel)
        with NoWaiting():
            built(torch.arange(64).reshape(2, 32), documents=documents)


@pytest.mark.parametrize("recomputed", ["none", "full"])
@pytest.mark.parametrize("kernel", [Kernel.FLASH_ATTN, Kernel.SDPA_FLASH, Kernel.MATH])
def test_what_keeps_documents_apart_is_made_once_for_all_layers(monkeypatch, kernel: Kernel, recomputed: str):
    made = []
    for owner, name in ((Documents, "bounds"), (attention, "_blocked")):
        whole = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda given, name=name, whole=whole: (made.append(name), whole(given))[1])
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=lambda q, *_, **__: q * 1.0))
    built = GPT(shape_of(config(model={"layers": 4}), 100), kernel)
    initialize(built, 1)
    recompute.apply(built, recomputed, 1)
    documents = Documents.of(torch.arange(32).expand(2, 32) // 9)
    torch.autograd.backward(built(torch.arange(64).reshape(2, 32), documents=documents).sum())
    assert made == ["bounds" if kernel is Kernel.FLASH_ATTN else "_blocked"]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 1, 2), (8, 2, 4), (12, 4, 3), (12, 4, 6)])
def test_ranks_take_the_keys_of_their_queries_without_an_index(heads, kv_heads, size):
    shape = GPTShape(64, 1, 8 * heads, heads, kv_heads, 64, 16)
    keys = torch.randn(2, kv_heads, 16, 8)
    group, count = heads // kv_heads, heads // size
    for rank in range(size):
        with NoIndex():
            found = attended(keys, kv_shares(shape, size, rank))
        expected = keys[:, [head // group for head in range(rank * count, (rank + 1) * count)]]
        assert torch.equal(found.repeat_interleave(count // found.shape[1], 1), expected)


def test_bounds_of_parts_are_those_of_their_samples():
    numbers = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0], [0, 1, 2, 2, 3, 3]])
    whole = Documents.of(numbers)
    assert (whole.starts.shape, whole.longest) == ((3, 4), 6)
    found = [part.bounds().unique().tolist() for part in whole.split(1)]
    assert found == [[0, 2, 5, 6], [0, 6], [0, 1, 2, 4, 6]]
    assert whole.bounds().unique().tolist() == [0, 2, 5, 6, 12, 13, 14, 16, 18]
    assert (whole.bounds().diff() >= 0).all()


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


def test_asking_for_flash_where_it_does_not_run_is_an_error_and_auto_falls_back(monkeypatch):
    def broken(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("No available kernel. Aborting execution.")

    cpu, shape = torch.device("cpu"), shape_of(config(), 100)
    assert kernels.choose("auto", shape, cpu, torch.bfloat16) is Kernel.SDPA_FLASH
    dropping = shape_of(config(model={"attention_dropout": 0.1}), 100)
    assert kernels.choose("auto", dropping, cpu, torch.bfloat16) is Kernel.MATH
    with pytest.raises(ConfigError, match=r"model\.attention = flash_attn: .*CUDA"):
        kernels.choose("flash_attn", shape, cpu, torch.bfloat16)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", broken)
    assert kernels.choose("auto", shape, cpu, torch.bfloat16) is Kernel.MATH
    assert kernels.choose("math", shape, cpu, torch.bfloat16) is Kernel.MATH
    with pytest.raises(ConfigError, match=r"model\.attention = sdpa_flash"):
        kernels.choose("sdpa_flash", shape, cpu, torch.bfloat16)
