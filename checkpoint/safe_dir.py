"""Directories that are this user's alone, made in places that all users of a machine share: RAM and local disks.

Whoever shares the machine may make any name in `/dev/shm` or `/tmp` first, as a directory of his own or as a symbolic link. A
directory is therefore made and opened level by level, each level by the descriptor of the one above it, and its owner and mode are
looked at on what was opened, never on a name. A directory of ours of mode 0700 whose parents nobody else can change is safe from
then on: no other user can put, move or remove anything in it, so that what is in it may be named by its path.

A name with a random part (`new`) cannot be guessed before it is there; it is found again (`find`) by its prefix and its owner, so
that a name taken by somebody else keeps nobody from working.

Owns the rules of whose directory may be used. Must import nothing of the runtime.
"""

import errno
import logging
import os
import re
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from checkpoint.ownership import others_may_write, user_name

log = logging.getLogger(__name__)

PRIVATE = 0o700
_RANDOM_BYTES = 8
_RANDOM = re.compile(r"[0-9a-f]{16}")
_MOST_LINKS = 40


class UnsafeDirectory(PermissionError):
    """Another user could change what is in a directory, or has made it."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EPERM, f"{path} is not used: {why}", str(path))


def make_private(path: Path, *, trusted: Path | None = None) -> None:
    """Make a directory of this user alone, and its parents; one that is there is taken if it is such a directory.

    Args:
        trusted: a directory above it whose owner, mode and parents are the user's own choice: a durable tier, a run directory.

    Raises UnsafeDirectory naming the directory that is not, and OSError. What a symbolic link leads to is not made.
    """
    os.close(open_private(path, trusted=trusted))


def open_private(path: Path, *, make: bool = True, close: bool = True, trusted: Path | None = None) -> int:
    """The descriptor of a directory of this user alone; arguments and errors as for `make_private`.

    Args:
        make: else FileNotFoundError is raised where it is not there.
        close: take the right to read from others, where they have it.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - links are followed one by one below
    base = Path("/") if trusted is None else Path(os.path.abspath(trusted))  # noqa: PTH100
    for _ in range(_MOST_LINKS):
        found = _descend(path, base, make=make, close=close, follow=trusted is None)
        if isinstance(found, int):
            return found
        path = found
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def is_safe(path: Path, *, trusted: Path | None = None) -> bool:
    """Whether it is there, and a directory that `open_private` would open; says in the log why it is not used."""
    try:
        os.close(open_private(path, make=False, trusted=trusted))
    except UnsafeDirectory as error:
        log.warning("%s", error.strerror)
        return False
    except OSError:
        return False
    return True


def remove(path: Path, *, trusted: Path | None = None) -> None:
    """Remove a directory of this user alone with all that is in it, as far as possible; any other, or a link, stays."""
    if is_safe(path, trusted=trusted):
        shutil.rmtree(path, ignore_errors=True)


