"""flock(2), with an error that says what is missing where a file system has no such locks; and whether it has hard links."""

import errno
import fcntl
import os
from pathlib import Path

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP}


def flock(fd: int, path: Path, operation: int) -> None:
    """Raises BlockingIOError where another holds it and LOCK_NB is given, OSError.

    Args:
        path: of the open file, for the error.
    """
    try:
        fcntl.flock(fd, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        why = f"{os.strerror(error.errno)}: its file system has no flock(2); Lustre has it with the mount option `flock`"
        raise OSError(error.errno, why, str(path)) from error


def has_no_links(error: OSError) -> bool:
    """Whether link(2) has failed because a file system has no hard links, as FAT, and many that FUSE mounts."""
    return error.errno in _NO_LINKS
