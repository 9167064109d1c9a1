"""The server: daemons and workers of other nodes read this node's shards over TCP.

A connection begins with the handshake (`checkpoint.handshake`); then each ReadRequest is answered by a ReadReply and as many bytes
as it says. What is no message ends the connection. Whoever reads compares the bytes with their checksums: see
`checkpoint.tiers.remote`.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from checkpoint import direct
from checkpoint.framing import Decoder, encode
from checkpoint.handshake import Peer
from checkpoint.listener import Listener, bind, stream
from checkpoint.shard_reads import ReadReply, ReadRequest

log = logging.getLogger(__name__)

LINE_LIMIT_BYTES = 1 << 16
BACKLOG = 1024


class Server:
    """Lets other nodes read below some directories.

    Args:
        roots: what may be read.
        keys: by role, of those who may read.

    Invariant: each root is touched by threads of its own alone, so that one that hangs keeps none from others, nor from snapshots.
    """

    def __init__(self, roots: Sequence[Path], keys: Mapping[str, str]) -> None:
        self._threads = {root: ThreadPoolExecutor(thread_name_prefix="read") for root in roots}
        self._keys = keys
        self._listener: Listener | None = None
        self._serving: set[asyncio.Task[None]] = set()

    def start(self, host: str) -> int:
        """Listen on a free port of this address; the port. Raises OSError."""
        sockets = bind([host], backlog=BACKLOG)
        port: int = sockets[0].getsockname()[1]
        self._listener = Listener(sockets, self._keys, self._on_admitted, log)
        return port

    def _on_admitted(self, connection: socket.socket, peer: Peer) -> None:
        task = asyncio.create_task(self._serve(connection, peer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket, peer: Peer) -> None:
        try:
            reader, writer = await stream(connection, peer, limit_bytes=LINE_LIMIT_BYTES)
        except OSError:
            connection.close()
            return
        try:
            requests = Decoder[ReadRequest](ReadRequest)
            async for line in reader:
                await self._answer(requests.decode(line), writer)
        except ValueError as error:  # NotAMessage, or a line without end
            log.warning("a connection of %s is refused, %s: %s", writer.get_extra_info("peername"), peer.role, error)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the reader is gone
        finally:
            with suppress(OSError):
                writer.close()

    async def _answer(self, request: ReadRequest, writer: asyncio.StreamWriter) -> None:
        try:
            root = self._root(request)
            data = await asyncio.get_running_loop().run_in_executor(self._threads[root], _read, root, request)
        except (OSError, ValueError) as error:
            writer.write(encode(ReadReply(error=str(error))))
        else:
            writer.write(encode(ReadReply(size_bytes=len(data))))
            writer.write(data)
        await writer.drain()

    def _root(self, request: ReadRequest) -> Path:
        """Where a request says that it reads; whether that is so, its threads find out. Raises ValueError."""
        directory = Path(request.directory)
        root = next((each for each in self._threads if directory.is_relative_to(each)), None)
        if root is None:
            raise ValueError(f"{directory} is not part of any tier")
        return root


def _read(root: Path, request: ReadRequest) -> bytes | memoryview:
    """What is asked for. Raises OSError, ValueError."""
    path = Path(request.directory).joinpath(request.file).resolve()
    if not path.is_relative_to(root.resolve()):
        raise ValueError(f"{path} is not part of any tier")
    if request.length is None:
        return path.read_bytes()
    if request.offset < 0 or request.length < 0:
        raise ValueError(f"{path} has no {request.length} bytes at {request.offset}")
    fd = direct.open_to_read(path)
    try:
        length = min(request.length, max(0, os.fstat(fd).st_size - request.offset))
        target: memoryview = direct.memory(length)
        return target[: direct.read(fd, [target], request.offset)] if length else b""
    finally:
        os.close(fd)
