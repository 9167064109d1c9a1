"""What an experiment did: `chaos.jsonl` in the run directory, one `Injection` a line, for the verdict and the page."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from chaos.injectors.context import Target
from checkpoint.typed import built
from resilient import ledger

RECORD = "chaos.jsonl"


@dataclass(frozen=True)
class Injection:
    """A fault that was injected, or was to be. Times in unix seconds; `failed`: why it was not."""

    id: str
    fault: str
    params: Mapping[str, Any]
    target: Target
    asked_t: float
    t: float | None = None
    undone_t: float | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    failed: str = ""


def read(run_dir: Path) -> list[Injection]:
    """Those of a run, in order of time."""
    path = run_dir / RECORD
    found = []
    for line in ledger.read(path):
        with suppress(ValueError):  # it was cut short by what ended the command
            found.append(msgspec.convert(line, built(Injection)))
    return sorted(found, key=lambda each: each.t or each.asked_t)


def append(run_dir: Path, injection: Injection) -> None:
    """Add one."""
    with (run_dir / RECORD).open("a") as file:
        file.write(json.dumps(asdict(injection), default=str) + "\n")
