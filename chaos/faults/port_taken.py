"""Ports are taken."""

import contextlib
import errno
import shlex
import socket
from pathlib import Path

from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortTaken(Outside):
    """All ports are taken that a host gives away; what listens already goes on, and a new generation must wait for one."""

    # No port of a run is chosen before: stores, snapshot daemons and transports take whichever is free. So all of them are taken.
    aim = Aim.NODE
    needs = frozenset({Need.ROOT, Need.LAB})
    undone = "the range of ports is as it was, and those that were taken are free"

    seconds: float = Field(10.0, gt=0, description="for which they are taken")
    ports: int = Field(16, ge=2, description="to which the host's range is narrowed before, so that others are not in want of them")

    def expects(self) -> Expectation:
        return Expectation()

    def inject(self, context: InjectionContext) -> Evidence:
        if not context.lab:
            raise CannotInject("this is done to hosts of a lab alone: a machine has other users")
        before = RANGE.read_text().split()
        first = int(before[0])
        context.guard.add(["sh", "-c", f"echo {shlex.join(before)} > {RANGE}"])
        with contextlib.ExitStack() as taken:
            for port in range(first, first + self.ports):
                with contextlib.suppress(OSError):  # taken by somebody else, which is as good
                    taken.enter_context(socket.create_server(("", port)))
            RANGE.write_text(f"{first} {first + self.ports - 1}")
            if not _none_free():
                raise CannotInject(f"a port is still given away, though {first} to {first + self.ports - 1} are taken")
            context.hold(self.seconds)
        return {"ports": [first, first + self.ports - 1]}


def _none_free() -> bool:
    try:
        socket.create_server(("", 0)).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
