"""Bytes between memory and disk without the page cache where the file system can, through it where not.

Owns opening, aligned memory, and whole reads and writes. A checkpoint is written once and read rarely: the page cache would cost
a copy, memory, and the speed of the disk (O_DIRECT writes are 1.5 to 3 times as fast as write and fsync).
"""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def memory(size_bytes: int) -> memoryview:
    """Private memory that begins at a page, as O_DIRECT wants it. Freed with the last view of it."""
    if size_bytes < _HUGE_PAGE_BYTES // 2:
        return memoryview(mmap.mmap(-1, max(PAGE_BYTES, size_bytes), mmap.MAP_PRIVATE))[:size_bytes]
    area = mmap.mmap(-1, -(-size_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES, mmap.MAP_PRIVATE)
    with suppress(OSError, AttributeError):
        area.madvise(mmap.MADV_HUGEPAGE)  # the kernel pins one page then rather than 512
    return memoryview(area)[:size_bytes]


def preallocate(fd: int, offset: int, size_bytes: int) -> None:
    """Have room on the disk for this stretch of a file, where the file system can promise it. Raises OSError if there is none.

    Writes are faster then, and the file is in one piece, whoever writes it in which order.
    """
    if _libc.fallocate(fd, 0, ctypes.c_int64(offset), ctypes.c_int64(size_bytes)) == 0:
        return  # posix_fallocate would write into every block where a file system cannot
    error = ctypes.get_errno()
    if error not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        raise OSError(error, os.strerror(error))


def open_to_write(path: Path, *, create: bool = False) -> int:
    """A file to write pages into. Raises OSError."""
    return _open(path, os.O_WRONLY | (os.O_CREAT if create else 0))


def open_to_write_and_read(path: Path) -> int:
    """A file that is there, to write pages into and read them back. Raises OSError."""
    return _open(path, os.O_RDWR)


def open_to_read(path: Path, *, cached: bool | None = None) -> int:
    """A file to read pages from.

    Args:
        cached: True to go through the page cache, False to go past it, None to find out whether the file is there already.

    Raises OSError.
    """
    if cached is None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if _in_cache(fd):
            return fd
        _set_direct(fd)
        return fd
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC) if cached else _open(path, os.O_RDONLY)


def write(fd: int, data: memoryview, offset: int) -> None:
    """Write all of it. What is not aligned, or a file system that refuses, goes through the page cache. Raises OSError."""
    while data:
        try:
            done = os.pwrite(fd, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not _clear_direct(fd):
                raise
            continue
        data, offset = data[done:], offset + done
        if data and done % PAGE_BYTES:
            _clear_direct(fd)


def read(fd: int, targets: Sequence[memoryview], offset: int) -> int:
    """Fill the targets one after the other as far as the file goes; the bytes that were read. Raises OSError."""
    left = [target for target in targets if target]
    total = 0
    while left:
        try:
            done = os.preadv(fd, left, offset + total)
        except OSError as error:
            if error.errno != errno.EINVAL or not _clear_direct(fd):
                raise
            continue
        total += done
        if done == 0:
            break
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if left:
            left[0] = left[0][done:]
            if done % PAGE_BYTES:
                _clear_direct(fd)
    return total


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o666)


def _set_direct(fd: int) -> None:
    with suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)


def _clear_direct(fd: int) -> bool:
    """Whether the file was open for O_DIRECT, and is no more."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True


def _in_cache(fd: int) -> bool:
    """Whether some pages from all over a file are in memory already; True of a file that has no disk under it."""
    size = os.fstat(fd).st_size
    if size == 0:
        return True
    page = bytearray(1)
    try:
        return all(os.preadv(fd, [page], size * part // 4, os.RWF_NOWAIT) == 1 for part in range(4))
    except OSError:  # not there, or the file system cannot tell
        return False


_MADV_DONTNEED, _MADV_POPULATE_WRITE = 4, 23


def populate(area: mmap.mmap, offset: int, size_bytes: int) -> None:
    """Map these pages for writing now rather than one by one as they are touched; the file must have them. Best effort."""
    _advise(area, offset, size_bytes, _MADV_POPULATE_WRITE)


def unmap_pages(area: mmap.mmap, offset: int, size_bytes: int) -> None:
    """Have this process's page tables without these pages of a file in shared memory, until it touches one; the file keeps them.

    A process that dies has its tables taken down page by page first, at some 16 GiB a second. Best effort.
    """
    _advise(area, offset, size_bytes, _MADV_DONTNEED)


def _advise(area: mmap.mmap, offset: int, size_bytes: int, what: int) -> None:
    first = offset // PAGE_BYTES * PAGE_BYTES
    view = ctypes.c_char.from_buffer(area, first)
    try:
        length = ctypes.c_size_t(offset + size_bytes - first)
        _libc.madvise(ctypes.c_void_p(ctypes.addressof(view)), length, ctypes.c_int(what))
    finally:
        del view
