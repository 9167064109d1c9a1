"""`ckpt diff`: two checkpoints, number by number, whatever layouts wrote them.

Owns the comparison. Holds a few boxes of an array at a time; every chunk that is read is compared with its checksum.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpoint.layout import ArrayInfo
from checkpoint.loading import Opened
from checkpoint.state import JSON
from checkpoint.tools import stream
from checkpoint.tools.refusal import WRONG, Refusal

_AT_ONCE = 1 << 18  # elements; what is computed from them stays in the cache

Numbers = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Tolerance:
    """Elements a and b are close where |a - b| <= atol + rtol * max(|a|, |b|), where both are NaN, and where they are equal.

    Raises Refusal for numbers that are negative or not finite.
    """

    atol: float = 0.0
    rtol: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= value < math.inf for value in (self.atol, self.rtol)):
            raise Refusal(f"a tolerance is a number from 0 on; atol is {self.atol} and rtol {self.rtol}", WRONG)


@dataclass
class ArrayDiff:
    """What one array of both checkpoints has come to.

    Attributes:
        name: of the array.
        dtypes: in A and B.
        shapes: in A and B; where they are not the same, nothing is compared.
        equal: no element differs, or each is close where a tolerance is given; shapes are the same, and without a tolerance types.
        bit_equal: type, shape and every bit are the same.
        differing: elements whose bits are not the same; where types are not, whose values are not.
        share: of the differing elements in all, 0 to 1.
        beyond: elements that are not close; None without a tolerance.
        max_abs: the largest |a - b|; NaN is left out.
        max_rel: the largest |a - b| / max(|a|, |b|); NaN is left out, and infinity against a number is 1.
        nan_a: NaNs in A.
        nan_b: NaNs in B.
    """

    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    differing: int = 0
    beyond: int | None = None
    max_abs: float = 0.0
    max_rel: float = 0.0
    nan_a: int = 0
    nan_b: int = 0

    @property
    def bit_equal(self) -> bool:
        return self.dtypes[0] == self.dtypes[1] and self.shapes[0] == self.shapes[1] and not self.differing

    @property
    def equal(self) -> bool:
        return self.bit_equal if self.beyond is None else self.shapes[0] == self.shapes[1] and not self.beyond

    @property
    def share(self) -> float:
        return self.differing / max(1, math.prod(self.shapes[0]))


@dataclass
class Diff:
    """What two checkpoints have come to.

    Attributes:
        a: path of the first.
        b: path of the second.
        arrays: those of both, by name.
        only_a: names of arrays that B lacks.
        only_b: names of arrays that A lacks.
        state: keys of the small state that differ, with both values; "." separates levels.
        equal: all arrays are, and none is missing on either side. The state has no say in it.
    """

    a: Path
    b: Path
    arrays: list[ArrayDiff] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    state: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return not self.only_a and not self.only_b and all(each.equal for each in self.arrays)


class Missing:
    """Stands for a key of the state that one side lacks."""

    def __repr__(self) -> str:
        return "(missing)"


MISSING = Missing()


class Comparison:
    """Two checkpoints that are about to be compared. Raises DamagedCheckpoint, Refusal where `only` fits nothing."""

    def __init__(self, a: Path, b: Path, *, only: Sequence[str] = (), tolerance: Tolerance | None = None) -> None:
        self._sources = Opened(a), Opened(b)
        self._arrays = tuple(source.contents.arrays for source in self._sources)
        self._names = stream.chosen([*{**self._arrays[0], **self._arrays[1]}], only)
        self._tolerance = tolerance

    @property
    def size_bytes(self) -> int:
        """That will be read, chunks that are read twice aside."""
        return sum(stream.size_bytes(infos[name]) for infos in self._arrays for name in self._common if self._alike(name))

    @property
    def _common(self) -> list[str]:
        return [name for name in self._names if all(name in infos for infos in self._arrays)]

    def _alike(self, name: str) -> bool:
        return self._arrays[0][name].shape == self._arrays[1][name].shape

    def run(self, progress: Callable[[int], None] | None = None) -> Diff:
        """Compare. Raises DamagedCheckpoint.

        Args:
            progress: called with the bytes compared since its last call.
        """
        one, other = self._sources
        found = Diff(one.path, other.path)
        found.only_a = [name for name in self._names if name not in self._arrays[1]]
        found.only_b = [name for name in self._names if name not in self._arrays[0]]
        found.state = differing_state(one.contents.state, other.contents.state)
        with closing(one), closing(other), ThreadPoolExecutor(2, thread_name_prefix="checkpoint-diff") as pool:
            for name in self._common:
                infos = self._arrays[0][name], self._arrays[1][name]
                diff = ArrayDiff(name, (infos[0].dtype, infos[1].dtype), (infos[0].shape, infos[1].shape))
                if self._tolerance is not None:
                    diff.beyond = 0
                if self._alike(name):
                    for a, b in self._read(infos, pool):
                        _add(diff, a, b, self._tolerance)
                        if progress is not None:
                            progress(a.nbytes + b.nbytes)
                found.arrays.append(diff)
        return found

    def _read(self, infos: tuple[ArrayInfo, ArrayInfo], pool: ThreadPoolExecutor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Both arrays' boxes, the next ones being read meanwhile."""
        size = max(info.element.size_bytes for info in infos)
        ahead = None
        for box in stream.boxes(infos[0].shape, size, [info.chunk for info in infos]):
            work = [pool.submit(stream.read, source, info, box) for source, info in zip(self._sources, infos, strict=True)]
            if ahead is not None:
                yield ahead[0].result(), ahead[1].result()
            ahead = work
        if ahead is not None:
            yield ahead[0].result(), ahead[1].result()


