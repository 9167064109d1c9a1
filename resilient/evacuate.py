"""`resilient evacuate`: which nodes the driver that runs is asked to leave: `evacuate.json` in the run directory.

Owns the file: the lease of the driver that is asked, and the nodes by name. Another driver than this one does not go by it. One
command at a time adds to it, by `evacuate.lock`.
"""

import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from checkpoint.locks import flock
from checkpoint.typed import built
from resilient.access import restrict_as
from resilient.driver.lease import PATIENCE_S, holder
from resilient.exits import EnvironmentUnusable
from resilient.ledger import EVENTS
from resilient.node_names import nodes_of

log = logging.getLogger(__name__)

FILE = "evacuate.json"
LOCK = "evacuate.lock"
LOCK_S = 10.0  # another command has it for a moment
LOCK_POLL_S = 0.05
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
    restrict_as(run_dir)
    try:
        with _alone(run_dir) as directory:
            before = _before(run_dir, owner.token)
            nodes = tuple(each for each in before.nodes if each != node)
            resumed = {each: t for each, t in before.resumed.items() if each != node}
            if resume:
                resumed[node] = time.time()
            else:
                nodes += (node,)
            _write(directory, msgspec.json.encode(Request(owner.token, nodes, resumed)))
    except OSError as error:
        raise EnvironmentUnusable(f"cannot write {run_dir / FILE}: {error.strerror}") from error
    if not known:
        what = f"take node {node} in again" if resume else f"leave node {node}"
        return f"{owner} is asked to {what}, and says so if it knows no node of that name"
    return f"{owner} takes node {node} in again" if resume else f"{owner} leaves node {node} at a step boundary, if it can"


@contextmanager
def _alone(run_dir: Path) -> Iterator[int]:
    """The run directory's descriptor; nobody else asks anything there meanwhile. Names are below it: its owner may put links in
    their place.

    Raises OSError, EnvironmentUnusable.
    """
    path, until = run_dir / LOCK, time.monotonic() + LOCK_S
    with ExitStack() as opened:
        directory = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, directory)
        try:
            lock = _made(directory, LOCK)
        except FileExistsError:
            lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        opened.callback(os.close, lock)
        while True:
            try:
                flock(lock, path, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise EnvironmentUnusable(f"another command has held {path} for {LOCK_S:g} s: call again") from None
                time.sleep(LOCK_POLL_S)
        yield directory


def _before(run_dir: Path, token: str) -> Request:
    """What the driver with this lease was asked before. Raises EnvironmentUnusable."""
    path = run_dir / FILE
    try:
        return requested(run_dir, token)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise EnvironmentUnusable(f"cannot read {path}: {error.strerror}") from error
    except MALFORMED as error:
        log.warning("%s is left out of account: %s", path, error)
    return Request(token)


def _write(directory: int, text: bytes) -> None:
    """Make the file in an opened run directory anew, at once or not at all. Raises OSError."""
    new = f"{FILE}.{secrets.token_hex(8)}"
    try:
        with open(_made(directory, new), "wb") as file:
            file.write(text)
        os.replace(new, FILE, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with suppress(OSError):
            os.unlink(new, dir_fd=directory)
        raise


def _made(directory: int, name: str) -> int:
    """A new file in a directory; what is there is not opened. Raises OSError.

    It is of the directory's owner, whose driver reads it, also where root asks.
    """
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
