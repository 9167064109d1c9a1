"""Whether a thread is held by a GPU, looked at from another thread. A native sleep stands in for the driver's wait."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from resilient.agent.held import held_in

HELD_S = 5.0  # a look takes some hundredths of it
LONG_S = 60.0  # where it must still be held when it is looked at, on a machine that stands still for seconds


class Tensor:
    """Its methods wait as those of a tensor on a GPU do: natively, and with the interpreter free."""

    tolist = staticmethod(time.sleep)

    def __matmul__(self, other: "Tensor") -> None:
        raise NotImplementedError


@contextmanager
def running(work: Callable[[threading.Event], object]) -> Iterator[int]:
    """A thread that does this; its ident, once it has begun."""
    begun = threading.Event()
    thread = threading.Thread(target=work, args=(begun,), daemon=True)
    thread.start()
    begun.wait()
    assert thread.ident is not None
    yield thread.ident


def waits(begun: threading.Event) -> None:
    numbers = Tensor()
    begun.set()
    numbers.tolist(
        LONG_S,
    )


def sleeps(begun: threading.Event) -> None:
    begun.set()
    time.sleep(HELD_S)


def spins(begun: threading.Event) -> None:
    begun.set()
    until = time.monotonic() + HELD_S
    while time.monotonic() < until:
        pass


def counts(begun: threading.Event) -> None:
    begun.set()
    number = 0
    while number < 10**7:
        number += 1


def reads(begun: threading.Event) -> None:
    read, write = os.pipe()
    end = threading.Timer(HELD_S, os.close, [write])
    end.start()
    begun.set()
    os.read(read, 1)
    os.close(read)


def test_a_thread_that_waits_for_numbers_of_a_gpu_is_held():
    with running(waits) as thread:
        until, found = time.monotonic() + LONG_S, None
        while found is None and time.monotonic() < until:  # it may be before its call yet
            found = held_in(thread)
    assert found is not None and found.startswith("numbers.tolist( LONG_S")


@pytest.mark.parametrize("work", [sleeps, spins, counts, reads])
def test_a_thread_that_sleeps_computes_or_reads_is_not(work: Callable[[threading.Event], object]):
    with running(work) as thread:
        assert [held_in(thread) for _ in range(3)] == [None] * 3


def test_a_thread_that_is_gone_is_not():
    assert held_in(0) is None


# Garbage whose finalizer starts a thread, and threads whose frames are new at each look: Python 3.11 deadlocks within a second.
COLLECTS = """
import _thread, gc, threading, time
from resilient.agent.frames import current_frames

class Garbage:
    def __init__(self):
        self.itself = self
    def __del__(self):
        _thread.start_new_thread(int, ())

def wait(depth):
    wait(depth - 1) if depth else time.sleep(0.0005)

def work():
    while not over.is_set():
        wait(3)

over = threading.Event()
threads = [threading.Thread(target=work, daemon=True) for _ in range(6)]
for each in threads:
    each.start()
gc.set_threshold(1)
for _ in range(500):
    Garbage()
    assert len(current_frames()) >= 7
assert gc.isenabled()
gc.set_threshold(0)
over.set()
"""


def test_threads_are_looked_at_whatever_garbage_there_is():
    subprocess.run([sys.executable, "-c", COLLECTS], check=True, timeout=200)
