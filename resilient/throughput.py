"""How fast layouts of a campaign are, compared with each other: what a lost node costs. Pure.

A step takes as long as the replica with most micro batches needs. What passes cost beside computing (reductions, the optimizer) is
left out, so the figures are estimates: larger than what is measured where that counts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from resilient.config import Config, Layout, dealing

WORTH_IT = 0.9  # of the time of a step; smaller micro batches keep a device less busy
ZERO_BUBBLE = 1 / 3  # of the bubble of 1F1B that is left: weights' gradients fill the rest (Qi et al., 2023)


@dataclass(frozen=True)
class Left:
    """What goes on with so many nodes.

    Attributes:
        throughput: tokens a second, as a share of what all nodes compute.
        layout: what they make; with a pipeline that is longer than a node it may leave some out.
    """

    nodes: int
    throughput: float
    layout: Layout


def passes_of_a_step(config: Config, layout: Layout) -> float:
    """How long a step of the full global batch takes, in the time of one micro batch's way through all stages of a rank."""
    train = config.train
    found = dealing(config, layout.dp).passes(train.global_batch_size // train.micro_batch_size, 0)
    bubble = (layout.pp - 1) / layout.virtual_stages
    return found + (ZERO_BUBBLE * bubble if config.parallel.schedule == "zero_bubble" else bubble)


def bubble(config: Config, layout: Layout) -> float:
    """The share of a step in which a pipeline's rank has nothing to compute, where all stages take the same time."""
    train = config.train
    own = dealing(config, layout.dp).passes(train.global_batch_size // train.micro_batch_size, 0)
    return 1 - own / passes_of_a_step(config, layout)


def computing(config: Config, layout: Layout) -> float:
    """The share of the replicas' time in which they compute samples, and not nothing while others still do."""
    train = config.train
    count = train.global_batch_size // train.micro_batch_size
    return count / (layout.dp * dealing(config, layout.dp).passes(count, 0))


def advice(config: Config, layout: Layout) -> str | None:
    """What is said of a layout on which replicas compute clearly less than they could; None of any other."""
    if config.is_script or computing(config, layout) > WORTH_IT:
        return None
    train = config.train
    count = train.global_batch_size // train.micro_batch_size
    text = f"replicas compute in {computing(config, layout):.0%} of their time: "
    text += f"{count} micro batches of {train.micro_batch_size} are dealt out to dp {layout.dp}"
    better = _better_micro_batch(config, layout)
    if better is None:
        return text
    micro, share = better
    return f"{text}; with train.micro_batch_size={micro} a step would take about {share:.0%} as long"


def _better_micro_batch(config: Config, layout: Layout) -> tuple[int, float] | None:
    """A smaller micro batch with which a step is shorter, and the share of the time that it takes; of equals the largest one."""
    micro = config.train.micro_batch_size

    def time(each: int) -> float:
        smaller = config.model_copy(update={"train": config.train.model_copy(update={"micro_batch_size": each})})
        return each * passes_of_a_step(smaller, layout)

    best = min((each for each in range(micro, 0, -1) if micro % each == 0), key=time)
    share = time(best) / time(micro)
    return (best, share) if share < WORTH_IT else None


def of_a_device_lost(config: Config, layouts: Mapping[int, Layout]) -> Left | None:
    """With a node that goes on without one of its devices; None where none does. Args: layouts: by number of ranks."""
    whole = layouts[max(layouts)]
    least, procs, tp = config.cluster.min_procs_per_node, whole.procs_per_node, whole.tp
    lost = tp if procs % tp == 0 else procs
    fewer = max((ranks for ranks in layouts if ranks <= whole.world_size - lost), default=0)
    if least is None or procs - lost < least or fewer == 0:
        return None
    return Left(whole.nodes, passes_of_a_step(config, whole) / passes_of_a_step(config, layouts[fewer]), layouts[fewer])


def of_nodes_left(config: Config, layouts: Mapping[int, Layout]) -> Iterator[Left]:
    """With one node lost, with two, four and so on, down to the fewest that go on; a layout that was told already is left out.

    Args:
        layouts: by number of nodes; the largest is what all nodes make.
    """
    most, least = max(layouts), min(layouts)
    fastest = passes_of_a_step(config, layouts[most])
    counts = sorted({*(most - (1 << lost) for lost in range((most - least).bit_length())), least} - {most}, reverse=True)
    told: set[int] = set()
    for nodes in counts:
        size = max(each for each in layouts if each <= nodes)
        if size not in told:
            told.add(size)
            yield Left(nodes, fastest / passes_of_a_step(config, layouts[size]), layouts[size])
