"""The loss by chunks: the numbers and gradients of the plain formula, on any layout, in the memory of one chunk."""

import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from layouts import BASE, Sections, merged, name_of, spread
from soak import soaked, soaked_after
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer_ranks import run_ranks, steps, textbook, train, write_config, write_dataset

from resilient.worker import Config, load_config, settle
from trainer.chunks import block_rows, chunk_rows, loss_bytes
from trainer.loss import IGNORED, CrossEntropy
from trainer.memory import memory
from trainer.shape import shape_of

VOCABULARY = 250_000


def drawn(tokens: tuple[int, int], hidden: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head's weight, and targets of which some are ignored."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(*tokens, hidden, generator=random).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=random).to(dtype).requires_grad_()
    targets = torch.randint(vocab, tokens, generator=random)
    targets[0, 1:3] = IGNORED
    return x, weight, targets


LIMITS = {"one chunk": 1 << 30, "chunks of blocks": 6 * 61 * 4, "a token at a time": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limit_bytes", LIMITS.values(), ids=LIMITS)
def test_the_loss_and_its_gradients_are_those_of_the_plain_formula(limit_bytes: int, dtype: torch.dtype):
    found = []
    for chunked in (True, False):
        x, weight, targets = drawn((3, 7), 16, 61, dtype)
        if chunked:
            loss = CrossEntropy(limit_bytes=limit_bytes)(x, weight, targets)
        else:
            logits = F.linear(x, weight).float().flatten(0, 1)
            loss = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED)
        torch.autograd.backward(loss * 0.3)
        assert x.grad is not None and weight.grad is not None
        found.append([loss.detach(), x.grad.float(), weight.grad.float()])
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(*found, **near)
    assert not found[0][1][0, 1:3].any()


def test_a_token_that_is_all_but_certain_still_has_a_gradient_in_bf16():
    x, weight = torch.ones(1, 1, 1, dtype=torch.bfloat16, requires_grad=True), torch.zeros(2, 1, dtype=torch.bfloat16)
    weight[0] = 8.0
    torch.autograd.backward(CrossEntropy()(x, weight.requires_grad_(), torch.zeros(1, 1, dtype=torch.int64)))
    expected = 1 / (1 + torch.tensor(8.0).exp())  # of the other token; of this one, the same below zero
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.float().flatten(), torch.stack([-expected, expected]), rtol=1e-2, atol=0)


def test_a_gradient_that_was_handed_on_is_not_made_up_a_second_time():
    loss = CrossEntropy()(*drawn((1, 4), 8, 5, torch.float32))
    torch.autograd.backward(loss, retain_graph=True)
    with pytest.raises(RuntimeError, match="asked for twice"):
        torch.autograd.backward(loss)


# -- layouts -------------------------------------------------------------------------------------------------------------


def in_chunks(config: Path) -> list[dict[str, Any]]:
    """Train on this rank with the logits of three tokens at a time at the most."""
    with mock.patch("trainer.loss.chunk_rows", lambda tokens, *_: min(tokens, 3)):
        return train(config)


ROOM: Sections = {"model": {"layers": 2}, "train": {"steps": 3}}
LAYOUTS = [
    (1, {}),
    (2, {**spread(2, 1), "model": {"tie_embeddings": True, "vocab_multiple": 7}}),
    (2, {**spread(1, 1, zero_stage=3), "model": {"tie_embeddings": True}}),
    (2, {**spread(1, 2, schedule="zero_bubble"), "model": {"layers": 4}}),
    soaked(4, {**spread(2, 2, schedule="gpipe", sequence_parallel=False), "model": {"tie_embeddings": True}}),
    soaked(4, {**spread(2, 1, zero_stage=2), "train": {"precision": "fp32"}}),
]


@pytest.mark.parametrize(("ranks", "sections"), soaked_after(1, LAYOUTS), ids=name_of)
def test_in_chunks_every_layout_trains_like_one_process(tmp_path: Path, ranks: int, sections: Sections):
    dataset = write_dataset(tmp_path / "walks")
    config = write_config(tmp_path, dataset, **merged(BASE, ROOM, sections))
    expected = textbook(load_config(config, ["parallel={}"]))
    for told in run_ranks(ranks, in_chunks, config):
        if isinstance(told, Exception):
            raise told
        assert steps(told) in ([], [pytest.approx(line, rel=1e-5) for line in expected])


