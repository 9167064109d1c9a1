"""Nodes that the jobs of a campaign do without for a while: `bad_nodes.json` in its run directory.

Owns the file: host, reason, since when and until when. A person may edit or delete it.
"""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from checkpoint.typed import built

log = logging.getLogger(__name__)

FILE = "bad_nodes.json"
ASIDE = "bad_nodes.json.damaged"  # what was there and could not be understood, as a person may have edited it


@dataclass(frozen=True)
class BadNode:
    """One host; times in unix seconds."""

    host: str
    reason: str
    t: float
    until_t: float


def bad_nodes(run_dir: Path, now: float | None = None) -> list[BadNode]:
    """Those whose time is not over; none where the file is missing, or is none."""
    try:
        return _read(run_dir, time.time() if now is None else now)
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is left out of account: %s", run_dir / FILE, error)
        return []


def _read(run_dir: Path, now: float) -> list[BadNode]:
    """The same. Raises OSError, ValueError, RecursionError."""
    try:
        found = msgspec.json.decode((run_dir / FILE).read_bytes(), type=built(list[BadNode]))
    except FileNotFoundError:
        return []
    return [each for each in found if each.until_t > now]


def remember(run_dir: Path, reasons: Mapping[str, str], *, now: float, for_s: float) -> None:
    """Add hosts, each with a reason, and forget those whose time is over. A file that is none is kept as `ASIDE`.

    Raises:
        OSError: the file cannot be read, and stays as it is, or it cannot be written.
    """
    try:
        known = _read(run_dir, now)
    except (ValueError, RecursionError) as error:
        log.warning("%s is no list of nodes, and kept as %s: %s", run_dir / FILE, ASIDE, error)
        (run_dir / FILE).replace(run_dir / ASIDE)
        known = []
    kept = [each for each in known if each.host not in reasons]
    fresh = [BadNode(host, reason, now, now + for_s) for host, reason in reasons.items()]
    written = run_dir / f"{FILE}.new"
    written.write_text(json.dumps([asdict(each) for each in (*kept, *fresh)], indent=1) + "\n")
    written.replace(run_dir / FILE)
