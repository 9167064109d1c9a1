"""`resilient evacuate`: which nodes the driver that runs is asked to leave: `evacuate.json` in the run directory.

Owns the file: the lease of the driver that is asked, and the nodes by name. Another driver than this one does not go by it.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from checkpoint.typed import built
from resilient.access import restrict_as
from resilient.driver.lease import holder
from resilient.exits import EnvironmentUnusable

log = logging.getLogger(__name__)

FILE = "evacuate.json"
LIMIT_BYTES = 1 << 20


class Request(msgspec.Struct, frozen=True):
    """Args: token: of the driver's lease; nodes: numbers or hosts, as they were given."""

    token: str
    nodes: tuple[str, ...]


def evacuate(run_dir: Path, node: str, *, resume: bool) -> str:
    """Ask the driver of a run directory to leave a node, or to take it back; what was asked, in words.

    Raises:
        EnvironmentUnusable: nothing runs there, or it cannot be asked.
    """
    owner = holder(run_dir)
    if owner is None:
        raise EnvironmentUnusable(f"nothing runs in {run_dir}")
    asked = [each for each in requested(run_dir, owner.token) if each != node]
    restrict_as(run_dir)
    path = run_dir / FILE
    new = path.with_name(f"{FILE}.{os.getpid()}")
    try:
        new.write_bytes(msgspec.json.encode(Request(owner.token, (*asked, *([] if resume else [node])))))
        new.replace(path)
    except OSError as error:
        raise EnvironmentUnusable(f"cannot write {path}: {error.strerror}") from error
    return f"{owner} takes node {node} in again" if resume else f"{owner} leaves node {node} at a step boundary, if it can"


def requested(run_dir: Path, token: str) -> Sequence[str]:
    """The nodes that the driver with this lease is asked to leave; none where the file is missing, another's, or no such file."""
    try:
        with (run_dir / FILE).open("rb") as file:
            request = msgspec.json.decode(file.read(LIMIT_BYTES), type=built(Request))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is left out of account: %s", run_dir / FILE, error)
        return ()
    return request.nodes if request.token == token else ()