def differing_state(a: Mapping[str, JSON], b: Mapping[str, JSON]) -> dict[str, tuple[Any, Any]]:
    """The keys that differ, with both values, MISSING where there is none. Pure."""
    flat = _flat(a, ""), _flat(b, "")
    both = ((key, flat[0].get(key, MISSING), flat[1].get(key, MISSING)) for key in sorted({**flat[0], **flat[1]}))
    return {key: (one, other) for key, one, other in both if type(one) is not type(other) or one != other}


def _flat(value: Mapping[str, JSON], above: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, inside in value.items():
        name = f"{above}{key}"
        if isinstance(inside, Mapping) and inside:
            found |= _flat(inside, f"{name}.")
        else:
            found[name] = inside
    return found


def _add(diff: ArrayDiff, a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance | None) -> None:
    """Count what two boxes of an array come to."""
    one, other = a.reshape(-1), b.reshape(-1)
    for start in range(0, len(one), _AT_ONCE):
        _add_some(diff, one[start : start + _AT_ONCE], other[start : start + _AT_ONCE], tolerance)


def _add_some(diff: ArrayDiff, a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance | None) -> None:
    same_type = a.dtype == b.dtype
    if same_type and np.array_equal(_bytes(a), _bytes(b)):
        count = _nans(a)
        diff.nan_a += count
        diff.nan_b += count
        return
    diff.nan_a += _nans(a)
    diff.nan_b += _nans(b)
    if same_type:
        differs = _bits_differ(_bytes(a), _bytes(b), a.element_size())
        where = torch.from_numpy(np.flatnonzero(differs))
        one, other = _numbers(a, where), _numbers(b, where)
        diff.differing += len(where)
    else:
        one, other = _numbers(a).astype(_common_type(a, b)), _numbers(b).astype(_common_type(a, b))
        diff.differing += int(np.count_nonzero((one != other) & ~(np.isnan(one) & np.isnan(other))))
    _measure(diff, one, other, tolerance)


def _measure(diff: ArrayDiff, a: Numbers, b: Numbers, tolerance: Tolerance | None) -> None:
    """Largest differences, and how many are beyond the tolerance."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if a.dtype.kind in "iu":
            # Two's complement: the difference of 64-bit integers is exact as an unsigned one.
            distance = (np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)).astype(np.float64)
            a, b = a.astype(np.float64), b.astype(np.float64)
        else:
            distance = np.where(a == b, 0.0, np.abs(a - b))
        largest = np.maximum(np.abs(a), np.abs(b))
        ratio = np.where(distance == 0, 0.0, np.where(np.isinf(distance) & np.isinf(largest), 1.0, distance / largest))
        sound = ~np.isnan(distance)
        diff.max_abs = max(diff.max_abs, float(np.max(distance, initial=0.0, where=sound)))
        diff.max_rel = max(diff.max_rel, float(np.max(ratio, initial=0.0, where=sound & ~np.isnan(ratio))))
        if tolerance is not None:
            # Infinity is close to nothing but itself.
            within = np.isfinite(largest) & (distance <= tolerance.atol + tolerance.rtol * largest)
            close = within | (distance == 0) | (np.isnan(a) & np.isnan(b))
            diff.beyond = (diff.beyond or 0) + int(np.count_nonzero(~close))


def _bytes(data: torch.Tensor) -> Numbers:
    return data.view(torch.uint8).numpy()


def _bits_differ(a: Numbers, b: Numbers, size: int) -> Numbers:
    """Which elements differ, from their bytes."""
    word = min(size, 8)
    words = np.not_equal(a.view(f"u{word}"), b.view(f"u{word}"))
    differs: Numbers = np.logical_or.reduce(words.reshape(-1, size // word), axis=1)
    return differs


def _nans(data: torch.Tensor) -> int:
    if not (data.dtype.is_floating_point or data.dtype.is_complex):
        return 0
    return int(torch.isnan(data.float() if data.element_size() == 1 else data).sum())


def _numbers(data: torch.Tensor, where: torch.Tensor | None = None) -> Numbers:
    """The elements, or those at `where`: as float64, complex128, int64 or uint64, in which none of them changes."""
    if data.dtype.is_floating_point or data.dtype.is_complex:
        wide = data.to(torch.complex128 if data.dtype.is_complex else torch.float64)
        return (wide if where is None else wide[where]).numpy()
    numbers: Numbers = data.numpy()
    numbers = numbers if where is None else numbers[where.numpy()]
    return numbers.astype(np.uint64 if numbers.dtype.kind == "u" else np.int64)


def _common_type(a: torch.Tensor, b: torch.Tensor) -> type[np.complex128] | type[np.float64]:
    return np.complex128 if a.dtype.is_complex or b.dtype.is_complex else np.float64
