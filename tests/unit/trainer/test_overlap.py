"""Tensor parallelism whose exchanges go on beside products: the same training, and no transfer without a product beside it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from layouts import BASE, Sections, merged, name_of, spread
from soak import soaked, soaked_after
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_ranks import run_ranks, steps, train, trained, write_config

from resilient.worker import ConfigError, load_config

SMALL: Sections = merged(BASE, {"model": {"layers": 2}, "train": {"steps": 3}})
OTHER: Sections = {"model": {"mlp": "gelu", "norm": "layernorm", "bias": True, "kv_heads": 1, "tie_embeddings": True}}


def beside(tp: int, pp: int = 1, **more: object) -> Sections:
    return spread(tp, pp, async_tp=True, **more)


CASES = [
    (2, {}, beside(2)),
    (3, {"model": {"heads": 12, "hidden": 48, "kv_heads": 4, "ffn_hidden": 96, "seq_len": 18, "bias": True}}, beside(3)),
    soaked(4, OTHER, beside(4)),
    soaked(4, {}, beside(2, zero_stage=3)),
    soaked(4, OTHER, beside(2, 2)),
    soaked(8, {"model": {"layers": 4}}, beside(2, 2, schedule="interleaved_1f1b")),
    soaked(2, {"train": {"recompute": "full"}}, beside(2)),
    soaked(2, {"train": {"recompute": "selective"}}, beside(2)),
]


@pytest.mark.parametrize(("ranks", "sections", "layout"), soaked_after(1, CASES), ids=name_of)
def test_exchanges_beside_products_train_like_one_process(dataset: Path, tmp_path: Path, ranks: int, sections: Sections, layout):
    alone = steps(trained(write_config(tmp_path / "alone", dataset, **merged(SMALL, sections)), 1))
    found = steps(trained(write_config(tmp_path / "many", dataset, **merged(SMALL, sections, layout)), ranks))
    assert found == [pytest.approx(line, rel=1e-5) for line in alone]


@pytest.mark.soak
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_computing_again_with_exchanges_beside_products_changes_no_bit(dataset: Path, tmp_path: Path, recompute: str):
    kept = steps(trained(write_config(tmp_path / "kept", dataset, **merged(SMALL, beside(2))), 2))
    again: Sections = {"train": {"recompute": recompute}}
    assert steps(trained(write_config(tmp_path / "again", dataset, **merged(SMALL, beside(2), again)), 2)) == kept


# -- what is exchanged ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ending:
    """Transfers, whose end is told before it is waited for."""

    works: list[dist.Work]
    tell: Callable[[], None]

    def wait(self) -> None:
        self.tell()
        for work in self.works:
            work.wait()


class Watched(TorchDispatchMode):
    """Of each transfer that ends in it, how many products were computed beside it; and the collectives of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.beside: list[int] = []
        self.collectives = 0
        self._products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self._products += name.startswith(("aten::mm", "aten::addmm", "aten::bmm"))
        self.collectives += name.startswith(("_c10d_functional::all_gather", "_c10d_functional::reduce_scatter"))
        return func(*args, **(kwargs or {}))

    def begin(self, begin: Callable[..., list[dist.Work]]) -> Callable[..., list[Any]]:
        def begun(operations: list[dist.P2POp]) -> list[Any]:
            works, before = begin(operations), self._products
            return [Ending(works, lambda: self.beside.append(self._products - before))]

        return begun


def exchanged(config: Path) -> list[tuple[list[int], int]]:
    """On this rank, of each micro batch: products beside each transfer, and collectives."""
    from trainer.engine import Plain

    found: list[tuple[list[int], int]] = []
    whole = Plain.train

    def step(self: Plain, *args: Any) -> torch.Tensor:
        with Watched() as watched, mock.patch.object(dist, "batch_isend_irecv", watched.begin(dist.batch_isend_irecv)):
            result = whole(self, *args)
        found.append((watched.beside, watched.collectives))
        return result

    with mock.patch.object(Plain, "train", step):
        train(config)
    return found


def test_each_transfer_has_a_product_beside_it_and_layers_have_no_collective(dataset: Path, tmp_path: Path):
    layers, passes, size = 2, 4, 2
    one: Sections = {"train": {"steps": 1}}
    transfers = layers * passes * 8 * (size - 1)  # before and after attention and MLP, in both passes
    ends = passes * 4  # what the embedding scatters and the head gathers, in both passes
    for ((products, collectives),) in run_ranks(2, exchanged, write_config(tmp_path, dataset, **merged(SMALL, one, beside(2)))):
        assert len(products) == transfers
        assert min(products) >= 1
        assert collectives == ends


REFUSED: list[tuple[Sections, str]] = [
    (beside(2, sequence_parallel=False), "exchanges parts of the sequence"),
    (beside(2, 2, schedule="zero_bubble"), "zero_bubble splits the backward pass"),
]


@pytest.mark.parametrize(("sections", "said"), REFUSED, ids=name_of)
def test_exchanges_beside_products_are_refused_where_they_cannot_be(dataset: Path, tmp_path: Path, sections: Sections, said: str):
    with pytest.raises(ConfigError, match=said):
        load_config(write_config(tmp_path, dataset, **merged(SMALL, sections)), [])