def create(directory: int, name: str) -> int:
    """A new file of this user alone, for reading and writing, below an open directory; what is there is not opened.

    Args:
        name: relative, with the directories above it, which are made; see `checkpoint.safe_name`.

    Raises OSError.
    """
    *above, last = name.split("/")
    fd = os.dup(directory)
    try:
        for each in above:
            with suppress(FileExistsError):
                os.mkdir(each, PRIVATE, dir_fd=fd)
            below = os.open(each, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = below
        return os.open(last, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd)
    finally:
        os.close(fd)


def new(parent: Path, prefix: str) -> Path:
    """A name with a random part, which nobody has; nothing is made."""
    return parent / f"{prefix}-{secrets.token_hex(_RANDOM_BYTES)}"


def find(parent: Path, prefix: str) -> list[Path]:
    """Directories of this user alone that `new` has named, and one of the prefix alone as earlier versions made it; by name.

    In a directory of somebody else's that may not be read there is none. Raises OSError.
    """
    try:
        with os.scandir(parent) as entries:
            found = [Path(entry.path) for entry in entries if _is_named(entry.name, prefix)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError:
        if _is_ours(parent):
            raise
        return []
    return sorted(filter(is_private, found))


def _is_named(name: str, prefix: str) -> bool:
    rest = name.removeprefix(prefix)
    return name == prefix or (rest != name and rest[:1] == "-" and _RANDOM.fullmatch(rest[1:]) is not None)


def _is_ours(path: Path) -> bool:
    """Whether this user owns it; where that cannot be told, it lies behind what is somebody else's."""
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def is_private(path: Path) -> bool:
    """Whether it is a directory of this user that nobody else can write to; a link is none."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not others_may_write(found)


def _descend(path: Path, base: Path, *, make: bool, close: bool, follow: bool) -> int | Path:
    """One walk from `base` down: the descriptor of `path`, or the path that a link in it leads to."""
    at = base
    fd = os.open(base, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    names = path.relative_to(base).parts
    try:
        if not names or follow:
            _check(at, os.fstat(fd), last=not names)
        for place, name in enumerate(names):
            at, last = at / name, place == len(names) - 1
            try:
                below = _step(fd, at, last=last, make=make, follow=follow)
            except OSError as error:
                if error.filename == name:  # below the descriptor
                    error.filename = str(at)
                raise
            if isinstance(below, Path):
                return Path(os.path.normpath(below.joinpath(*names[place + 1 :])))
            os.close(fd)
            fd = below
        # What was made with O_PATH cannot be listed or changed in mode.
        opened = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
        if close and stat.S_IMODE(os.fstat(opened).st_mode) & 0o077:
            os.fchmod(opened, PRIVATE)  # nobody else could write to it before either
        return opened
    finally:
        os.close(fd)


def _step(fd: int, at: Path, *, last: bool, make: bool, follow: bool) -> int | Path:
    """The descriptor of one level below `fd`, or where a link of ours or of root's leads."""
    try:
        found = os.stat(at.name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        if not make:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(at)) from None
        with suppress(FileExistsError):
            os.mkdir(at.name, PRIVATE, dir_fd=fd)
        found = os.stat(at.name, dir_fd=fd, follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode):
        if last or not follow or found.st_uid not in (0, os.geteuid()):
            raise UnsafeDirectory(at, f"it is a symbolic link of {user_name(found.st_uid)}, and no directory; {_DO}")
        return _led_to(fd, at)
    below = os.open(at.name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        _check(at, os.fstat(below), last=last)
    except BaseException:
        os.close(below)
        raise
    return below


def _led_to(fd: int, at: Path) -> Path:
    """Where a link below `fd` leads. Raises FileNotFoundError where nothing is: it is not made, for its file system may be away."""
    target = os.readlink(at.name, dir_fd=fd)
    try:
        os.stat(at.name, dir_fd=fd)
    except FileNotFoundError:
        why = f"it is a symbolic link to {target}, which is not there; is its file system mounted?"
        raise FileNotFoundError(errno.ENOENT, why, str(at)) from None
    return at.parent / target


_DO = "remove it, or configure another place"


def _check(at: Path, found: os.stat_result, *, last: bool) -> None:
    """Whether nobody but us and root can change what is in a directory. Raises UnsafeDirectory."""
    me = os.geteuid()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != me and (last or (found.st_uid != 0 and not _is_unmapped_root(found.st_uid))):
        allowed = f"{user_name(me)}" if last else f"{user_name(me)} or root"
        raise UnsafeDirectory(at, f"it belongs to {user_name(found.st_uid)}, where only {allowed} may own it; {_DO}")
    if others_may_write(found) and (last or not mode & stat.S_ISVTX):
        raise UnsafeDirectory(
            at,
            f"others than {user_name(found.st_uid)} may write to it (mode {mode:04o}); chmod go-w it, or configure another place",
        )


def _is_unmapped_root(uid: int) -> bool:
    """Whether an owner is one that this user namespace (of a container) does not know: it may be the host's root."""
    try:
        overflow = int(Path("/proc/sys/fs/overflowuid").read_text())
        return uid == overflow and Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
    except (OSError, ValueError):
        return False
