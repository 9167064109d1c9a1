"""A fork server, as an agent has one."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from resilient.agent import forkserver
from resilient.agent.forkserver import ForkServer

TEMPLATE = """
import socket, sys
from resilient.agent import template
from resilient.lifeline import die_with_parent
die_with_parent(int(sys.argv[2]))
template.WITHIN_S = 600.0  # ten rounds of a server's end and the next one's start, on a machine that is busy
template.keep_serving(socket.socket(fileno=int(sys.argv[1])), preparation=None)
"""


@pytest.fixture
def template() -> Iterator[tuple[socket.socket, "subprocess.Popen[bytes]"]]:
    """A process that forks servers, and a socket to it."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", TEMPLATE, str(its.fileno()), str(os.getpid())]
    process = subprocess.Popen(command, pass_fds=[its.fileno()], env=environ)
    its.close()
    yield ours, process
    process.kill()
    process.wait()
    ours.close()


@pytest.fixture
def fork_server(template: "tuple[socket.socket, subprocess.Popen[bytes]]") -> Iterator[ForkServer]:
    """One whose server may tell of the end of a process as late as it gets a core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "STATUS_S", 60.0)
        server = ForkServer(template[0])
        yield server
        server.close()
