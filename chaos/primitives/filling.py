"""A file that takes all the room of a file system."""

import errno
import os
from pathlib import Path

LEAST_BYTES = 4096


def fill(path: Path) -> int:
    """Make a file as large as it can be, or larger than it is; the bytes that it takes."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        want = 1 << 34
        while want >= LEAST_BYTES:
            end = os.fstat(fd).st_size
            try:
                os.posix_fallocate(fd, end, want)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EFBIG):
                    raise
                want //= 2
        return os.fstat(fd).st_blocks * 512  # what was begun and did not fit is there as well
    finally:
        os.close(fd)
