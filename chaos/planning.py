"""Planning: which faults strike whom, and in which order, as a pure function of experiment, seed and world.

Owns chance: the same seed gives the same faults, on the same world.
"""

import bisect
import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from chaos import faults
from chaos.experiment import Experiment, ExperimentError, Kind, Mix, Scheduled, When, make
from chaos.fault import Aim, Need, Outside
from chaos.injectors.context import Target
from resilient.config.errors import Problem

PREPARED = ("recovery", "drain")  # phases that are over so soon that an injector must wait for them beforehand
UNBOUNDED = 10_000  # faults of a mix that nothing else ends


@dataclass(frozen=True)
class World:
    """What is broken: so many nodes with so many ranks each, and what is at hand there."""

    nodes: int
    procs_per_node: int
    has: frozenset[Need] = frozenset()


@dataclass(frozen=True)
class Strike:
    """One fault that is to be injected.

    Attributes:
        calm_s: that the run must have gone on before it.
        by_chance: it comes of a mix, so that its moment does not matter; `tries`: the how manieth of it this is.
    """

    id: str
    fault: str
    target: Target | Literal["culprit"]
    at: When = field(default_factory=When)
    params: Mapping[str, Any] = field(default_factory=dict)
    calm_s: float = 0.0
    by_chance: bool = False
    tries: int = 1


@dataclass(frozen=True)
class Group:
    """Faults that meet: the first one, and those that strike with it or because of it."""

    strikes: tuple[Strike, ...]


@dataclass(frozen=True)
class Plan:
    """Groups, one after the other; and which faults are left out, with the reason.

    Attributes:
        missing: those of the schedule among them, which an experiment is not what it says without.
    """

    groups: tuple[Group, ...]
    left_out: Mapping[str, str]
    missing: Sequence[tuple[Strike, str]] = ()

    @property
    def strikes(self) -> list[Strike]:
        """All, in order."""
        return [strike for group in self.groups for strike in group.strikes]


def why_not(fault: str, has: frozenset[Need], params: Mapping[str, Any] | None = None) -> str:
    """What keeps a fault from being injected, with these parameters if there are any; empty if nothing does."""
    lacking = sorted(faults.kind(fault).needs - has)
    if lacking:
        return f"needs {', '.join(lacking)}"
    return make(fault, params).lacks() if params is not None else ""


def plan(experiment: Experiment, seed: int, world: World) -> Plan:
    """What will be done.

    Raises:
        ExperimentError: a target is not of this world, or more would be broken than the limits allow.
    """
    chance = random.Random(f"{experiment.name} {seed}")
    drawn = _Draw(chance, world, _allowed(experiment, world, chance))
    left_out: dict[str, str] = {}
    missing: list[tuple[Strike, str]] = []
    groups = [*_scheduled(experiment.faults, drawn, missing)]
    left_out |= {strike.id: why for strike, why in missing}
    if experiment.random is not None:
        groups += _mixed(experiment.random, drawn, left_out, experiment.limits.faults, len(experiment.faults) + 1)
    twice = [name for name, count in Counter(strike.id for group in groups for strike in group.strikes).items() if count > 1]
    if twice:
        message = f"the id {', '.join(twice)} stands twice; those without one have their number and their fault"
        raise ExperimentError([Problem("faults", None, message)])
    kept: list[Group] = []
    count = 0
    for number, group in enumerate(groups):
        count += len(group.strikes)
        if len(group.strikes) > experiment.limits.at_once:
            ids = ", ".join(strike.id for strike in group.strikes)
            raise ExperimentError([Problem("limits.at_once", experiment.limits.at_once, f"{ids} are to meet")])
        if count > experiment.limits.faults:
            if experiment.random is None or experiment.random.minutes is None:  # else time is up first
                left_out["the rest"] = f"limits.faults: {experiment.limits.faults}"
            rest = [strike for group in groups[number:] for strike in group.strikes if not strike.by_chance]
            missing += [(strike, f"limits.faults: {experiment.limits.faults}") for strike in rest]
            break
        kept.append(group)
    return Plan(tuple(kept), left_out, tuple(missing))


