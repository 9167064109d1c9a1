"""Which cores and which memory each rank of a node gets, and what is left for the agent and the snapshot daemon. Pure.

A rank that computes on a GPU gets cores of the NUMA domain that its GPU is at, and prefers that domain's memory. Cores are divided
evenly among the GPUs of a domain, hyperthreads of one core together. What is left are the domains without GPUs; where there are
none, a few cores of each. Ranks on CPUs divide the domains among themselves, and nothing is left: agent and daemon run anywhere.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from resilient.placement.topology import Domain, Gpu, Topology, in_words

Mode = Literal["auto", "none", "numa"]
LEFT_SHARE = 16  # of so many cores of a domain, one is left where no whole domain is
LEAST_CORES = 2  # that a rank keeps: its own thread, and one that communicates

Core = frozenset[int]


@dataclass(frozen=True)
class Place:
    """Where a rank runs. Attributes: memory: domain that it takes memory from while there is any; None: from any."""

    cpus: frozenset[int]
    memory: int | None

    def __str__(self) -> str:
        return f"cores {in_words(self.cpus)}" + (f", memory of domain {self.memory}" if self.memory is not None else "")


@dataclass(frozen=True)
class Binding:
    """Of one node.

    Attributes:
        ranks: by local rank; None: anywhere.
        left: cores of the agent and the snapshot daemon; empty: anywhere.
        why: nothing is bound, or not all; empty where there is nothing to say.
    """

    ranks: tuple[Place | None, ...]
    left: frozenset[int] = frozenset()
    why: str = ""

    @property
    def bound(self) -> bool:
        """Whether any rank is."""
        return any(place is not None for place in self.ranks)

    def __str__(self) -> str:
        """For a person."""
        if not self.bound:
            return "anywhere" + (f": {self.why}" if self.why else "")
        words = [f"rank {rank}: {place or 'anywhere'}" for rank, place in enumerate(self.ranks)]
        words += [f"agent and snapshot daemon: cores {in_words(self.left)}"] if self.left else []
        return "; ".join([*words, *([self.why] if self.why else [])])


NOWHERE = Binding(())


@dataclass(frozen=True)
class Share:
    """Which ranks of a machine are this agent's. Attributes: first: of them; total: of all agents on this machine."""

    first: int
    count: int
    total: int


def bind(
    mode: Mode,
    topology: Topology,
    allowed: Collection[int],
    memory: Collection[int],
    share: Share,
    gpus: Sequence[Gpu | None] | None,
) -> Binding:
    """Decide.

    Args:
        allowed: CPUs that this process may use, as a cpuset of Slurm leaves them.
        memory: domains whose memory it may use; empty: nothing is known of that.
        gpus: of each local rank, None for one that is not known; None: ranks compute on CPUs.
    """
    nowhere = (None,) * share.count
    domains = [each for each in topology.domains if each.cpus.intersection(allowed)]
    if mode == "none":
        return Binding(nowhere)
    if mode == "auto" and gpus is None:
        return Binding(nowhere, why="ranks compute on CPUs, which other runs of this machine may share")
    if not domains:
        return Binding(nowhere, why="this machine does not tell its NUMA domains")
    if mode == "auto" and len(domains) == 1:
        return Binding(nowhere, why="all cores that may be used are of one NUMA domain")
    cores = _cores(topology, domains, allowed)
    if gpus is None:
        return _on_cpus(domains, cores, memory, share)
    return _on_gpus(topology, cores, memory, gpus, allowed)


def _cores(topology: Topology, domains: Sequence[Domain], allowed: Collection[int]) -> dict[int, list[Core]]:
    """By domain, its cores as far as they may be used, in order."""
    left = [core & frozenset(allowed) for core in topology.cores]
    found = {each.number: [core for core in left if core and core <= each.cpus] for each in domains}
    return {number: own for number, own in found.items() if own}


