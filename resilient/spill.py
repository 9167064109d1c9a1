"""Records that found no driver: what an agent still held when the connection ended, left in the run directory for the next driver.

The driver is the only writer of the ledger and acknowledges what it has written. An agent that ends, for whatever reason, leaves
what was not acknowledged in a file of its own; a driver takes those files in when it starts and when it ends. A record that was
written, but whose acknowledgement was lost, is recognized and not written twice.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from resilient import ledger
from resilient.protocol.messages import Record

_DIRECTORY = ".spill"


def leave(run_dir: Path, generation: int, host: str, records: Iterable[Record]) -> None:
    """Leave records of one generation behind, durably; nothing is written where there are none.

    It waits for the file system, for as long as that takes.

    Raises:
        OSError: they cannot be written.
    """
    items = ([generation, host, each.rank, each.t, each.event, dict(each.fields)] for each in records)
    lines = [json.dumps(item, default=str) + "\n" for item in items]
    if not lines:
        return
    directory = run_dir / _DIRECTORY
    directory.mkdir(exist_ok=True)
    name = f"{host}-{os.getpid()}-g{generation}"
    before = len(list(directory.glob(f"{name}-*")))  # an agent leaves those of each rank that it finds
    path = directory / f"{name}-{before}.new"
    with path.open("w") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    path.rename(directory / f"{name}-{before}.jsonl")


def take_in(run_dir: Path, book: ledger.Ledger) -> int:
    """Write what agents have left into the ledger, and remove it; returns how many records were new."""
    paths = sorted((run_dir / _DIRECTORY).glob("*.jsonl"))
    if not paths:
        return 0
    known = {(line["generation"], line["t"]) for name in (ledger.EVENTS, ledger.METRICS) for line in ledger.read(run_dir / name)}
    found = sorted((json.loads(line) for path in paths for line in path.read_text().splitlines()), key=lambda item: item[3])
    new = [item for item in found if (item[0], item[3]) not in known and item[4] != "resumed"]
    for generation, host, _, t, event, fields in new:
        if event is None:
            book.metrics(fields, generation=generation, t=t)
        else:
            book.event(event, fields, generation=generation, t=t, host=host)
    for path in paths:
        path.unlink()
    return len(new)
