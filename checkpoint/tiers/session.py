"""The session file: what the workers of a node are given for one generation.

Owns the format of that file. The agent writes it, the workers read it, both on one machine.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint.candidates import Candidate, Holding
from checkpoint.tiers.cadence import Every, every_of

SOCKET = "daemon.sock"
CONTROL = "control"


@dataclass(frozen=True)
class Session:
    """What the workers of a node are given.

    Attributes:
        node: this one, from 0.
        nodes: that take part.
        generation: of the workers.
        first_rank: the first of this node's ranks, which follow each other.
        ranks: how many.
        directory: of the snapshot daemon: its socket, its lease word.
        every: cadence by tier.
        mtbf_s: mean time between failures.
        candidates: steps that may be gone on from, newest first.
        durable: name of the tier that all nodes share, and where its committed checkpoints are; None where nobody has said so.
        durable_step: the newest that is known to be committed there; 0: none.
    """

    node: int
    nodes: int
    generation: int
    first_rank: int
    ranks: int
    directory: Path
    every: Mapping[str, Every]
    mtbf_s: float
    candidates: Sequence[Candidate] = field(default=())
    durable: tuple[str, Path] | None = None
    durable_step: int = 0

    @property
    def socket(self) -> Path:
        """Where the daemon listens for its workers (AF_UNIX, datagrams)."""
        return self.directory / SOCKET


def write(path: Path, session: Mapping[str, Any]) -> None:
    """Raises OSError."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(session))
    new.replace(path)


def read(path: Path) -> Session:
    """Raises OSError, ValueError."""
    try:
        found = json.loads(path.read_bytes())
        return Session(
            node=found["node"],
            nodes=found["nodes"],
            generation=found["generation"],
            first_rank=found["first_rank"],
            ranks=found["ranks"],
            directory=Path(found["directory"]),
            every={entry["name"]: every_of(entry) for entry in found["tiers"]},
            mtbf_s=found["mtbf_s"],
            candidates=[_candidate(entry) for entry in found["candidates"]],
            durable=(found["durable"]["name"], Path(found["durable"]["path"])) if "durable" in found else None,
            durable_step=found.get("durable", {}).get("step", 0),
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} describes no session: {error!r}") from None


def _candidate(entry: Mapping[str, Any]) -> Candidate:
    holdings = [
        Holding(
            directory=Path(each["directory"]) if "directory" in each else None,
            address=each.get("address"),
            remote_path=each.get("path", ""),
            key=each.get("key", ""),
        )
        for each in entry["holdings"]
    ]
    return Candidate(entry["step"], entry["tier"], holdings=holdings, generation=entry.get("generation"))
