"""Whether the node computes right: a matrix product and an all-reduce, each compared with what must come out, number for number.

The matrices have the form a_ik = u_i + v_k and b_kj = w_k + z_j with small whole numbers, so that the product follows from a few
sums of whole numbers, and every partial sum on the way is exact in fp32: a single wrong bit shows. Runs as one process per rank,
which on CPUs goes from core to core of its share.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.health.report import Finding
from resilient.visible_gpus import VARIABLE

if TYPE_CHECKING:
    import torch

LEAST_ROUNDS = 3
ON_CPU, ON_GPU = 384, 4096  # rows and columns
REDUCE_ROUNDS = 3
PERIOD = 251


@dataclass(frozen=True)
class Ranks:
    """What the processes of one node's check have in common.

    Attributes:
        count: of ranks.
        device: "cpu" or "cuda".
        meeting: a file, not there yet, in an existing directory, where they find each other.
        limit_s: of the all-reduce.
        numbers: in each all-reduce.
        devices: of the ranks, where they are not numbered as these are.
        visible: CUDA_VISIBLE_DEVICES of the ranks, which count among these; None: as it is, with all that is there.
    """

    count: int
    device: str
    meeting: Path
    limit_s: float
    numbers: int = 1 << 16
    devices: tuple[int, ...] = ()
    visible: str | None = None

    def device_of(self, rank: int) -> int:
        """The number of a rank's device."""
        return self.devices[rank] if self.devices else rank

    def ordinal_of(self, rank: int) -> int:
        """The number by which CUDA knows it."""
        return self.device_of(rank) if self.visible is None else rank


def names(rank: int) -> tuple[str, str]:
    """The findings that `check` gives for a rank, or for its device."""
    return f"matmul {rank}", f"all-reduce {rank}"


def check(rank: int, ranks: Ranks) -> Iterator[Finding]:
    """Both checks of one rank, in a process of its own."""
    if ranks.visible is not None:  # before CUDA is asked for anything: where a GPU is lost it may refuse all
        os.environ[VARIABLE] = ranks.visible
    import torch

    torch.set_num_threads(1)
    yield matmul(rank, ranks)
    yield all_reduce(rank, ranks)


def matmul(rank: int, ranks: Ranks, multiply: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None" = None) -> Finding:
    """The matrix products of one rank's device, or of its share of the cores.

    Args:
        multiply: what computes the product, if not torch.
    """
    import torch

    multiply = multiply or torch.matmul
    number, ordinal = ranks.device_of(rank), ranks.ordinal_of(rank)
    name = names(number)[0]
    places: list[int | None]
    began = time.perf_counter()
    if ranks.device == "cuda":
        if ordinal >= torch.cuda.device_count():
            text = f"torch sees {torch.cuda.device_count()} GPUs, and rank {number} needs one of its own; is the driver loaded?"
            return Finding(name, "fail", text)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        places, device, dtypes, size = [None] * LEAST_ROUNDS, f"cuda:{ordinal}", [torch.float32, torch.bfloat16], ON_GPU
    else:
        places, device, dtypes, size = list(_cores(rank, ranks.count)), "cpu", [torch.float32], ON_CPU
    rounds = 0
    for dtype in dtypes:
        a, b, product = _matrices(size, device, dtype)
        for place in places:
            at = f"core {place}" if place is not None else f"GPU {number}"
            with _Pinned(place):
                wrong = _difference(multiply(a, b), product)
            if wrong:
                text = (
                    f"{at} computes wrong: in a {size} × {size} product in {str(dtype)[6:]}, {wrong}; take the node out of service"
                )
                return Finding(name, "fail", text, device=number if ranks.device == "cuda" else None)
            rounds += 1
    took_s = time.perf_counter() - began
    what = f"GPU {number}" if ranks.device == "cuda" else f"{len(set(places))} core{'s' * (len(set(places)) > 1)}"
    return Finding(name, "ok", f"{rounds} products on {what} are right", {"rounds": rounds, "took_s": round(took_s, 4)})


def all_reduce(rank: int, ranks: Ranks, reduce: "Callable[[torch.Tensor], object] | None" = None) -> Finding:
    """A sum over all ranks that must be exact. Raises whatever torch does when another rank does not come to it.

    Args:
        reduce: what sums up over the process group, in place, if not torch.
    """
    import torch
    from torch import distributed

    reduce = reduce or distributed.all_reduce
    backend, device = ("nccl", f"cuda:{ranks.ordinal_of(rank)}") if ranks.device == "cuda" else ("gloo", "cpu")
    if ranks.device == "cuda":
        torch.cuda.set_device(ranks.ordinal_of(rank))
    distributed.init_process_group(
        backend, init_method=f"file://{ranks.meeting}", rank=rank, world_size=ranks.count, timeout=timedelta(seconds=ranks.limit_s)
    )
    pattern = torch.arange(ranks.numbers, device=device) % PERIOD
    must = pattern * (ranks.count * (ranks.count + 1) // 2)
    took_s, wrong = float("inf"), ""
    for _ in range(REDUCE_ROUNDS):  # all of them, whatever comes out: the other ranks count on it
        numbers = (pattern * (rank + 1)).to(torch.float32)
        began = time.perf_counter()
        reduce(numbers)
        if ranks.device == "cuda":
            torch.cuda.synchronize()
        took_s = min(took_s, time.perf_counter() - began)
        wrong = wrong or _difference(numbers, must)
    if wrong:
        text = f"the sum of {ranks.count} ranks over {backend} is wrong: {wrong}; the link or the memory between them is bad"
        return Finding(names(ranks.device_of(rank))[1], "fail", text)
    rate = numbers.nbytes / took_s
    text = f"{REDUCE_ROUNDS} sums over {ranks.count} rank{'s' * (ranks.count > 1)} by {backend} are right"
    return Finding(names(ranks.device_of(rank))[1], "ok", text, {"rate_bytes_per_s": round(rate), "took_s": round(took_s, 6)})


def _matrices(size: int, device: str, dtype: "torch.dtype") -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """Two matrices, and their product in whole numbers; all (size, size)."""
    import torch

    count = torch.arange(size)
    u, v, w, z = ((factor * count) % modulus - modulus // 2 for factor, modulus in ((5, 13), (7, 11), (3, 7), (11, 9)))
    a, b = u[:, None] + v, w[:, None] + z
    product = size * u[:, None] * z + u[:, None] * w.sum() + v.sum() * z + (v * w).sum()
    return a.to(device, dtype), b.to(device, dtype), product.to(device, dtype)


def _difference(found: "torch.Tensor", must: "torch.Tensor") -> str:
    """What is wrong, in words; empty if nothing is."""
    bad = (found != must).flatten()
    count = int(bad.sum())
    if not count:
        return ""
    first = int(bad.nonzero()[0])
    is_, must_be = (float(numbers.flatten()[first]) for numbers in (found, must))
    return f"{count:,} of {bad.numel():,} numbers are wrong, the first is {is_:g} and must be {must_be:g}"


def _cores(rank: int, count: int) -> list[int]:
    """The cores that a rank looks at: all of its share, and at least so many rounds."""
    cores = sorted(os.sched_getaffinity(0))
    share = cores[rank % len(cores) :: count] or [cores[rank % len(cores)]]
    return share * -(-LEAST_ROUNDS // len(share))


class _Pinned:
    """This process on one core for a while, where that is allowed."""

    def __init__(self, core: int | None) -> None:
        self._core = core
        self._before = os.sched_getaffinity(0)

    def __enter__(self) -> None:
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})

    def __exit__(self, *_: object) -> None:
        os.sched_setaffinity(0, self._before)
