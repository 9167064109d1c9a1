"""From the metrics of a short campaign to a row of results. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from resilient.steptime.work import Work

Line = Mapping[str, Any]
SEEN = ("tensor_bytes", "state_bytes", "step_s", "collective_s", "transfer_s")
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
        tensor_bytes: the most that rank 0's tensors took at one time in the step that was looked into.
        state_bytes: of these, its weights, gradients and optimizer state.
        predicted_bytes: what the entry point's module has said of rank 0's tensors before.
        predicted_state_bytes: and of its weights, gradients and optimizer state.
        bubble: share of a step in which a pipeline's rank has nothing to compute, by arithmetic.
        collectives: share of the step that was looked into in which rank 0 had collectives under way, waiting for others included.
        transfers: the same of what it sends to other stages and gets from them.
        work: what the step's time is made of, see `steptime.work`.
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
    tensor_bytes: int | None = None
    state_bytes: int | None = None
    predicted_bytes: int | None = None
    predicted_state_bytes: int | None = None
    bubble: float | None = None
    collectives: float | None = None
    transfers: float | None = None
    work: Work | None = None
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


def looked_into(metrics: Sequence[Line]) -> dict[str, Any]:
    """What a step that was looked into has shown, as fields of a row; the last one, and empty if there was none."""
    seen = next((line["inspected"] for line in reversed(metrics) if isinstance(line.get("inspected"), Mapping)), None)
    if seen is None:
        return {}
    numbers = {key: value for key in SEEN if isinstance(value := seen.get(key), int | float)}
    found: dict[str, Any] = {key: int(numbers[key]) for key in ("tensor_bytes", "state_bytes") if key in numbers}
    step_s = numbers.get("step_s", 0.0)
    if step_s > 0:
        shares = (("collectives", "collective_s"), ("transfers", "transfer_s"))
        found |= {name: numbers[key] / step_s for name, key in shares if key in numbers}
    return found


def window(metrics: Sequence[Line], warmup_steps: int) -> tuple[float, float, int] | None:
    """From when to when the steps that count were computed, in unix seconds, and how many tokens they took."""
    steps = counting(metrics, warmup_steps)
    if not steps:
        return None
    began_t = float(steps[0]["t"]) - float(steps[0]["step_s"])
    tokens = sum(float(line.get("tokens_per_s") or 0.0) * float(line["step_s"]) for line in steps)
    return began_t, float(steps[-1]["t"]), round(tokens)
