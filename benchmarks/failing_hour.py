"""An hour in which nodes fail and come back, in virtual time: what of the full training is done. Pure.

What goes on without the nodes that are gone has the rate of the layout that those left make. Whoever leaves or comes back costs a
pause, in which all start again. That is the model by which the runtime decides, too (`resilient.recovery.without_spare`).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Failures:
    """How nodes fail; seconds.

    Attributes:
        every_s: between two failures, on the average; at random, as often at any moment.
        back_s: after which a node is back.
        pause_s: from a loss until the others go on, and from a return until all do.
    """

    every_s: float
    back_s: float
    pause_s: float


def moments(failures: Failures, length_s: float, chance: random.Random) -> list[float]:
    """When nodes fail, by chance."""
    found, t = [], chance.expovariate(1 / failures.every_s)
    while t < length_s:
        found.append(t)
        t += chance.expovariate(1 / failures.every_s)
    return found


def goodput(nodes: int, rates: Mapping[int, float], failed: Sequence[float], failures: Failures, length_s: float) -> float:
    """The share of the full training that is done.

    Args:
        nodes: in all.
        rates: of training, as a share of the full one, by number of nodes; where a number has none the next smaller one goes on, or
            nobody.
        failed: when a node fails, ascending; seconds.
    """
    changes = sorted([(t, -1) for t in failed] + [(t + failures.back_s, 1) for t in failed])
    done, now, left = 0.0, 0.0, nodes
    for t, change in [*((t, change) for t, change in changes if t < length_s), (length_s, 0)]:
        rate = max((rate for count, rate in rates.items() if count <= left), default=0.0)
        done += rate * max(0.0, t - now)
        left += change
        now = t + failures.pause_s
    return done / length_s
