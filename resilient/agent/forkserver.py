"""The node's fork server: a process that has imported what ranks need, and forks on request.

Three processes are involved. The *agent* imports torch and forks the *template*. The template imports the entry point
(`resilient.agent.preload`), stays single-threaded, and forks the *server*. The server forks ranks, standbys and checks as the agent
asks. A server that dies takes what it has forked along, and the template forks the next one within milliseconds; a template that
dies takes the server along, and the agent ends. Each is tied to its parent by `lifeline`.

The server and the agent talk over a pair of SOCK_SEQPACKET sockets: a pickled request with file descriptors, a reply with the
process's pidfd, and the status of each process that has ended. `multiprocessing`'s own fork server cannot be used: it is started
by exec, so that it would import everything a second time.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

from resilient.agent.inspection import state_of
from resilient.agent.limits import FORK_S, KILL_S, NEXT_SERVER_S, STATUS_S, STRAYS_S
from resilient.faults import listed
from resilient.lifeline import (
    adopt_orphans,
    children_of,
    die_with_parent,
    flush_streams,
    leave_stops_to_the_driver,
    name_of,
    name_process,
)

log = logging.getLogger(__name__)

PACKET_BYTES = 1 << 17  # of a request; a rank's environment is a few KiB
DESCRIPTORS = 16
MOST_DEATHS, WITHIN_S = 10, 60.0  # of servers, before the template gives up

Target = Callable[..., object]
Wait = Callable[[int, float], bool]


class ForkServerGone(Exception):
    """The template has ended; nothing can be forked on this node any more."""


class _Refused(Exception):
    """The kernel has; `args` are its number and words."""


# -- in the agent --------------------------------------------------------------------------------------------------------


class Forked:
    """A process that the fork server has forked. It has the methods of `multiprocessing.Process` that its owner needs.

    Invariants: `pid` and `sentinel` are set by `start`; `exitcode` is None until the process has ended.
    """

    def __init__(self, server: "ForkServer", target: Target, args: Sequence[Any], name: str) -> None:
        self._server, self._target, self._args = server, target, args
        self.name = name
        self.pid: int | None = None
        self._pidfd = -1
        self._exitcode: int | None = None

    def start(self) -> None:
        """Fork it. Raises ForkServerGone."""
        self.pid, self._pidfd = self._server.fork(self, self._target, self._args)

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process has ended."""
        return self._pidfd

    @property
    def exitcode(self) -> int | None:
        """The exit status, the negative number of a signal, None while it runs."""
        if self._exitcode is None and self._pidfd >= 0 and readable(self._pidfd, 0.0):
            self._exitcode = self._server.status_of(self)
        return self._exitcode

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most `timeout` seconds; without one, `KILL_S`."""
        if self._exitcode is None and self._server.wait(self._pidfd, KILL_S if timeout is None else timeout):
            self._exitcode = self._server.status_of(self)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def ended(self, exitcode: int) -> None:
        """The server has said so."""
        self._exitcode = exitcode

    def close(self) -> None:
        """Give the file descriptor back. Raises ValueError while the process runs."""
        if self._pidfd < 0:
            return
        if self.exitcode is None:
            raise ValueError(f"process {self.pid} still runs")
        self._server.forget(self)
        os.close(self._pidfd)
        self._pidfd = -1


class ForkServer:
    """The agent's end.

    Args:
        control: socket to the template, which sends a socket to each new server.
        wait: waits until a descriptor is readable, at most so many seconds, and returns whether it is. The agent goes on with its
            loop meanwhile, in which `receive` may be called; nothing else of this class.

    Attributes:
        prepared: exit status of the preparation that the template has forked, once it has ended.
    """

    Pipe = staticmethod(Pipe)

    def __init__(self, control: socket.socket, wait: "Wait | None" = None) -> None:
        self._control = control
        self.wait: Wait = wait or readable
        self._server: socket.socket | None = None
        self._server_pid = 0
        self._children: dict[int, Forked] = {}
        self.prepared: int | None = None

    def fileno(self) -> int:
        """Readable when the template has something to say: a new server, the end of the preparation, or its own end."""
        return self._control.fileno()

    @property
    def ready(self) -> bool:
        """Whether a server has been seen, and so everything is imported."""
        return self._server is not None

    def receive(self) -> None:
        """Take what the template says, if it has said something. Raises ForkServerGone."""
        if not readable(self._control.fileno(), 0.0):  # `recv_fds` does not pass MSG_DONTWAIT on
            return
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._control, PACKET_BYTES, 1)
        except OSError as error:
            raise ForkServerGone(str(error)) from error
        if not packet:
            raise ForkServerGone("the process that imports the entry point has ended")
        if descriptors:
            self._drop_server()
            self._server, self._server_pid = socket.socket(fileno=descriptors[0]), int(packet)
        else:
            self.prepared = int(packet)

    def Process(  # noqa: N802 - as multiprocessing has it
        self, *, target: Target, args: Sequence[Any] = (), name: str = "", daemon: bool = True
    ) -> Forked:
        """A process that will call `target(*args)`; both travel pickled, connections among the arguments by file descriptor.

        Args:
            name: as `ps` shows it.
            daemon: each is, for the server takes them along.
        """
        return Forked(self, target, args, name)

    def fork(self, forked: Forked, target: Target, args: Sequence[Any]) -> tuple[int, int]:
        """Process id and pidfd of a new process. Where the server has died meanwhile, the next one does it.

        Raises:
            ForkServerGone: there will be no next one.
            OSError: the kernel has no room for a process.
        """
        request, descriptors = _pickled((target, tuple(args), forked.name))
        while True:
            server = self._next_server(time.monotonic() + NEXT_SERVER_S)
            try:
                socket.send_fds(server, [request], descriptors)
                pid, pidfd = self._reply(server, time.monotonic() + FORK_S)
            except TimeoutError:
                log.warning("the fork server (process %d) has not answered for %.0f s; replacing it", self._server_pid, FORK_S)
                with suppress(ProcessLookupError):
                    os.kill(self._server_pid, signal.SIGKILL)
                self._drop_server()
            except _Refused as refused:
                raise OSError(*refused.args) from refused
            except OSError:
                self._drop_server()
            else:
                self._children[pid] = forked
                return pid, pidfd

    def status_of(self, forked: Forked) -> int:
        """The exit status of a process that has ended; a server that has died took it along."""
        began = time.monotonic()
        deadline, last = began + STATUS_S, began + max(STATUS_S, FORK_S)
        with suppress(OSError):
            while (server := self._server) is not None and self._children.get(forked.pid or 0) is forked:
                try:
                    self._take(server, deadline)
                except TimeoutError:
                    if time.monotonic() >= last or state_of(self._server_pid) != "R":
                        raise
                    deadline = min(last, time.monotonic() + STATUS_S)  # it would tell, and gets no core
        found = forked._exitcode
        return -signal.SIGKILL if found is None else found

    def end_strays(self) -> None:
        """Kill what processes that have ended have started and left behind, in whatever session: it may hold memory of a GPU.

        Such processes become the server's own children. What is left after `STRAYS_S` sits in the kernel, and is told.
        """
        deadline, told = time.monotonic() + STRAYS_S, set[int]()
        while strays := self._strays():
            if time.monotonic() > deadline:
                log.error("what ranks had started does not die: processes %s", listed(sorted(strays)))
                return
            for pid in strays:
                if pid not in told:
                    told.add(pid)
                    log.info("killing process %d (%s), which an ended rank had started", pid, name_of(pid))
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)

    def _strays(self) -> set[int]:
        """The server's children that were not asked for, but for those that have ended."""
        if self._server is None:
            return set()
        return {pid for pid in children_of(self._server_pid) if pid not in self._children and state_of(pid) not in ("Z", "")}

    def forget(self, forked: Forked) -> None:
        if self._children.get(forked.pid or 0) is forked:
            del self._children[forked.pid or 0]

    def close(self) -> None:
        """End the server, and with it all that still runs; a template ends with the agent."""
        self._drop_server()
        self._control.close()

    def _next_server(self, deadline: float) -> socket.socket:
        """The server; where it has died, the next one, which the template forks at once. Raises ForkServerGone."""
        while self._server is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise ForkServerGone(f"no other fork server within {NEXT_SERVER_S:.0f} s")
            self.wait(self._control.fileno(), left_s)
            self.receive()
        return self._server

    def _reply(self, server: socket.socket, deadline: float) -> tuple[int, int]:
        while (reply := self._take(server, deadline)) is None:
            pass
        return reply

    def _take(self, server: socket.socket, deadline: float) -> tuple[int, int] | None:
        """One packet of a server: a reply, or None where it was the end of a process. Raises OSError, TimeoutError among them."""
        is_there = self.wait(server.fileno(), max(0.0, deadline - time.monotonic()))
        if self._server is not server:
            raise ConnectionResetError("the fork server has ended, and there is another one")
        if not is_there:
            raise TimeoutError
        packet, descriptors, _, _ = socket.recv_fds(server, PACKET_BYTES, 1)
        if not packet:
            self._drop_server()
            raise ConnectionResetError("the fork server has ended")
        word, pid, status = pickle.loads(packet)
        if word == "forked":
            return pid, descriptors[0]
        if word == "failed":
            raise _Refused(status, os.strerror(status))
        if (child := self._children.pop(pid, None)) is not None:
            child.ended(status)
        return None

    def _drop_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._children.clear()  # they went with it


def readable(fd: int, timeout_s: float) -> bool:
    """Wait until a descriptor is readable, at most so long, and do nothing else; whether it is."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


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


def _pickled(request: object) -> tuple[bytes, list[int]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(request)
    return file.getvalue(), pickler.descriptors


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
