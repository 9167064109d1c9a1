"""What trackers of experiments, W&B and MLflow, get of a line. Pure."""

import math
import re
from collections.abc import Mapping
from typing import Any

_NO_NUMBERS = {"step", "generation", "t", "event"}
_MOST = 1e300  # whole numbers have no limit
_MLFLOW_CHARACTERS = 250  # of a name
_REFUSED_BY_MLFLOW = re.compile(r"[^/\w.\- :]")


def numbers_of(entry: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of the ledger or of the metrics, by name; none where nobody would plot any."""
    match entry.get("event"):
        case None:
            return _plain("train", entry)
        case "validation":
            return _plain("validation", entry)
        case "fault":
            return {"resilient/fault": 1.0}
        case "recovered":
            return {"resilient/downtime_s": float(entry["downtime_s"]), "resilient/lost_steps": float(entry["lost_steps"])}
        case "generation_started":
            return {"resilient/world_size": float(entry["world_size"])}
    return {}


def step_of(entry: Mapping[str, Any], before: int) -> int:
    """The step of a line, of a generation the one that it goes on from; that of the line before where it has none."""
    if entry.get("event") == "generation_started":
        return int(entry["resumed_step"] or 0)
    step = entry.get("step")
    return step if isinstance(step, int) else before


def mlflow_name(name: str) -> str:
    """The name under which MLflow takes a metric: letters, digits and a few signs, and a path that leads nowhere else."""
    parts = [part for part in _REFUSED_BY_MLFLOW.sub("_", name).split("/") if part]
    kept = "/".join("_" * len(part) if part in (".", "..") else part for part in parts)
    return kept[:_MLFLOW_CHARACTERS].rstrip("/") or "_"


def _plain(group: str, entry: Mapping[str, Any]) -> dict[str, float]:
    return {
        f"{group}/{name}": float(value)
        for name, value in entry.items()
        if name not in _NO_NUMBERS
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < _MOST
        and not math.isnan(value)
    }
