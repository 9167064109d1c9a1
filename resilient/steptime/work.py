"""The work of a step, counted, and what of it a step's time is made of. Pure.

The entry point's module counts what its ranks do (`rank_work`); here the schedule, the number of micro batches and the cores that
ranks share are added.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from resilient.config import Config, Layout, dealing
from resilient.throughput import passes_of_a_step


@dataclass(frozen=True)
class Work:
    """What a rank does.

    Attributes:
        flops: floating-point operations, those of recomputation included.
        near_bytes: that it sends to ranks of its own node.
        far_bytes: that it sends to ranks of other nodes.
        messages: one after the other; of a collective over n ranks, n - 1, and twice as many where it reduces and gathers.
        operations: that the host asks for one after the other, as an eager framework does for each operator.
    """

    flops: float = 0.0
    near_bytes: float = 0.0
    far_bytes: float = 0.0
    messages: float = 0.0
    operations: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, name) + getattr(other, name) for name in TERMS))

    def __mul__(self, times: float) -> "Work":
        return Work(*(getattr(self, name) * times for name in TERMS))


TERMS = tuple(each.name for each in fields(Work))


@dataclass(frozen=True)
class RankWork:
    """Of the ranks of one pipeline stage, the first of which holds most.

    Attributes:
        micro_batch: both passes over one micro batch.
        step: what is done once a step.
        state_bytes: weights, their reduced gradients, and the optimizer's state.
        peak_bytes: the most that all tensors take at one time.
        fits: into its GPU, as far as that is known.
    """

    micro_batch: Work = Work()
    step: Work = Work()
    state_bytes: int = 0
    peak_bytes: int = 0
    fits: bool = True


def of_step(config: Config, layout: Layout, ranks: Sequence[RankWork], crowding: float = 1.0) -> Work:
    """All that a step's time is made of: the way through the pipeline's slowest stage, with its bubble.

    Ranks that share cores compute in the bubbles of each other, and all of their work takes its time: there the work of all ranks,
    through their cores, counts where that is more.

    Args:
        ranks: by pipeline stage.
        crowding: threads that want to compute, for each core; at most 1 where every rank has its own cores, or a GPU.
    """
    train = config.train
    own = dealing(config, layout.dp).passes(train.global_batch_size // train.micro_batch_size, 0)
    through = [each.micro_batch * passes_of_a_step(config, layout) + each.step for each in ranks]
    busy = [each.micro_batch * own + each.step for each in ranks]

    def most(term: Callable[[Work], float]) -> float:
        return max(*map(term, through), crowding * statistics.fmean(map(term, busy)))

    return Work(*(most(lambda work, name=name: getattr(work, name)) for name in TERMS))  # type: ignore[misc]
