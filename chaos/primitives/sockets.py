"""The TCP sockets of another process of the same user: reset, made deaf, and made to hear again, without root.

`pidfd_getfd(2)` duplicates their descriptors. `python -m chaos.primitives.sockets PID START_TIME` removes the filters of all
sockets of that process, and does no harm where there is none.
"""

import ctypes
import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil

from chaos.fault import CannotInject
from resilient.imports import shadowing

_PIDFD_GETFD = 438  # the same number on all architectures
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_MEMINFO = 26, 27, 55
_BPF_RET = 0x06

_libc = ctypes.CDLL(None, use_errno=True)


def established(process: psutil.Process) -> Mapping[int, str]:
    """Descriptors of its TCP connections, each with the address of the other end."""
    found = process.net_connections("tcp")
    return {each.fd: f"{each.raddr.ip}:{each.raddr.port}" for each in found if each.status == psutil.CONN_ESTABLISHED}


@contextmanager
def borrowed(process: psutil.Process) -> Iterator[Mapping[str, socket.socket]]:
    """Its TCP connections, by the address of the other end and the descriptor, as sockets of this process as well.

    Raises:
        CannotInject: there are none, or the kernel does not duplicate them.
    """
    mine: dict[str, socket.socket] = {}
    try:
        pidfd = os.pidfd_open(process.pid)
        try:
            for fd, other in established(process).items():
                copy_fd = _libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
                if copy_fd >= 0:
                    mine[f"{other} ({fd})"] = socket.socket(fileno=copy_fd)
                elif ctypes.get_errno() != errno.EBADF:  # closed meanwhile
                    raise CannotInject(_refused(process.pid, ctypes.get_errno()))
        finally:
            os.close(pidfd)
        if not mine:
            raise CannotInject(f"process {process.pid} has no TCP connection")
        yield mine
    finally:
        for each in mine.values():
            each.close()


def _refused(pid: int, error: int) -> str:
    why = f"the kernel does not duplicate sockets of process {pid}: {os.strerror(error)}"
    return f"{why}; with kernel.yama.ptrace_scope above 0 that takes root" if error == errno.EPERM else why


def reset(connection: socket.socket) -> None:
    """Both ends find that the other one has reset it.

    Raises:
        OSError: it is not connected.
    """
    # To connect to no address is to disconnect, which is told with a RST, while a shutdown is told with a FIN.
    nowhere = struct.pack("H14x", socket.AF_UNSPEC)
    if _libc.connect(connection.fileno(), nowhere, len(nowhere)):
        connection.shutdown(socket.SHUT_RDWR)  # some thread waits in a read: it cannot be disconnected


def deafen(connection: socket.socket) -> None:
    """All that arrives is dropped, acknowledgements too, as if the network had lost it."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RET, 0, 0, 0))
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HxxxxxxP", 1, ctypes.addressof(program)))


def dropped(connection: socket.socket) -> int:
    """Packets that have arrived for it and were dropped, since it is there."""
    found: int = struct.unpack("9I", connection.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 36))[-1]
    return found


def let_hear(connection: socket.socket) -> None:
    """It hears again; what was lost is sent again by the other end, in time."""
    with suppress(FileNotFoundError):  # it never was deaf
        connection.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def undo(process: psutil.Process) -> list[str]:
    """The command that lets all sockets of a process hear again."""
    return [*shadowing.running("chaos.primitives.sockets"), str(process.pid), repr(process.create_time())]


def main(pid: str, start_time: str) -> int:
    """See the module."""
    with suppress(psutil.NoSuchProcess, CannotInject, ProcessLookupError):
        process = psutil.Process(int(pid))
        if process.create_time() == float(start_time):  # else the id is another one's by now
            with borrowed(process) as connections:
                for each in connections.values():
                    let_hear(each)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
