"""Where the documents of samples begin, for kernels that take each document for a sequence of its own.

Made once for a batch, on the CPU, so that no layer asks a GPU for it. All samples have equally many starts, so that parts of a
batch are parts of its tensors; what is too many are documents without a token.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """The documents of a batch, or of a part of one.

    Attributes:
        numbers: of each token's document, (batch, seq).
        starts: of the documents in their sample, ascending, filled up with seq; (batch, most), int32.
        longest: no document has more tokens.
    """

    numbers: Tensor
    starts: Tensor
    longest: int

    @classmethod
    def of(cls, numbers: Tensor) -> "Documents":
        """From the numbers (batch, seq), on the CPU. The sizes are powers of two, lest kernels be compiled for each."""
        seq = numbers.shape[1]
        fresh = torch.ones_like(numbers, dtype=torch.bool)
        fresh[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        place = torch.arange(seq).expand(numbers.shape)
        most = min(seq, _power(int(fresh.sum(1).max())))
        starts = torch.where(fresh, place, seq).sort(1).values[:, :most]
        ends = torch.cat([starts[:, 1:], torch.full((len(starts), 1), seq)], 1)
        longest = min(seq, _power(int((ends - starts).max())))
        return cls(numbers, starts.to(torch.int32), longest)

    def split(self, samples: int) -> list["Documents"]:
        """Parts of so many samples."""
        pairs = zip(self.numbers.split(samples), self.starts.split(samples), strict=True)  # type: ignore[no-untyped-call]
        return [Documents(numbers, starts, self.longest) for numbers, starts in pairs]

    def bounds(self) -> Tensor:
        """Of all documents in the samples one after the other: each one's first token, and the end; nothing waits for a GPU."""
        batch, seq = self.numbers.shape
        first = torch.arange(batch, device=self.starts.device, dtype=torch.int32) * seq
        return torch.cat([(self.starts + first[:, None]).flatten(), first[-1:] + seq])


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
