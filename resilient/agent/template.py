"""The node's fork server: a process that has imported what ranks need, and forks on request.

Three processes are involved. The *agent* imports torch and forks the *template*. The template imports the entry point
(`resilient.agent.preload`), stays single-threaded, and forks the *server*. The server forks ranks, standbys and checks as the agent
asks. A server that dies takes what it has forked along, and the template forks the next one within milliseconds; a template that
dies takes the server along, and the agent ends. Each is tied to its parent by `lifeline`.

The server and the agent (`resilient.agent.forkserver`) talk over a pair of SOCK_SEQPACKET sockets: a pickled request with file
descriptors, a reply with the process's pidfd, and the status of each process that has ended. `multiprocessing`'s own fork server
cannot be used: it is started by exec, so that it would import everything a second time.
"""

import io
import logging
import os
import pickle
import select
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

from resilient.lifeline import (
    adopt_orphans,
    die_with_parent,
    flush_streams,
    leave_stops_to_the_driver,
    name_process,
)

log = logging.getLogger(__name__)

PACKET_BYTES = 1 << 17  # of a request; a rank's environment is a few KiB
DESCRIPTORS = 16
MOST_DEATHS, WITHIN_S = 10, 60.0  # of servers, before the template gives up


# -- a request ------------------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Connections become the place of their descriptor among those that are sent."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.descriptors: list[int] = []

    def persistent_id(self, obj: object) -> tuple[int, bool, bool] | None:
        if not isinstance(obj, Connection):
            return None
        self.descriptors.append(obj.fileno())
        return len(self.descriptors) - 1, obj.readable, obj.writable


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, descriptors: Sequence[int]) -> None:
        super().__init__(file)
        self._descriptors = descriptors

    def persistent_load(self, pid: tuple[int, bool, bool]) -> Connection:
        place, readable, writable = pid
        return Connection(self._descriptors[place], readable=readable, writable=writable)


def pickled(request: object) -> tuple[bytes, list[int]]:
    """A request as bytes, and the file descriptors that travel with it."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(request)
    return file.getvalue(), pickler.descriptors


# -- in the template ------------------------------------------------------------------------------------------------------


def keep_serving(control: socket.socket, *, preparation: int | None, name: str = "forkserver") -> NoReturn:
    """In the template, when all is imported: fork a server, and another when it has died, for as long as the agent lives.

    Args:
        preparation: process id of the preparation, where one was forked here; its exit status is told.
        name: of the servers' processes.
    """
    deaths: deque[float] = deque(maxlen=MOST_DEATHS)
    while True:
        pid, server = _fork_server(name, control)
        socket.send_fds(control, [str(pid).encode()], [server.fileno()])
        server.close()
        while (ended := os.wait())[0] != pid:
            if ended[0] == preparation:
                control.send(str(os.waitstatus_to_exitcode(ended[1])).encode())
        deaths.append(time.monotonic())
        if len(deaths) == MOST_DEATHS and deaths[-1] - deaths[0] < WITHIN_S:
            log.error("the fork server has died %d times within a minute", MOST_DEATHS)
            os._exit(1)


def _fork_server(name: str, *own: socket.socket) -> tuple[int, socket.socket]:
    """Process id of a server and a socket to it. Args: own: what it must not have."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(parent)
            name_process(name)
            for each in (ours, *own):
                each.close()
            _serve(its)
        finally:
            os._exit(1)  # after a traceback
    its.close()
    return pid, ours


# -- in the server --------------------------------------------------------------------------------------------------------


def _serve(agent: socket.socket) -> NoReturn:
    """Fork what the agent asks for, and tell it what has ended; ends with the agent."""
    leave_stops_to_the_driver()
    adopt_orphans()
    woken, waker = socket.socketpair()
    for each in (woken, waker):
        each.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    poll = select.poll()
    for each in (agent, woken):
        poll.register(each, select.POLLIN)
    asked_for: set[int] = set()  # others are orphans, of whose ends nobody is told
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if woken.fileno() in ready:
            woken.recv(4096)
            for pid, status in _reaped():
                if pid in asked_for:
                    asked_for.remove(pid)
                    agent.send(pickle.dumps(("ended", pid, os.waitstatus_to_exitcode(status))))
        if agent.fileno() in ready:
            request, descriptors, _, _ = socket.recv_fds(agent, PACKET_BYTES, DESCRIPTORS)
            if not request:
                os._exit(0)
            asked_for.update(_fork(agent, request, descriptors, (woken, waker)))


def _reaped() -> Iterator[tuple[int, int]]:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def _fork(agent: socket.socket, request: bytes, descriptors: Sequence[int], own: Sequence[socket.socket]) -> list[int]:
    """Fork a process and tell the agent; its process id, if it could be forked."""
    server, forked = os.getpid(), list[int]()
    try:
        pid = os.fork()
    except OSError as error:  # no memory, or too many processes
        agent.send(pickle.dumps(("failed", 0, error.errno)))
    else:
        if pid == 0:
            die_with_parent(server)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (agent, *own):
                each.close()
            _call(request, descriptors)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(agent, [pickle.dumps(("forked", pid, 0))], [pidfd])
        os.close(pidfd)
        forked.append(pid)
    for descriptor in descriptors:
        os.close(descriptor)
    return forked


def _call(request: bytes, descriptors: Sequence[int]) -> NoReturn:
    """All that a forked process does."""
    status = 1
    try:
        target, args, name = _Unpickler(io.BytesIO(request), descriptors).load()
        name_process(name)
        target(*args)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - whatever ends it stands in the agent's log
        traceback.print_exc()
    flush_streams()
    os._exit(status)