# -- memory --------------------------------------------------------------------------------------------------------------


class Held(TorchDispatchMode):
    """Counts the bytes of tensors that are made in it and still there, and the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if not isinstance(each, Tensor):
                continue
            storage = each.untyped_storage()
            if storage._cdata not in given | self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return found

    def _gone(self, which: int, size_bytes: int) -> None:
        self._known.discard(which)
        self.now -= size_bytes


@pytest.mark.parametrize("differentiated", soaked_after(1, [True, False]))
def test_a_large_vocabulary_takes_the_memory_of_one_chunk_and_what_the_plan_says(differentiated: bool):
    x, weight, targets = drawn((2, 96), 8, VOCABULARY, torch.bfloat16)
    limit_bytes = 25 << 20
    rows = chunk_rows(targets.numel(), VOCABULARY, 2, limit_bytes)
    assert rows == 48
    with Held() as held, torch.set_grad_enabled(differentiated):
        loss = CrossEntropy(limit_bytes=limit_bytes)(x, weight, targets)
        if differentiated:
            torch.autograd.backward(loss)
    left = weight.nbytes + x.nbytes if differentiated else 0
    assert held.most - left <= 1.5 * rows * VOCABULARY * 2
    assert held.most == pytest.approx(left + loss_bytes(targets.numel(), VOCABULARY, 2, limit_bytes, cpu=True), rel=0.02)


def test_chunks_follow_from_sizes_alone():
    assert chunk_rows(8192, 50_432, 2) == 8192
    assert chunk_rows(8192, VOCABULARY, 2) == 2048
    assert chunk_rows(8192, VOCABULARY // 2, 2) == 4096
    assert chunk_rows(1000, 1 << 40, 2) == 1
    assert chunk_rows(0, VOCABULARY, 2) == 0


def test_a_cpu_has_no_more_logits_in_fp32_at_a_time_than_its_cache_holds():
    assert block_rows(4096, cpu=True) * 4096 * 4 == 1 << 20
    assert block_rows(4096, cpu=False) * 4096 * 4 == 64 << 20
    assert block_rows(VOCABULARY * 2, cpu=True) == 1
    assert block_rows(61, 6 * 61 * 4 * 16, cpu=True) == 6


@pytest.mark.parametrize(("schedule", "waiting"), [("1f1b", 1), ("gpipe", 8)])
def test_the_plan_counts_one_chunk_of_logits_and_the_gradients_that_wait(schedule: str, waiting: int):
    parallel = {"pp": 2, "tp": 2, "schedule": schedule}
    model = {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 2048, "vocab_size": VOCABULARY}
    given = {"parallel": parallel, "model": model, "train": {"precision": "bf16", "micro_batch_size": 4, "global_batch_size": 32}}
    config = Config.model_validate(given)
    layout = settle(config, 4)
    large, small = (memory(config, shape_of(config, vocab), layout, 1).activations for vocab in (VOCABULARY, 128))
    assert layout.accumulation == 8
    vocab = shape_of(config, VOCABULARY).vocab // 2
    head = (vocab - 64) * 64 * 2 * waiting
    assert large - small == head + loss_bytes(8192, vocab, 2, cpu=False) - loss_bytes(8192, 64, 2, cpu=False)


def chunks_of_this_rank(limit_bytes: int) -> list[int]:
    """Tokens of each chunk, of a vocabulary that the ranks share unevenly."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    weight = distribute_tensor(torch.ones(5, 8), init_device_mesh("cpu", (2,)), [Shard(0)])
    asked: list[int] = []

    def losses(self: CrossEntropy, logits: Tensor, *args: Any, **options: Any) -> Tensor:
        asked.append(len(logits))
        return torch.zeros(len(logits))

    with mock.patch.object(CrossEntropy, "_losses", losses), torch.no_grad():
        CrossEntropy(limit_bytes=limit_bytes)(torch.ones(1, 4, 8), weight, torch.zeros(1, 4, dtype=torch.long))
    return asked


def test_ranks_that_share_a_vocabulary_unevenly_compute_the_same_chunks():
    """Else they would reduce numbers of different tokens, or wait for each other without end."""
    assert run_ranks(2, chunks_of_this_rank, 2 * 4 * 4) == [[2, 2], [2, 2]]
