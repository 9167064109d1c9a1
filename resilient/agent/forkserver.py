"""The agent's end of the node's fork server: forking processes, and what they ended with.

The other end is `resilient.agent.template`, which tells what processes are involved.
"""

import logging
import os
import pickle
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe
from typing import Any

from resilient.agent.inspection import state_of
from resilient.agent.limits import FORK_S, KILL_S, NEXT_SERVER_S, STATUS_S, STRAYS_S
from resilient.agent.template import PACKET_BYTES, pickled
from resilient.lifeline import children_of, name_of
from resilient.recovery.faults import listed

log = logging.getLogger(__name__)

Target = Callable[..., object]
Wait = Callable[[int, float], bool]


class ForkServerGone(Exception):
    """The template has ended; nothing can be forked on this node any more."""


class _Refused(Exception):
    """The kernel has; `args` are its number and words."""


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
        request, descriptors = pickled((target, tuple(args), forked.name))
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
