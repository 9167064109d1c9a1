"""Mounts: what the kernel says of one, and commands that change one."""

import os
import re
import time
from pathlib import Path

from chaos.fault import CannotInject
from chaos.injectors.guard import Command, Guard

TAKES_S = 20.0
AGAIN_S = 0.01


def options(mount: Path) -> frozenset[str]:
    """Those of a mount, and of its file system; empty where nothing is mounted."""
    found: frozenset[str] = frozenset()
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        words = before.split()
        if words[4] == as_listed(mount):  # of several the last one is on top
            found = frozenset(words[5].split(",")) | frozenset(after.split()[2].split(","))
    return found


def as_listed(path: Path) -> str:
    """How mountinfo writes a path: what would part words is an octal number (proc(5))."""
    return re.sub(r"[ \t\n\\]", lambda found: f"\\{ord(found[0]):03o}", str(path))


def mounted(path: Path) -> bool:
    """Whether something is mounted just there."""
    return bool(options(path))


def change(guard: Guard, command: Command, *, patiently: bool = False) -> None:
    """Run a command that changes a mount.

    Args:
        guard: who has been told how to undo it.
        patiently: try again for some seconds: a file that is open for writing keeps a file system busy.

    Raises:
        CannotInject: it failed.
    """
    if os.geteuid() != 0:
        raise CannotInject(f"`{' '.join(command)}` needs root")
    deadline = time.monotonic() + TAKES_S
    while True:
        try:
            return guard.run(command)
        except CannotInject:
            if not patiently or time.monotonic() > deadline:
                raise
        time.sleep(AGAIN_S)
