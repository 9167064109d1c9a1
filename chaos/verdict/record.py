"""What an experiment did: `chaos.jsonl` in the run directory, one `Injection` a line, for the verdict and the page."""

import errno
import json
import os
from collections.abc import Iterable, Mapping
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
    return in_order(found)


def in_order(injections: Iterable[Injection]) -> list[Injection]:
    """Of time."""
    return sorted(injections, key=lambda each: each.t or each.asked_t)


def append(run_dir: Path, injection: Injection) -> None:
    """Add one. Raises OSError, with the record as it was."""
    line = (json.dumps(asdict(injection), default=str) + "\n").encode()
    with (run_dir / RECORD).open("ab", buffering=0) as file:
        end = file.tell()
        if file.write(line) < len(line):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run_dir / RECORD))
