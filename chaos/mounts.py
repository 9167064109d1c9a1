"""Mounts: what the kernel says of one, and commands that change one."""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from chaos.fault import CannotInject

TAKES_S = 20.0
AGAIN_S = 0.01


def options(mount: Path) -> frozenset[str]:
    """Those of a mount, and of its file system; empty where nothing is mounted."""
    found: frozenset[str] = frozenset()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        words = before.split()
        if words[4].encode().decode("unicode_escape") == str(mount):  # of several the last one is on top
            found = frozenset(words[5].split(",")) | frozenset(after.split()[2].split(","))
    return found


def mounted(path: Path) -> bool:
    """Whether something is mounted just there."""
    return bool(options(path))


def change(command: Sequence[str], *, patiently: bool = False) -> None:
    """Run a command that changes a mount.

    Args:
        patiently: try again for some seconds: a file that is open for writing keeps a file system busy.

    Raises:
        CannotInject: it failed.
    """
    if os.geteuid() != 0:
        raise CannotInject(f"`{' '.join(command)}` needs root")
    deadline = time.monotonic() + TAKES_S
    while True:
        told = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if told.returncode == 0:
            return
        if not patiently or time.monotonic() > deadline:
            raise CannotInject(f"`{' '.join(command)}` failed: {told.stderr.strip()}")
        time.sleep(AGAIN_S)
