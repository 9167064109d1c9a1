"""The session: what a node's workers of one generation are told, and the word through which slabs are lent to them.

Owns the file formats between a keeper and the workers of its node, both on one machine.
"""

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint.candidates import Candidate, Holding
from checkpoint.tiers.cadence import Every, every_of

SLABS = "slabs"
"""Name of the link, beside the keeper's socket, to where the slabs are."""


@dataclass(frozen=True)
class Session:
    """What the workers of a node are told.

    Attributes:
        node: this one, from 0.
        nodes: that take part.
        generation: of the workers.
        first_rank: the first of this node's ranks, which follow each other.
        ranks: how many.
        directory: of the keeper: its socket, its control word.
        every: cadence by tier.
        mtbf_s: mean time between failures.
        candidates: steps that may be gone on from, newest first.
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

    @property
    def socket(self) -> Path:
        """Where the keeper listens for its workers (AF_UNIX, datagrams)."""
        return self.directory / "keeper.sock"


def write(path: Path, session: Mapping[str, Any]) -> None:
    """Raises OSError."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(session))
    new.replace(path)


def read(path: Path) -> Session:
    """Raises OSError, ValueError."""
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
    )


def _candidate(entry: Mapping[str, Any]) -> Candidate:
    holdings = [
        Holding(
            directory=Path(each["directory"]) if "directory" in each else None,
            address=each.get("address"),
            remote_path=each.get("path", ""),
            token=each.get("token", ""),
        )
        for each in entry["holdings"]
    ]
    return Candidate(entry["step"], entry["tier"], holdings=holdings)


class Control:
    """A page that the keeper writes and the workers read: which slab the next snapshot goes to.

    A loan is a number that grows and the slab's index. A worker uses each loan once at most; the keeper makes another one when all
    have used it. One store of eight aligned bytes is atomic.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        try:
            if create:
                os.ftruncate(fd, mmap.PAGESIZE)
            self._map = mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("q")

    def lend(self, loan: int, slab: int | None) -> None:
        """Publish a loan; None: there is no slab to be had."""
        self._words[0] = loan << 8 | (0 if slab is None else slab + 1)

    def lent(self) -> tuple[int, int | None]:
        """The present loan and its slab."""
        word = self._words[0]
        return word >> 8, (word & 0xFF) - 1 if word & 0xFF else None
