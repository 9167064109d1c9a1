"""A command's answer, within a time limit that holds whatever the command has started.

Where a site's script stands for the command, the real one is its child, and keeps the pipes open when the script is killed;
`asyncio.subprocess` would wait until they are closed.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

REAP_S = 1.0  # for what was killed to end


@dataclass(frozen=True)
class Answer:
    """What a command has said: its exit code, standard output and standard error."""

    code: int
    output: str
    complaint: str


async def answer(command: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> Answer:
    """Run a command out of reach of a terminal's signals. One that is not waited for any more is killed, with its process group.

    Raises:
        OSError: it cannot be started.
        TimeoutError: it has not answered.
    """
    transport, said = await asyncio.get_running_loop().subprocess_exec(
        _Said,
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(environ),
        start_new_session=True,
    )
    try:
        await asyncio.wait([said.complete], timeout=timeout_s)
        if not said.complete.done():
            raise TimeoutError
    finally:
        if not said.complete.done():
            await _end(transport, said)
        with contextlib.suppress(PermissionError):  # it kills what runs on, which may be another user's, as with sudo
            transport.close()
    output, complaint = (said.parts[fd].decode(errors="replace") for fd in (1, 2))
    return Answer(transport.get_returncode() or 0, output, complaint)


async def _end(transport: asyncio.SubprocessTransport, said: "_Said") -> None:
    """Kill it. What has left its process group is left alone, and cannot hold up this process by the pipes."""
    if transport.get_returncode() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(transport.get_pid(), signal.SIGKILL)
    for fd in (1, 2):
        if (pipe := transport.get_pipe_transport(fd)) is not None:
            pipe.close()
    await asyncio.wait([said.complete], timeout=REAP_S)


class _Said(asyncio.SubprocessProtocol):
    """What comes by the pipes; complete when these are closed and the command has ended."""

    def __init__(self) -> None:
        self.parts = {1: bytearray(), 2: bytearray()}
        self.complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.parts[fd] += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.complete.set_result(None)
