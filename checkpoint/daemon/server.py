"""The server: daemons and workers of other nodes read this node's shards over TCP.

A connection begins with Authenticate; then each ReadRequest is answered by a ReadReply and as many bytes as it says. What is no
message ends the connection. Whoever reads compares the bytes with their checksums: see `checkpoint.tiers.remote`.
"""

import asyncio
import hmac
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from checkpoint import direct
from checkpoint.framing import Decoder, NotAMessage, encode
from checkpoint.protocol import Authenticate, ReadReply, ReadRequest

log = logging.getLogger(__name__)

LINE_LIMIT_BYTES = 1 << 16


class Server:
    """Lets other nodes read below some directories.

    Args:
        roots: what may be read.
        token: that a reader must know.
    """

    def __init__(self, roots: Sequence[Path], token: str) -> None:
        self._roots = [root.resolve() for root in roots]
        self._token = token.encode()
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> int:
        """Listen on a free port of this address; the port."""
        self._server = await asyncio.start_server(self._serve, host, 0, limit=LINE_LIMIT_BYTES)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = Decoder[Authenticate](Authenticate).decode(await reader.readline())
            if not hmac.compare_digest(hello.token.encode(), self._token):
                raise NotAMessage("a wrong token")
            requests = Decoder[ReadRequest](ReadRequest)
            async for line in reader:
                await self._answer(requests.decode(line), writer)
        except ValueError as error:  # NotAMessage, or a line without end
            log.warning("a connection of %s is refused: %s", writer.get_extra_info("peername"), error)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the reader is gone
        finally:
            with suppress(OSError):
                writer.close()

    async def _answer(self, request: ReadRequest, writer: asyncio.StreamWriter) -> None:
        try:
            data = await asyncio.to_thread(self._read, request)
        except (OSError, ValueError) as error:
            writer.write(encode(ReadReply(error=str(error))))
        else:
            writer.write(encode(ReadReply(size_bytes=len(data))))
            writer.write(data)
        await writer.drain()

    def _read(self, request: ReadRequest) -> bytes | memoryview:
        path = Path(request.directory).joinpath(request.file).resolve()
        if not any(path.is_relative_to(root) for root in self._roots):
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
