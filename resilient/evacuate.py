"""`resilient evacuate`: which nodes the driver that runs is asked to leave: `evacuate.json` in the run directory.

Owns the file: the lease of the driver that is asked, and the nodes by name. Another driver than this one does not go by it.
"""

import logging
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from checkpoint.typed import built
from resilient.access import restrict_as
from resilient.driver.lease import PATIENCE_S, holder
from resilient.exits import EnvironmentUnusable
from resilient.ledger import EVENTS
from resilient.node_names import nodes_of

log = logging.getLogger(__name__)

FILE = "evacuate.json"
LIMIT_BYTES = 1 << 20
MALFORMED = (ValueError, RecursionError)


class Request(msgspec.Struct, frozen=True):
    """Nodes are numbers or hosts, as they were given.

    Attributes:
        token: of the driver's lease.
        nodes: that are to be left.
        resumed: that may be used again, and since when, unix seconds.
    """

    token: str
    nodes: tuple[str, ...] = ()
    resumed: Mapping[str, float] = {}


def evacuate(run_dir: Path, node: str, *, resume: bool) -> str:
    """Ask the driver of a run directory to leave a node, or to take it back; what was asked, in words.

    Raises:
        EnvironmentUnusable: it is no run directory, nothing runs there, the job has no such node, or it cannot be asked.
    """
    from resilient.processes import must_be_run_directory  # which the driver, a reader of the file, does without
    from resilient.slurm.succession import Succession

    owner = holder(run_dir, PATIENCE_S)
    if owner is None:
        if Succession.found(run_dir) is None:
            must_be_run_directory(run_dir)
        raise EnvironmentUnusable(f"nothing runs in {run_dir}")
    known = _must_have(run_dir, node)
    path, before = run_dir / FILE, Request(owner.token)
    try:
        before = requested(run_dir, owner.token)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise EnvironmentUnusable(f"cannot read {path}: {error.strerror}") from error
    except MALFORMED as error:
        log.warning("%s is left out of account: %s", path, error)
    nodes = tuple(each for each in before.nodes if each != node)
    resumed = {each: t for each, t in before.resumed.items() if each != node}
    if resume:
        resumed[node] = time.time()
    else:
        nodes += (node,)
    restrict_as(run_dir)
    try:
        _write(run_dir, msgspec.json.encode(Request(owner.token, nodes, resumed)))
    except OSError as error:
        raise EnvironmentUnusable(f"cannot write {path}: {error.strerror}") from error
    if not known:
        what = f"take node {node} in again" if resume else f"leave node {node}"
        return f"{owner} is asked to {what}, and says so if it knows no node of that name"
    return f"{owner} takes node {node} in again" if resume else f"{owner} leaves node {node} at a step boundary, if it can"


def _write(run_dir: Path, text: bytes) -> None:
    """Make the file anew, at once or not at all. Raises OSError.

    It is the run directory's owner's, whose driver reads it, also where root asks. Names are below the opened directory: its owner
    may put links in their place.
    """
    directory = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    new = f"{FILE}.{secrets.token_hex(8)}"
    try:
        with open(_made(directory, new), "wb") as file:
            file.write(text)
        os.replace(new, FILE, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with suppress(OSError):
            os.unlink(new, dir_fd=directory)
        raise
    finally:
        os.close(directory)


def _made(directory: int, name: str) -> int:
    """A new file in a directory, of its owner and group where this is another user; what is there is not opened. Raises OSError."""
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666, dir_fd=directory)
    owner = os.fstat(directory)
    if owner.st_uid != os.geteuid():
        try:
            os.fchown(fd, owner.st_uid, owner.st_gid)
        except OSError:
            os.close(fd)
            os.unlink(name, dir_fd=directory)
            raise
    return fd


def _must_have(run_dir: Path, node: str) -> bool:
    """Whether the job is known to have this node. Raises EnvironmentUnusable if it is known not to."""
    try:
        nodes = nodes_of(run_dir)
    except OSError as error:
        raise EnvironmentUnusable(f"cannot read {run_dir / EVENTS}: {error.strerror}") from error
    has = nodes.has(node)
    if has is False:
        raise EnvironmentUnusable(f"the job in {run_dir} has no node {node!r}: there are {nodes}")
    return bool(has)


def requested(run_dir: Path, token: str) -> Request:
    """What the driver with this lease is asked; nothing where the file is of another one's.

    Raises:
        OSError: the file is not there, or cannot be read.
        ValueError, RecursionError: it is no such file.
    """
    with (run_dir / FILE).open("rb") as file:
        request = msgspec.json.decode(file.read(LIMIT_BYTES), type=built(Request))
    return request if request.token == token else Request(token)