class _Draw:
    """Targets by chance, on the nodes that may be hit."""

    def __init__(self, chance: random.Random, world: World, nodes: Sequence[int]) -> None:
        self.chance, self.world, self._nodes = chance, world, nodes

    def target(self, aim: Aim) -> Target:
        if aim is Aim.RUN:
            return Target()
        node = self.chance.choice(self._nodes)
        if aim is Aim.NODE:
            return Target(node=node)
        return Target(rank=node * self.world.procs_per_node + self.chance.randrange(self.world.procs_per_node))


def _named(experiment: Experiment, world: World) -> set[int]:
    """The nodes that the schedule names."""
    found = set()
    for number, each in enumerate(experiment.faults):
        if isinstance(each.target, str):
            continue
        for name, index in each.target.items():
            count = world.nodes * world.procs_per_node if name == "rank" else world.nodes
            if index >= count:
                message = f"there are {count}, from 0 on" if count > 1 else "there is one, which is 0"
                raise ExperimentError([Problem(f"faults.{number}.target.{name}", index, message)])
            found.add(index // world.procs_per_node if name == "rank" else index)
    return found


def _allowed(experiment: Experiment, world: World, chance: random.Random) -> list[int]:
    """The nodes that may be hit: those that are named, and others by chance, up to the limit."""
    named = _named(experiment, world)
    most = experiment.limits.nodes or world.nodes
    if len(named) > most:
        raise ExperimentError([Problem("limits.nodes", most, f"nodes {', '.join(map(str, sorted(named)))} are to be hit")])
    others = [node for node in range(world.nodes) if node not in named]
    return sorted([*named, *chance.sample(others, min(most - len(named), len(others)))])


def _scheduled(wanted: Sequence[Scheduled], drawn: _Draw, missing: list[tuple[Strike, str]]) -> Iterator[Group]:
    found: list[list[Strike]] = []
    gone: set[str] = set()
    for number, each in enumerate(wanted):
        name = each.id or f"{number + 1}-{each.fault}"
        where = f"faults.{number}"
        target = _target(each, drawn, where)
        why = why_not(each.fault, drawn.world.has, each.params)
        other = each.at.after or each.at.together
        if not why and other in gone:
            why = f"comes with {other}, which is left out"
        strike = Strike(name, each.fault, target, each.at, each.params)
        if why:
            missing.append((strike, why))
            gone.add(name)
            continue
        group = next((group for group in found if other in {one.id for one in group}), None)
        if group is None or each.at.recovered:
            found.append([strike])
        else:
            group.append(strike)
    return (Group(tuple(group)) for group in found)


def _target(each: Scheduled, drawn: _Draw, where: str) -> Target | Literal["culprit"]:
    aim = faults.kind(each.fault).aim
    if each.target == "culprit":
        return "culprit"
    if isinstance(each.target, str) or aim is Aim.RUN:
        return drawn.target(aim)
    rank, node = each.target.get("rank"), each.target.get("node")
    if aim is Aim.RANK and rank is None:
        raise ExperimentError([Problem(f"{where}.target", dict(each.target), f"{each.fault} is aimed at a rank")])
    if aim is Aim.NODE:
        return Target(node=node) if node is not None else Target(rank=rank)
    return Target(rank=rank)


def _mixed(mix: Mix, drawn: _Draw, left_out: dict[str, str], most: int, first_number: int) -> Iterator[Group]:
    lacking = {name: why for name in mix.kinds if (why := why_not(name, drawn.world.has, mix.kinds[name].params))}
    left_out |= lacking
    possible = {name: kind for name, kind in mix.kinds.items() if name not in lacking}
    if not possible:
        return
    names, weights = list(possible), [kind.weight for kind in possible.values()]
    second = [name for name in names if _may_follow(name, possible[name])]
    chance = drawn.chance
    bag: list[str] = []
    number = itertools.count(first_number)

    def strike(name: str, at: When, calm_s: float = 0.0) -> Strike:
        target = drawn.target(faults.kind(name).aim)
        return Strike(f"{next(number)}-{name}", name, target, at, possible[name].params, calm_s, by_chance=True)

    done = 0
    while done < min(mix.count or UNBOUNDED, most + 1):  # one more than the limits allow shows that some are left out
        if not bag:  # every kind has had its turn before the weights decide
            bag = chance.sample(names, len(names)) if done == 0 else chance.choices(names, weights, k=len(names))
        name = bag.pop()
        first = strike(name, When(phase=possible[name].phase), chance.uniform(*mix.calm_s))
        strikes = [first]
        if second and _is_recovered_from(name, possible[name]) and chance.random() < mix.nested:
            strikes.append(strike(chance.choice(second), When(after=first.id, phase="recovery")))
        done += len(strikes)
        yield Group(tuple(strikes))


def _is_recovered_from(name: str, kind: Kind) -> bool:
    """Whether a fault always starts ranks anew, in the same job, and spoils nothing that a second one may depend on."""
    expected = make(name, kind.params).expects()
    return bool(expected.actions and not expected.exits and not expected.may_pass and expected.lost_steps is not None)


def _may_follow(name: str, kind: Kind) -> bool:
    """Whether a fault can strike during recovery; what a rank does to itself comes with its next step, when that is over."""
    outside = issubclass(faults.kind(name), Outside) and faults.kind(name).aim is Aim.RANK
    return outside and kind.phase is None and _is_recovered_from(name, kind)


def again(strike: Strike) -> Strike:
    """A fault of a mix whose moment did not come, or that found nothing to be done to: by itself, at any moment."""
    return replace(strike, at=When(), tries=strike.tries + 1)


def blamed(aim: Aim, ranks: Sequence[int], nodes: Sequence[int]) -> Target:
    """Whom a strike at the culprit hits: who was blamed last; the first one if nobody was."""
    if (aim is Aim.RANK and ranks) or not nodes:
        return Target(rank=ranks[0] if ranks else 0)
    return Target(node=nodes[0])


@dataclass(frozen=True)
class Spread:
    """How the ranks of a generation are spread over its nodes, by node rank.

    Attributes:
        members: the nodes; hosts: their names.
        ranks: how many are on each. They follow each other, and a node may have fewer than another one.
    """

    members: Sequence[int]
    hosts: Sequence[str]
    ranks: Sequence[int]

    @classmethod
    def of_event(cls, started: Mapping[str, Any]) -> "Spread":
        """Of the event `generation_started`."""
        members, world_size = started["members"], started["world_size"]
        return cls(members, started["nodes"], started.get("ranks", [world_size // len(members)] * len(members)))

    def placed(self, aim: Aim, target: Target) -> Target:
        """A target with its node and host; a rank or node that is not in the generation gives way to one that is."""
        firsts = [*itertools.accumulate(self.ranks, initial=0)]
        if target.node is None or (aim is Aim.RANK and target.rank is not None):
            rank = (target.rank or 0) % firsts[-1]
            at = bisect.bisect_right(firsts, rank) - 1
        else:
            at = self.members.index(target.node) if target.node in self.members else target.node % len(self.members)
            rank = firsts[at]
        return Target(rank if aim is Aim.RANK else None, self.members[at], self.hosts[at])

    def confined(self, target: Target, hit: Collection[int], most: int | None) -> Target | None:
        """A target that `placed` has found, where so many nodes may be hit in all and these were: it, or one on one of those.

        None: no node that was hit is in the generation. A spare that stands in for a node is another one.
        """
        if target.node is None or most is None or len({*hit, target.node}) <= most:
            return target
        left = [node for node in self.members if node in hit]
        if not left:
            return None
        return self.placed(Aim.NODE if target.rank is None else Aim.RANK, Target(node=left[target.node % len(left)]))
