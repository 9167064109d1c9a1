"""Attention: which tokens see which, its kernels, documents that are kept apart, and rotations."""

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import SHAPES, config, gpt
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from resilient.worker import ConfigError
from trainer import attention, kernels
from trainer.attention import Apart, Kernel, alibi_bias, alibi_slopes
from trainer.data.bounds import Documents
from trainer.model import GPT, Block, attended, rotary_table, rotate
from trainer.parallel import recompute
from trainer.parallel.tensor import kv_shares
from trainer.shape import GPTShape, shape_of
from trainer.weights import initialize


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
