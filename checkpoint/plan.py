"""The plan of a save: one layout for every array, from what all ranks say they hold.

Owns the agreement of all claims: that shapes and types are the same everywhere, that the blocks fill each array without gap
or overlap, and that of each block's replicas every one is there once. Pure; knows neither torch nor files.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from checkpoint.errors import CheckpointError
from checkpoint.layout import ArrayInfo, Shape, Strip, arrange


@dataclass(frozen=True)
class Claim:
    """A local shard without its data: what one rank says it holds."""

    array: str
    dtype: str
    shape: Shape
    offset: Shape
    extent: Shape
    unit: Shape
    replica: int
    replicas: int


def plan(claims: Sequence[Sequence[Claim]]) -> tuple[ArrayInfo, ...]:
    """The arrays, sorted by name, from the claims of each rank.

    Raises CheckpointError naming array and ranks where the claims contradict each other or leave a gap.
    """
    by_array: dict[str, list[tuple[int, Claim]]] = {}
    for rank, each in enumerate(claims):
        for claim in each:
            by_array.setdefault(claim.array, []).append((rank, claim))
    names = set(by_array)
    for name in names:
        for end in (place for place, letter in enumerate(name) if letter == "/"):
            if name[:end] in names:
                raise CheckpointError(f"{name[:end]} is an array, so {name} cannot be inside it; rename one of them")
    return tuple(_array(name, by_array[name]) for name in sorted(names))


def share(info: ArrayInfo, ordinal: int, claim: Claim) -> Iterator[Strip]:
    """The chunks of a block that this replica writes: of n replicas every one an n-th, in a row.

    Args:
        ordinal: the array's place among all arrays; it turns the distribution, so that arrays of few chunks are spread too.
    """
    spans = info.span(claim.offset, claim.extent)
    part = (claim.replica - ordinal - sum(each.start for each in spans)) % claim.replicas
    count = math.prod(map(len, spans))
    low, high = part * count // claim.replicas, (part + 1) * count // claim.replicas
    begin = 0
    for strip in info.strips(claim.offset, claim.extent):
        mine = strip.part(strip.slot + low - begin, strip.slot + high - begin)
        if mine.length:
            yield mine
        begin += strip.length


def _array(name: str, claims: Sequence[tuple[int, Claim]]) -> ArrayInfo:
    first_rank, first = claims[0]
    for rank, claim in claims:
        if (claim.shape, claim.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"array {name} is {first.dtype} {first.shape} on rank {first_rank} and {claim.dtype} {claim.shape} on "
                f"rank {rank}; the global shape must be the same everywhere"
            )
    info = arrange(name, first.dtype, first.shape, _unit(first.shape, [claim for _, claim in claims]))
    holders: dict[tuple[Shape, Shape], list[tuple[int, Claim]]] = {}
    for rank, claim in claims:
        if math.prod(claim.extent):
            holders.setdefault((claim.offset, claim.extent), []).append((rank, claim))
    covered = np.zeros(info.grid, np.int32)
    for (offset, extent), held in holders.items():
        _check_replicas(name, offset, extent, held)
        covered[tuple(slice(part.start, part.stop) for part in info.span(offset, extent))] += 1
    if math.prod(info.shape) and not (covered == 1).all():
        place = np.argwhere(covered != 1)[0]
        where = tuple(int(number) * part for number, part in zip(place, info.chunk, strict=True))
        what = "no rank holds" if covered[tuple(place)] == 0 else "two different blocks hold"
        raise CheckpointError(f"array {name} {first.shape}: {what} the element at {where}; blocks must fill it exactly once")
    return info


def _unit(shape: Shape, claims: Sequence[Claim]) -> Shape:
    """What all ranks' units have in common; a unit as long as the array binds nobody."""
    return tuple(
        math.gcd(*(claim.unit[dim] for claim in claims if claim.unit[dim] < length)) or max(1, length)
        for dim, length in enumerate(shape)
    )


def _check_replicas(name: str, offset: Shape, extent: Shape, held: Sequence[tuple[int, Claim]]) -> None:
    expected = held[0][1].replicas
    found = sorted((claim.replica, claim.replicas) for _, claim in held)
    if found != [(number, expected) for number in range(expected)]:
        said = ", ".join(f"rank {rank} is {claim.replica} of {claim.replicas}" for rank, claim in held)
        raise CheckpointError(
            f"array {name}: the block of {extent} at {offset} has {len(held)} holders ({said}); each must be another one "
            "of as many replicas"
        )
