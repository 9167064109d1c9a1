"""Whether ranks still hold the same: a number that each rank makes of a few elements of every tensor, and which a snapshot has.

Owns which elements these are. The number is made where they lie, so that nothing waits for a GPU unless the number is read.
"""

from collections.abc import Callable, Sequence

import torch

from checkpoint.local_shard import LocalShard

ARRAY = "ranks/fingerprint"
SAMPLES = 16  # elements of a tensor, at the most

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, and its multiples have bits at all places (Knuth's multiplicative hashing)


class Fingerprint:
    """Of tensors that are to be the same on all ranks, at the same places in each list.

    Args:
        tensors: how each is found; it may be replaced by another one of its shape.
    """

    def __init__(self, tensors: Sequence[Callable[[], torch.Tensor]]) -> None:
        self._get = tensors
        self._found: list[tuple[torch.Tensor, int] | None] = [None] * len(tensors)  # as it was last, and where it lay
        self._samples: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
        self._groups: list[tuple[list[torch.Tensor], torch.Tensor]] = []  # samples that lie together, and their factors
        devices = [get().device for get in tensors]
        self._value = torch.zeros(
            1, dtype=torch.int64, device=next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
        )

    def local_shard(self, rank: int, count: int) -> LocalShard:
        """A row with the number as it is now."""
        with torch.no_grad():
            self._gather()
        return shard(self._value.unsqueeze(0), rank, count)

    def read(self) -> int:
        """The number now; waits for the GPU that it is on."""
        with torch.no_grad():
            self._gather()
        return int(self._value)

    def _gather(self) -> None:
        moved = False
        for place, get in enumerate(self._get):
            tensor, before = get(), self._found[place]
            if before is None or tensor is not before[0] or tensor.data_ptr() != before[1]:
                self._found[place], self._samples[place], moved = (tensor, tensor.data_ptr()), samples(tensor), True
        if moved:
            self._group()
        self._value.zero_()
        for several, factors in self._groups:
            part = (torch.cat(several).to(torch.int64) * factors).sum()
            self._value += part.to(self._value.device, non_blocking=True)

    def _group(self) -> None:
        found: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for each in self._samples:
            found.setdefault((each.dtype, each.device), []).append(each)
        self._groups, first = [], 1
        for (_, device), several in found.items():
            end = first + sum(map(len, several))
            self._groups.append((several, torch.arange(first, end, device=device) * _FACTOR))
            first = end


def shard(rows: torch.Tensor, first: int, count: int) -> LocalShard:
    """Rows of ranks. Args: rows: (ranks, 1); first: the rank of the first one; count: of the ranks that write, or have written."""
    return LocalShard(ARRAY, (count, 1), (first, 0), rows, (1, 1))


def samples(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a few elements from everywhere in a tensor, as a view of it with one dimension."""
    whole = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    count = min(SAMPLES, max(whole.shape, default=1)) if whole.numel() else 0
    stride, offset = 0, whole.storage_offset()
    for length, apart in zip(whole.shape, whole.stride(), strict=True) if count else ():
        step = length // count  # along a diagonal; in the middle of a dimension that has fewer elements
        stride += step * apart
        offset += (length - step * (count - 1)) // 2 * apart
    return whole.as_strided((count,), (stride,), offset).view(BITS[whole.element_size()])
