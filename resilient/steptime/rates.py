"""From work to seconds: what each kind of work costs, fitted to measured steps or stated. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from resilient.steptime.work import TERMS, Work

Sample = tuple[Work, float]
"""The work of a step, and how many seconds it took."""

LEFT = 2  # samples more than there are costs to be found: with fewer, a fit would follow the noise


@dataclass(frozen=True)
class Rates:
    """Seconds for each unit of work, by kind; of all together, nothing overlaps."""

    seconds: Mapping[str, float]

    def __call__(self, work: Work) -> float:
        """How long a step takes."""
        return sum(cost * float(getattr(work, name)) for name, cost in self.seconds.items())

    @classmethod
    def stated(cls, values: Mapping[str, float], below: "Rates | None" = None) -> "Rates":
        """By the names of `STATED`. Args: below: of what is not stated; else it costs nothing. Raises ValueError."""
        found = dict(below.seconds) if below is not None else dict.fromkeys(TERMS, 0.0)
        for name, value in values.items():
            if name not in STATED:
                raise ValueError(f"{name!r} is no rate; allowed: {', '.join(STATED)}")
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a number above 0, and is {value:g}")
            found[STATED[name]] = 1 / value if name.endswith("_per_s") else value
        if "far_bytes_per_s" not in values and not found["far_bytes"]:
            found["far_bytes"] = found["near_bytes"]
        return cls(found)


STATED = {
    "flops_per_s": "flops",
    "bytes_per_s": "near_bytes",
    "far_bytes_per_s": "far_bytes",
    "message_s": "messages",
    "operation_s": "operations",
}


def fitted(samples: Sequence[Sample]) -> Rates:
    """Costs of at least 0 with the least squares of relative errors.

    Of every choice of kinds of work that the samples can tell apart, the best one whose costs are all above 0; the others cost
    nothing (Lawson and Hanson, 1974, find the same without trying each). Between nodes bytes cost what they do inside of one where
    no sample has such.

    Raises:
        ValueError: there is no sample.
    """
    if not samples:
        raise ValueError("no step was measured")
    relative = np.array([[getattr(work, name) / seconds for name in TERMS] for work, seconds in samples])
    there = [number for number in range(len(TERMS)) if relative[:, number].any()]
    best: tuple[float, dict[str, float]] = (float("inf"), {})
    for count in range(1, max(1, min(len(there), len(samples) - LEFT)) + 1):
        for chosen in combinations(there, count):
            costs, error = _solved(relative[:, chosen])
            if costs.min() > 0 and error < best[0]:
                best = error, {TERMS[number]: float(cost) for number, cost in zip(chosen, costs, strict=True)}
    found = {name: best[1].get(name, 0.0) for name in TERMS}
    if not any(work.far_bytes for work, _ in samples):
        found["far_bytes"] = found["near_bytes"]
    return Rates(found)


def _solved(columns: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], float]:
    """Costs by which the rows come to 1, as near as can be, and the squares that are left. Columns are of any size."""
    sizes = np.abs(columns).max(axis=0)
    costs = np.linalg.lstsq(columns / sizes, np.ones(len(columns)), rcond=None)[0] / sizes
    return costs, float(np.square(columns @ costs - 1).sum())


def left_out(samples: Sequence[Sample]) -> list[float]:
    """What is predicted of each sample by a fit of the others; of two samples or more."""
    return [fitted([*samples[:number], *samples[number + 1 :]])(work) for number, (work, _) in enumerate(samples)]


def rank_correlation(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Spearman's, 1 for the same order; None where one of both has no order. Equal values share their mean rank."""
    if len(ours) < 2:
        return None
    one, other = _ranks(ours), _ranks(theirs)
    if not one.std() or not other.std():
        return None
    return float(np.corrcoef(one, other)[0, 1])


def _ranks(values: Sequence[float]) -> npt.NDArray[np.float64]:
    array = np.array(values, dtype=float)
    below, equal = (array[:, None] > array).sum(axis=1), (array[:, None] == array).sum(axis=1)
    ranks: npt.NDArray[np.float64] = below + (equal - 1) / 2
    return ranks
