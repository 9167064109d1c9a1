"""Shares: how many ranks each node has in a generation, where devices of some of them do not work. Pure.

As many ranks as the layout allows, on as many devices. Ranks of a node come in groups that stay together, those of tensor
parallelism. What is too much for the layout is taken from nodes with dead devices before others, whole nodes before parts of them,
and from the last ones, so that ranks stay where their snapshots are.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """Of a job.

    Attributes:
        procs: ranks of a node whose devices all work.
        least: with fewer, a node takes no part.
        unit: ranks of a node are a multiple of it.
        worlds: how many ranks a generation may have, ascending.
        least_nodes: that take part.
    """

    procs: int
    least: int
    unit: int
    worlds: tuple[int, ...]
    least_nodes: int = 1

    @property
    def nodes(self) -> int:
        """That the largest generation has."""
        return self.worlds[-1] // self.procs

    def usable(self, devices: int) -> int:
        """How many ranks a node with so many devices that work may have."""
        count = devices if devices == self.procs else devices // self.unit * self.unit
        return count if count >= self.least else 0


def whole_nodes(sizes: Sequence[int], procs: int = 1) -> Rules:
    """Rules by which nodes take part as a whole, so many of them as one of these sizes says."""
    return Rules(procs, procs, procs, tuple(sorted(size * procs for size in sizes)))


def shares(devices: Sequence[int], rules: Rules) -> tuple[int, ...]:
    """The ranks of each node, 0 where it takes no part; empty where there can be no generation.

    Args:
        devices: of each node that work, by node rank.
    """
    usable = [rules.usable(count) for count in devices]
    most = sum(usable)
    for world in reversed(rules.worlds):
        found = _trimmed(usable, most - world, rules)
        if found is not None and sum(count > 0 for count in found) >= rules.least_nodes:
            return found
    return ()


def whole(count: int, rules: Rules) -> int:
    """The sum of the shares of so many nodes whose devices all work, without a pass over them."""
    each, least = rules.procs, max(rules.least, 1)
    possible = bisect_right(rules.worlds, count * each) if each >= least else 0
    for world in reversed(rules.worlds[:possible]):
        gone, excess = divmod(count * each - world, each)
        units, odd = divmod(excess, rules.unit)
        left = count - gone
        if not odd and units <= left * ((each - least) // rules.unit) and left >= rules.least_nodes:
            return world
    return 0


def _trimmed(usable: Sequence[int], excess: int, rules: Rules) -> tuple[int, ...] | None:
    """So many ranks less; None where that cannot be."""
    if excess < 0:
        return None
    left = list(usable)
    backwards = sorted(
        (number for number, count in enumerate(left) if count), key=lambda number: (left[number] == rules.procs, -number)
    )
    for number in backwards:
        if left[number] <= excess:
            excess, left[number] = excess - left[number], 0
    for number in backwards:
        while excess and left[number] and excess >= rules.unit and left[number] - rules.unit >= rules.least:
            excess, left[number] = excess - rules.unit, left[number] - rules.unit
    return tuple(left) if not excess else None