def _on_gpus(
    topology: Topology,
    cores: Mapping[int, Sequence[Core]],
    memory: Collection[int],
    gpus: Sequence[Gpu | None],
    allowed: Collection[int],
) -> Binding:
    at: dict[int, list[Gpu]] = defaultdict(list)
    for gpu in gpus:
        if gpu is not None and gpu.domain is not None and gpu.domain in cores:
            at[gpu.domain].append(gpu)
    whole = {each.number for each in topology.domains if each.cpus <= frozenset(allowed)}
    # Of a domain that is whole here, other agents of this machine may have GPUs; of a part of one, none but the job's.
    sharing = {n: [gpu for gpu in topology.gpus if gpu.domain == n] if n in whole else sorted(at[n], key=_address) for n in at}
    with_gpus = set(at) | {gpu.domain for gpu in topology.gpus if gpu.domain in whole}
    left = frozenset(cpu for number, own in cores.items() if number not in with_gpus for core in own for cpu in core)
    usable = {number: cores[number] for number in at}
    if not left:
        usable = {number: own[: len(own) - _spared(len(own), len(sharing[number]))] for number, own in usable.items()}
        left = frozenset(cpu for number, own in usable.items() for core in cores[number][len(own) :] for cpu in core)
    places: list[Place | None] = []
    for gpu in gpus:
        number = gpu.domain if gpu is not None else None
        if gpu is None or number is None or number not in at:
            places.append(None)
            continue
        part = _part(usable[number], sharing[number].index(gpu), len(sharing[number]))
        places.append(Place(part, number if not memory or number in memory else None) if part else None)
    missing = places.count(None)
    why = f"the NUMA domain of {missing} of {len(places)} GPUs is not known, or none of its cores may be used" if missing else ""
    return Binding(tuple(places), left if missing < len(places) else frozenset(), why)


def _address(gpu: Gpu) -> str:
    return gpu.address


def _spared(count: int, ranks: int) -> int:
    """Cores of a domain that are left, so that each of its ranks keeps enough."""
    return max(0, min(-(-count // LEFT_SHARE), count - LEAST_CORES * ranks))


def _on_cpus(domains: Sequence[Domain], cores: Mapping[int, Sequence[Core]], memory: Collection[int], share: Share) -> Binding:
    numbers = [each.number for each in domains if each.number in cores]
    places: list[Place | None] = []
    for rank in range(share.first, share.first + share.count):
        if share.total <= len(numbers):  # whole domains, several where there are fewer ranks
            own = numbers[rank * len(numbers) // share.total : (rank + 1) * len(numbers) // share.total]
            part = frozenset(cpu for number in own for core in cores[number] for cpu in core)
        else:
            own = [numbers[rank * len(numbers) // share.total]]
            peers = [each for each in range(share.total) if each * len(numbers) // share.total == numbers.index(own[0])]
            part = _part(cores[own[0]], peers.index(rank), len(peers))
        local = own[0] if len(own) == 1 and (not memory or own[0] in memory) else None
        places.append(Place(part, local) if part else None)
    why = "there are more ranks than cores" if None in places else ""
    return Binding(tuple(places), why=why)


def _part(cores: Sequence[Core], number: int, count: int) -> frozenset[int]:
    """One of so many even parts; empty where there are more parts than cores."""
    return frozenset(cpu for core in cores[number * len(cores) // count : (number + 1) * len(cores) // count] for cpu in core)


def chosen(names: Sequence[str], topology: Topology, allotted: Sequence[int] = ()) -> list[Gpu | None]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, in its order; None for one that is not known, as an instance of a GPU (MIG).

    Args:
        allotted: numbers of device files that a job has on this node. Where a cgroup keeps it from the others, CUDA counts from 0.
    """
    by_minor = {each.minor: each for each in topology.gpus if each.minor is not None}
    inside = bool(allotted) and all(name.isdigit() and int(name) < len(allotted) for name in names)
    # CUDA counts GPUs by their place on the bus, which is the order of their device files as well.
    ordered = [by_minor.get(minor) for minor in sorted(allotted)] if inside else list(topology.gpus)
    found: list[Gpu | None] = []
    for name in names:
        if name.isdigit():
            found.append(ordered[int(name)] if int(name) < len(ordered) else None)
        else:
            hits = [gpu for gpu in topology.gpus if gpu.uuid and gpu.uuid.startswith(name)]
            found.append(hits[0] if len(hits) == 1 else None)
    return found
