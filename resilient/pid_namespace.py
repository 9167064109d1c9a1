"""PID namespaces: which process a number of another namespace is, as that of a container on this machine.

Reads /proc. A number means nothing outside of its namespace: here it may be that of any other process.
"""

import os
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


def own() -> int:
    """Tells the PID namespace of this process from all others that are there on this machine; 0 where it cannot be found out."""
    try:
        return (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return 0


def translated(pid: int, namespace: int) -> int | None:
    """The number that a process has in this namespace; None where it is not seen from here.

    Args:
        pid: its number in its own namespace.
        namespace: as `own` has told it there; 0: not known, and taken to be this one.
    """
    if namespace in (0, own()):
        return pid
    for seen in by_own_number().get(pid, ()):
        with suppress(OSError):  # it has ended, or is another user's
            if (_PROC / str(seen) / "ns/pid").stat().st_ino == namespace:
                return seen
    return None


def by_own_number() -> dict[int, list[int]]:
    """The processes that are seen from here, as they are numbered here, by the number that each has in its own namespace."""
    found: dict[int, list[int]] = {}
    try:
        if str((_PROC / "self").readlink()) != str(os.getpid()):
            return found  # /proc is that of another namespace
        processes = [path for path in _PROC.iterdir() if path.name.isdecimal()]
    except OSError:
        return found
    for path in processes:
        with suppress(OSError):  # it has ended
            number = innermost((path / "status").read_text(errors="replace"))
            if number is not None:
                found.setdefault(number, []).append(int(path.name))
    return found


def innermost(status: str) -> int | None:
    """The number of a process in its own namespace, as its `/proc/PID/status` has it; None where the kernel does not say."""
    for line in status.splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return None
