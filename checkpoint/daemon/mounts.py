"""Which directories of a node's tiers lay on a file system of their own when the job began, and whether that is still mounted.

What is written below a mount point from which the file system is gone fills the disk under it, which is mostly the node's own, and
is hidden as soon as the file system is back. Owns a file beside the daemon's socket: a daemon that takes the place of another one
in the same job goes by what that one has seen. A mount of a part of the file system that it lies on is not noticed.
"""

import errno
import hashlib
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from checkpoint import safe_dir
from checkpoint.asking import answers
from checkpoint.typed import built

log = logging.getLogger(__name__)

FILE = "mounts.json"
LATER = "where the file system of %s is mounted is found out once it answers: %s"
ANSWER_S = 2.0  # for all directories together, when a daemon starts


class Mounts:
    """The mount points of the directories that a daemon writes to.

    Args:
        directory: private and there; takes the file.
        job: a secret of the job, of which only a digest is kept: what was mounted for another job does not count.
        roots: the directories, which need not be there yet.
    """

    def __init__(self, directory: Path, job: str, roots: Iterable[Path]) -> None:
        mark = hashlib.blake2b(job.encode(), digest_size=16).hexdigest()
        known = _read(directory / FILE).get(mark, {})
        roots = list(roots)
        found = _found([root for root in roots if str(root) not in known])
        self._points = {root: known.get(str(root), found.get(root)) for root in roots}
        self._directory, self._mark = directory, mark
        self._keeping = threading.Lock()
        self.keep()

    def keep(self) -> None:
        """Leave what this daemon has seen to the next one."""
        with self._keeping:
            seen = {str(root): point for root, point in self._points.items() if point is not None}
            _write(self._directory, {self._mark: seen})

    def check(self, root: Path) -> None:
        """Called by any thread.

        Raises FileNotFoundError where the file system of a directory was mounted, and is not any more; OSError where it does not
        say so.
        """
        point = self._points.get(root, "")
        try:
            if point is None:  # it answers now, or is in no state to be written to
                point = self._points[root] = _mount_point(root)
                self.keep()
            gone = point != "" and not _is_mounted(point)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(root)) from error
        if gone:
            why = f"the file system that was mounted on {point} when the job began is not mounted any more"
            raise FileNotFoundError(errno.ENOENT, why, str(root))


def _found(roots: Sequence[Path]) -> dict[Path, str]:
    """The mount points of directories, without those whose file system does not say: it has lost its server, or does not answer."""
    answered = answers(_mount_point, roots, ANSWER_S)
    for root in roots:
        answer = answered.get(root)
        if answer is None or isinstance(answer, OSError):
            log.warning(LATER, root, f"it does not within {ANSWER_S:g} s" if answer is None else answer.strerror)
    return {root: point for root, point in answered.items() if not isinstance(point, OSError)}


def _mount_point(path: Path) -> str:
    """Where the file system is mounted that a path is on or will be on; empty where that is the root of all. Raises OSError."""
    real = Path(os.path.realpath(path))
    for each in (real, *real.parents):
        if each.parent == each:
            break
        if _is_mounted(str(each)):
            return str(each)
    return ""


def _is_mounted(point: str) -> bool:
    """Whether a file system is mounted there; one that is mounted on demand is, then. Raises OSError where it does not say."""
    try:
        return os.stat(f"{point}/.").st_dev != os.stat(f"{point}/..").st_dev  # noqa: PTH116 - pathlib drops the dot
    except (FileNotFoundError, NotADirectoryError):
        return False


def _read(path: Path) -> Mapping[str, Mapping[str, str]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=built(dict[str, dict[str, str]]))
    except (OSError, ValueError, RecursionError):
        return {}


def _write(directory: Path, points: Mapping[str, Mapping[str, str]]) -> None:
    new = directory / f"{FILE}.new"
    try:
        new.unlink(missing_ok=True)
        fd = safe_dir.open_private(directory)
        try:
            with os.fdopen(safe_dir.create(fd, new.name), "wb") as file:
                file.write(msgspec.json.encode(points))
        finally:
            os.close(fd)
        new.replace(directory / FILE)
    except OSError as error:
        log.warning("what is mounted is not kept for the next daemon: %s", error)
