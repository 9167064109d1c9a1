"""The order of samples: a permutation of 0 … n-1 for every (seed, epoch), computed where it is needed and stored nowhere.

A Feistel network over the next even number of bits, walked again while it leads out of range (Black and Rogaway, 2002). Pure.
What it gives is part of what a run is: change nothing here, or a resumed run reads other data.
"""

from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.int64]]

_ROUNDS = 6
_MASK = (1 << 64) - 1


def _mixed(value: int) -> int:
    """A 64-bit finalizer (splitmix64; Steele, Lea and Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31


def _mixed_array(values: Any) -> Any:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def permute(indices: Numbers, count: int, seed: int, epoch: int) -> Numbers:
    """Where the permutation of (seed, epoch) takes these indices, each in 0 … count-1."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    key = _mixed(_mixed(seed & _MASK) ^ (epoch & _MASK))
    keys = [np.uint64(_mixed(key + number)) for number in range(_ROUNDS)]
    result = indices.astype(np.uint64)
    outside = np.ones(len(result), bool)
    with np.errstate(over="ignore"):
        while outside.any():
            values = result[outside]
            left, right = values >> shift, values & mask
            for round_key in keys:
                left, right = right, left ^ (_mixed_array(right ^ round_key) & mask)
            result[outside] = left << shift | right
            outside = result >= np.uint64(count)
    return result.astype(np.int64)
