"""A limit on the whole of an answer. The timeout of a socket is for each read: a server that sends a byte a second would keep a
request for ever.

Owns the connections that a thread opens within the limit, whichever library opens them: the interpreter tells of each
(`socket.connect`, an audit event). When the time is over they are shut down, also in the middle of a TLS handshake, and no others
are opened.
"""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class _Connection:
    """A socket by its descriptor, and its inode: libraries replace the object, as for TLS, and the number may be used again."""

    fd: int
    inode: int

    def end(self) -> None:
        """Shut it down, if it is still there."""
        try:
            with socket.socket(fileno=os.dup(self.fd)) as same:
                if os.fstat(same.fileno()).st_ino == self.inode:
                    same.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed, or not connected
            pass

    @property
    def is_there(self) -> bool:
        try:
            return os.fstat(self.fd).st_ino == self.inode
        except OSError:
            return False


class _OfThread(threading.local):
    """The connections of a thread, which libraries may keep for the next request, and whether a limit is over."""

    def __init__(self) -> None:
        self.connections: list[_Connection] = []
        self.over: threading.Event | None = None  # None: there is no limit


_of_thread = _OfThread()


def _on_audit_event(event: str, args: tuple[object, ...]) -> None:
    if event != "socket.connect" or (over := _of_thread.over) is None:
        return
    if over.is_set():
        raise TimeoutError("the time for this request is over")
    connecting = args[0]
    if isinstance(connecting, socket.socket) and connecting.family in (socket.AF_INET, socket.AF_INET6):
        fd = connecting.fileno()
        _of_thread.connections.append(_Connection(fd, os.fstat(fd).st_ino))


sys.addaudithook(_on_audit_event)


@contextlib.contextmanager
def in_time(limit_s: float) -> Iterator[None]:
    """Requests of this thread have so long, with their answers.

    Raises:
        TimeoutError: they took longer, whatever they came to: an answer that is cut off in its head looks like a whole one.
    """
    mine = _of_thread.connections = [each for each in _of_thread.connections if each.is_there]
    over = _of_thread.over = threading.Event()

    def end() -> None:
        over.set()
        for each in list(mine):
            each.end()

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if not over.is_set():
            raise
        failure = error
    finally:
        timer.cancel()
        _of_thread.over = None
    if over.is_set():
        raise TimeoutError(f"the whole answer was not there after {limit_s:g} s") from failure
