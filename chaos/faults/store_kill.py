"""The store of a generation dies."""

import ctypes
import os
import socket
from collections.abc import Iterable

import psutil

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.processes import until

_PIDFD_GETFD = 438  # the same number on all architectures


class StoreKill(Outside):
    """The store through which the ranks of a generation meet is gone: nobody is let in, and those who were are thrown out."""

    aim = Aim.RUN
    undone = "the next generation has a store of its own"

    def expects(self) -> Expectation:
        # Ranks that have met need it no more, unless they make groups later.
        return Expectation(actions=frozenset({"restart_workers"}))

    def inject(self, context: InjectionContext) -> Evidence:
        agent, port = _host(context)
        sockets = [each for each in agent.net_connections("tcp") if each.laddr and each.laddr.port == port]
        _shut_down(agent.pid, [each.fd for each in sockets])
        until(lambda: port not in _listening(agent), f"something still listens on port {port}")
        return {"pid": agent.pid, "port": port, "clients": len(sockets) - 1}


def _host(context: InjectionContext) -> tuple[psutil.Process, int]:
    """The agent whose store all use, and where it listens; those of other nodes listen nowhere."""
    for agent in context.agents():
        ports = _listening(agent)
        if ports:
            return agent, ports[0]
    raise CannotInject("no agent here has a store")


def _listening(process: psutil.Process) -> list[int]:
    return [each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]


def _shut_down(pid: int, fds: Iterable[int]) -> None:
    """Shut down sockets of another process of this user."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    try:
        for fd in fds:
            copy_fd = libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
            if copy_fd < 0:
                why = os.strerror(ctypes.get_errno())
                raise CannotInject(
                    f"the kernel does not duplicate sockets of process {pid}: {why} (kernel.yama.ptrace_scope above 0?)"
                )
            with socket.socket(fileno=copy_fd) as mine:
                mine.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(pidfd)
