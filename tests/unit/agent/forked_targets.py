"""What the tests of the fork server have it call. A forked process imports this module, so it imports next to nothing."""

import os
import time
from multiprocessing.connection import Connection


def leave(status: object) -> None:
    raise SystemExit(status)


def leave_when_told(orders: Connection) -> None:
    leave(orders.recv())


def answer(orders: Connection) -> None:
    orders.send((os.getppid(), orders.recv()))


def sleep(_: object = None) -> None:
    time.sleep(600)


def fail() -> None:
    raise ValueError("as it was told to")


def leave_one_behind(orders: Connection) -> None:
    """A process in a session of its own, as a daemon is: its id is told."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    orders.send(pid)
