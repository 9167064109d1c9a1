"""Checks that misbehave, for tests: each is called in a process of its own."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from resilient.health import compute
from resilient.health.report import Finding


def good(name: str) -> Iterator[Finding]:
    yield Finding(name, "ok", "is well")


def hangs_with_a_child(name: str, pids: Path) -> Iterator[Finding]:
    child = subprocess.Popen(["sleep", "600"])
    pids.write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
    yield Finding(name, "ok", "never comes")


def stops(name: str, pids: Path) -> Iterator[Finding]:
    pids.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    yield Finding(name, "ok", "never comes")


def half(name: str) -> Iterator[Finding]:
    yield Finding(name, "ok", "is well")
    raise OSError("the other half is missing")


def killed(name: str) -> Iterator[Finding]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield Finding(name, "ok", "never comes")


def flips_a_bit(rank: int, ranks: compute.Ranks, bad_rank: int) -> Iterator[Finding]:
    """An all-reduce whose sum has one bit wrong on one rank."""

    import torch
    import torch.distributed as dist

    def reduce(numbers: torch.Tensor) -> None:
        dist.all_reduce(numbers)
        if rank == bad_rank:
            numbers.view(torch.int32)[1234] ^= 1

    yield compute.all_reduce(rank, ranks, reduce)


def stays_away(rank: int, ranks: compute.Ranks, bad_rank: int) -> Iterator[Finding]:
    """An all-reduce that one rank does not come to."""
    if rank == bad_rank:
        time.sleep(600)
    yield compute.all_reduce(rank, ranks)
