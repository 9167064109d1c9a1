"""What `selective` computes again, and that it changes no number."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from soak import soaked_after
from torch.utils._python_dispatch import TorchDispatchMode

from resilient.worker import Config
from trainer.attention import Kernel
from trainer.model import GPT
from trainer.parallel import recompute
from trainer.parallel.recompute import ATTENTION, PRODUCTS
from trainer.shape import shape_of
from trainer.weights import initialize

TOKENS = torch.arange(48).reshape(2, 24) % 50
DROPPING = {"dropout": 0.1, "attention_dropout": 0.1}


class Counted(TorchDispatchMode):
    """How often each operation is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[object] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def built(mode: str, kernel: Kernel = Kernel.SDPA_FLASH, every: int = 1, **model: object) -> GPT:
    small = {"layers": 2, "hidden": 32, "heads": 4, "seq_len": 24, "vocab_size": 50, **model}
    found = GPT(shape_of(Config.model_validate({"model": small}), 50), kernel)
    initialize(found, 1)
    recompute.apply(found, mode, every)
    return found


def gradients(model: GPT) -> list[torch.Tensor]:
    torch.manual_seed(7)
    torch.autograd.backward(model(TOKENS).float().square().sum())
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize(
    ("kernel", "model"),
    [
        (Kernel.SDPA_FLASH, {}),
        (Kernel.SDPA_FLASH, {"kv_heads": 2, "mlp": "gelu", "bias": True, "norm": "layernorm"}),
        (Kernel.SDPA_FLASH, {"dropout": 0.1}),
        (Kernel.MATH, DROPPING),
    ],
    ids=str,
)
def test_computing_again_changes_no_bit_of_any_gradient(mode: str, kernel: Kernel, model: dict[str, object]):
    expected = gradients(built("none", kernel, **model))
    for mine, theirs in zip(gradients(built(mode, kernel, **model)), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_selective_computes_norms_and_activations_again_and_no_product_and_no_flash_attention():
    counted = {}
    for mode in ("none", "selective", "full"):
        loss = built(mode)(TOKENS).float().square().sum()
        with Counted() as backward:
            torch.autograd.backward(loss)
        counted[mode] = backward.counts

    def of(mode: str, operations: frozenset[object]) -> int:
        return sum(counted[mode][each] for each in operations)

    assert of("selective", PRODUCTS) == of("none", PRODUCTS) < of("full", PRODUCTS)
    assert (of("selective", ATTENTION), of("full", ATTENTION)) == (0, 2)
    again = frozenset({torch.ops.aten.silu.default, torch.ops.aten.rsqrt.default})
    assert of("none", again) == 0
    assert of("selective", again) >= 2 * 2  # of each layer, one of each at least


def test_a_backward_pass_in_two_halves_takes_what_was_kept_twice():
    model = built("selective")
    x = model.embed(TOKENS, None).detach().requires_grad_()
    y = model.blocks["0"](x).square().sum()
    with Counted() as once:
        (first,) = torch.autograd.grad(y, x, retain_graph=True)
    with Counted() as again:
        (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)
    assert {each: again.counts[each] for each in PRODUCTS | ATTENTION} == {each: once.counts[each] for each in PRODUCTS | ATTENTION}


def test_only_every_so_many_layers_is_computed_again():
    loss = built("selective", every=2)(TOKENS).float().square().sum()
    with Counted() as backward:
        torch.autograd.backward(loss)
    assert backward.counts[torch.ops.aten.silu.default] == 1


def test_the_result_of_a_kernel_that_drops_scores_is_not_kept():  # its random numbers would stay undrawn when it is passed by
    (kernel, *_) = ATTENTION
    assert recompute.is_dear(kernel, attention=True)
    assert not recompute.is_dear(kernel, attention=False)
    assert recompute.is_dear(torch.ops.aten.mm.default, attention=False)


@pytest.mark.parametrize("mode", soaked_after(1, ["none", "selective", "full"]))
def test_a_compiled_layer_computes_no_product_again_unless_all_is(mode: str):
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition  # here, for they take a second
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[Counter[object]] = []

    def counting(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(Counter(node.target for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    model = built(mode)
    block = model.blocks["0"]
    block.attention.keep_rotations(torch.device("cpu"))
    torch._dynamo.reset()
    block.compile(
        backend=aot_autograd(fw_compiler=counting, bw_compiler=counting, partition_fn=min_cut_rematerialization_partition),
        fullgraph=True,
    )
    x = model.embed(TOKENS, None).detach().requires_grad_()
    torch.autograd.backward(block(x).square().sum())
    _, backward = graphs
    products = sum(backward[each] for each in PRODUCTS)
    flash = sum(backward[each] for each in ATTENTION)
    linear = 7
    if mode == "full":
        assert products > 2 * linear
    else:
        assert (products, flash) == (2 * linear, 0)
    assert x.grad is not None
