"""From the metrics of a short campaign to a row of results. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Line = Mapping[str, Any]
State = Literal["measured", "refused", "failed", "timed_out"]


@dataclass(frozen=True)
class Spread:
    """Median, and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of one value or more."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Row:
    """What has come of a cell.

    Attributes:
        mark: of the cell, see `grid.Cell`.
        why: what kept it from being measured.
        world_size: ranks; None: it has not come so far.
        steps: that count.
        faults: while it ran; the steps of the last generation count.
        memory_bytes: peak of rank 0: allocated on its GPU, or on a CPU of the whole process.
        predicted_bytes: what the entry point's module has said of rank 0 before.
        joules: of the measured steps.
        energy_from: what measured it: `NVML`, `RAPL`, both, or "".
        took_s: the whole campaign.
    """

    mark: str
    keys: Mapping[str, Any]
    state: State
    why: str = ""
    world_size: int | None = None
    steps: int = 0
    step_s: Spread | None = None
    tokens_per_s: Spread | None = None
    mfu: float | None = None
    memory_bytes: int | None = None
    predicted_bytes: int | None = None
    faults: int = 0
    joules: float | None = None
    joules_per_token: float | None = None
    energy_from: str = ""
    took_s: float = 0.0

    @property
    def tokens_per_s_and_rank(self) -> float | None:
        """On a GPU, per GPU."""
        return self.tokens_per_s.median / self.world_size if self.tokens_per_s is not None and self.world_size else None


def counting(metrics: Sequence[Line], warmup_steps: int) -> list[Line]:
    """The steps of the last generation, without those at its beginning."""
    last = max((line["generation"] for line in metrics), default=0)
    steps = [line for line in metrics if line["generation"] == last and line.get("step_s") is not None and "step" in line]
    return steps[warmup_steps:]


def measured(metrics: Sequence[Line], warmup_steps: int) -> dict[str, Any]:
    """What the steps that count say, as fields of a row; empty if there are none."""
    steps = counting(metrics, warmup_steps)
    if not steps:
        return {}
    speeds = [float(line["tokens_per_s"]) for line in steps if line.get("tokens_per_s") is not None]
    shares = [float(line["mfu"]) for line in steps if isinstance(line.get("mfu"), float)]
    peaks = [int(line["memory_bytes"]) for line in steps if isinstance(line.get("memory_bytes"), int)]
    return {
        "steps": len(steps),
        "step_s": Spread.of([float(line["step_s"]) for line in steps]),
        "tokens_per_s": Spread.of(speeds) if speeds else None,
        "mfu": statistics.median(shares) if shares else None,
        "memory_bytes": max(peaks, default=None),
    }


def window(metrics: Sequence[Line], warmup_steps: int) -> tuple[float, float, int] | None:
    """From when to when the steps that count were computed, in unix seconds, and how many tokens they took."""
    steps = counting(metrics, warmup_steps)
    if not steps:
        return None
    began_t = float(steps[0]["t"]) - float(steps[0]["step_s"])
    tokens = sum(float(line.get("tokens_per_s") or 0.0) * float(line["step_s"]) for line in steps)
    return began_t, float(steps[-1]["t"]), round(tokens)
