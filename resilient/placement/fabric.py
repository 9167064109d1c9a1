"""The order of nodes by the fabric that connects them. Pure.

A node's address names the switches above it, from the top level down, and the node itself, with dots between, as Slurm writes it to
SLURM_TOPOLOGY_ADDR (`cell2.leaf7.n0113`). Node ranks follow each other within a switch, so that the ranks of a pipeline stage that
shard its state, and reduce gradients among them, lie within one as far as they come out even, and what goes from stage to stage, or
between those that hold the same shards, leaves it.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

MOST_LEVELS = 32

_PAIR = re.compile(r"(\w+)=(\S+)")


def switches_of(address: str) -> tuple[str, ...]:
    """The switches above a node, the highest first; none where the address is that of the node alone, or empty."""
    return tuple(address.split("."))[:-1]


def ordered(addresses: Sequence[str], block: int) -> list[int]:
    """Places of nodes in their new order.

    Of the blocks of so many nodes that follow each other, as many as can be lie below one switch, at each level of the fabric from
    the lowest up. Nodes of which nothing is known come last, as they were.

    Args:
        addresses: of the nodes, as they are ordered now; equal ones keep their order.
        block: nodes that shard the state of a pipeline stage among them.
    """
    known = [(switches_of(address), place) for place, address in enumerate(addresses) if switches_of(address)]
    unknown = [place for place, address in enumerate(addresses) if not switches_of(address)]
    whole, rest = _packed(known, 0, max(1, block))
    return [*whole, *rest, *unknown]


def _packed(nodes: Sequence[tuple[tuple[str, ...], int]], level: int, block: int) -> tuple[list[int], list[int]]:
    """Nodes below one switch: those in blocks that are whole at this level or below it, and the rest, nearest together."""
    below: dict[str, list[tuple[tuple[str, ...], int]]] = defaultdict(list)
    here = []
    for switches, place in nodes:
        if len(switches) > level and level < MOST_LEVELS:
            below[switches[level]].append((switches, place))
        else:
            here.append(place)
    whole: list[int] = []
    rest: list[int] = []
    for name in sorted(below, key=_natural):
        blocks, left = _packed(below[name], level + 1, block)
        whole += blocks
        rest += left
    rest += here
    fitting = len(rest) // block * block if level else 0  # above all switches nothing is together
    return whole + rest[:fitting], rest[fitting:]


def _natural(name: str) -> list[tuple[int, int, str]]:
    """`leaf10` behind `leaf9`."""
    return [(0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part) for part in re.split(r"(\d{1,18})", name)]


def failure_domains(addresses: Sequence[str]) -> tuple[str, ...]:
    """The lowest switch above each node, by which replicas are kept apart; empty where one is not known."""
    found = tuple(".".join(switches_of(address)) for address in addresses)
    return found if all(found) else ()


def addresses_in(text: str, expand: Callable[[str], list[str]]) -> dict[str, str]:
    """Addresses by host, from a file of switches as Slurm has it (topology.conf; `scontrol show topology` prints the same).

    Args:
        expand: writes out a list of hosts.

    Raises:
        ValueError: a line is none of a switch, or a switch is below itself.
    """
    parents: dict[str, str] = {}
    leaves: list[tuple[str, list[str]]] = []
    for line in _lines(text):
        words = {key.lower(): value for key, value in _PAIR.findall(line)}
        if "switchname" not in words:
            raise ValueError(f"{line[:80]!r} names no switch (SwitchName=…)")
        name = words["switchname"]
        parents.update(dict.fromkeys(expand(words["switches"]) if "switches" in words else (), name))
        if "nodes" in words and "switches" not in words:  # of a higher switch, scontrol lists the nodes as well
            leaves.append((name, expand(words["nodes"])))
    return {host: ".".join([*_path(leaf, parents), host]) for leaf, hosts in leaves for host in hosts}


def _lines(text: str) -> Iterable[str]:
    return (line for each in text.splitlines() if (line := each.partition("#")[0].strip()))


def _path(leaf: str, parents: Mapping[str, str]) -> list[str]:
    """From the top switch down to this one."""
    path = [leaf]
    while (above := parents.get(path[0])) is not None:
        if above in path or len(path) >= MOST_LEVELS:
            raise ValueError(f"switch {above} is below itself, or more than {MOST_LEVELS} switches are above each other")
        path.insert(0, above)
    return path
