"""The agent that a node had before this one, where it is still there.

An agent that is one of many tasks of a step of Slurm cannot be ended by the driver: it may hang, have been too slow, or wait until
its job is over because it has lost its driver. Its successor on the same node ends it before it does anything else.
"""

import logging
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from resilient.agent import NAME
from resilient.slurm.roster import NODE_NAME

log = logging.getLogger(__name__)

GONE_S = 10.0  # a process that was killed and is not gone by then sits in the kernel


def end_predecessors(run_dir: Path) -> list[int]:
    """Kill this user's other agents of this run on this node, and wait at most `GONE_S` until they are gone; their process ids."""
    deadline, ended = time.monotonic() + GONE_S, []
    for pid in predecessors(run_dir):
        with suppress(ProcessLookupError, PermissionError):
            fd = os.pidfd_open(pid)
            try:
                if not _is_one(pid, run_dir):  # gone, and its number another's
                    continue
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                ended.append(pid)
                poll = select.poll()
                poll.register(fd, select.POLLIN)
                if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                    log.error("process %d, the agent before this one, does not die; leaving it behind", pid)
            finally:
                os.close(fd)
    return ended


def predecessors(run_dir: Path) -> Iterator[int]:
    """Ids of this user's other agents of this run on this node of Slurm."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid() and _is_one(int(path.name), run_dir):
            yield int(path.name)


def _is_one(pid: int, run_dir: Path) -> bool:
    process = Path(f"/proc/{pid}")
    try:
        if process.stat().st_uid != os.getuid() or (process / "comm").read_text(errors="replace").strip() != NAME:
            return False  # what an agent has forked has another name
        words = (process / "cmdline").read_bytes().split(b"\0")
        variables = (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return (
        b"resilient.agent" in words
        and _follows(words, b"--run-dir") == os.fsencode(run_dir)
        and f"{NODE_NAME}={os.environ.get(NODE_NAME, '')}".encode() in variables
    )


def _follows(words: list[bytes], option: bytes) -> bytes | None:
    place = words.index(option) + 1 if option in words else len(words)
    return words[place] if place < len(words) else None
