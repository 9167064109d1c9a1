"""Memory that a step on a CPU has freed stays with the process, for the next step.

By default glibc gives large blocks back to the kernel as soon as they are free. Each step then asks for the same blocks again, and
the kernel clears every page of them: about a twentieth of the time of a step. A step needs what the one before it has freed.
See `mallopt(3)`.
"""

import ctypes

_TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD of malloc.h: how much may lie free at the end of the heap; -1: anything
_MMAP_MAX = -4  # M_MMAP_MAX: how many blocks may be mappings of their own, which are unmapped when they are freed


def keep_freed_memory() -> bool:
    """From now on, for all of this process. False where the C library cannot be asked: it is not glibc."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(_MMAP_MAX, 0)) and bool(library.mallopt(_TRIM_THRESHOLD, -1))
