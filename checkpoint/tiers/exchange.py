"""Exchange: a node reads another node's parts over TCP.

A request is one JSON line, the answer 8 bytes of length and so many bytes; all ones in the length, and 4 bytes of another length
with a message behind it, when it cannot be done. The requests: `part` (the text of a directory's part.json), `document` (a metadata
file of it), `read` (a range of one of its files). A connection begins with a line that holds the campaign's token.

Owns both ends of that protocol. What is read is checked by whoever reads.
"""

import asyncio
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import crc32c
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from checkpoint import direct
from checkpoint import part as parts
from checkpoint.errors import DamagedCheckpoint
from checkpoint.layout import Shard
from checkpoint.part import Part
from checkpoint.source import Source

TIMEOUT_S = 30.0  # without a byte
CONNECT_S = 5.0
POLL_S = 0.5
NOT_WANTED = "nobody waits for it any more"
_FAILED = (1 << 64) - 1
_LINE_LIMIT = 1 << 16


class Unreachable(DamagedCheckpoint):
    """Nobody answers where a part should be: its node is gone, or the way to it."""


class Server:
    """Lets other nodes read below some directories.

    Args:
        roots: what may be read.
        token: that a reader must know.
    """

    def __init__(self, roots: list[Path], token: str) -> None:
        self._roots = [root.resolve() for root in roots]
        self._token = token
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> int:
        """Listen on a free port of this address; the port."""
        self._server = await asyncio.start_server(self._serve, host, 0, limit=_LINE_LIMIT)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, asyncio.IncompleteReadError):
            hello = (await reader.readline()).decode().strip()
            if hmac.compare_digest(hello, self._token):
                async for line in reader:
                    await self._answer(json.loads(line), writer)
        writer.close()

    async def _answer(self, request: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        try:
            data = await asyncio.to_thread(self._read, request)
        except (OSError, ValueError) as error:
            message = str(error).encode()
            writer.write(struct.pack("<QI", _FAILED, len(message)) + message)
        else:
            writer.write(struct.pack("<Q", len(data)))
            writer.write(data)
        await writer.drain()

    def _read(self, request: Mapping[str, Any]) -> bytes | memoryview:
        directory = Path(request["directory"])
        path = directory.joinpath(str(request["file"])).resolve()
        if not any(path.is_relative_to(root) for root in self._roots):
            raise ValueError(f"{path} is not part of any tier")
        if "length" not in request:
            return path.read_bytes()
        target: memoryview = direct.memory(request["length"])
        fd = direct.open_to_read(path)
        try:
            return target[: direct.read(fd, [target], request["offset"])]
        finally:
            os.close(fd)


class RemotePart(Source):
    """A part that another node holds.

    Args:
        address: host:port of that node's server.
        directory: of the part, on that node.
        token: of the campaign.
        cancelled: set once nobody waits for it any more.

    Raises DamagedCheckpoint where it cannot be reached, or is none.
    """

    def __init__(self, address: str, directory: str, token: str, cancelled: threading.Event | None = None) -> None:
        self.path = Path(f"{address}:{directory}")
        self._address = address
        self._directory = directory
        self._token = token
        self._cancelled = cancelled if cancelled is not None else threading.Event()
        self._own = threading.local()
        self._sockets: list[socket.socket] = []
        self.part: Part = parts.decode(self.path, self._ask(file=parts.NAME))

    def document(self, name: str) -> bytes:
        """A metadata file, compared with what the part says of it. Raises DamagedCheckpoint."""
        text = self._ask(file=name)
        entry = self.part.files.get(name)
        if entry is None or (len(text), crc32c.crc32c(text)) != (entry.size_bytes, entry.crc32c):
            raise DamagedCheckpoint(self.path, f"{name} does not match {parts.NAME}")
        return text

    def documents(self) -> dict[str, bytes]:
        """All metadata files. Raises DamagedCheckpoint."""
        return {name: self.document(name) for name in self.part.files}

    def holds(self, shard: Shard, slot: int) -> bool:
        return slot in self.part.chunks.get(shard.path, ())

    def expected(self, shard: Shard, slot: int) -> int | None:
        return self.part.chunks[shard.path].get(slot)

    def read(self, shard: Shard, slot: int, target: memoryview) -> None:
        self._ask(target, file=shard.path, offset=shard.array.offset(slot), length=len(target))

    def close(self) -> None:
        for each in self._sockets:
            each.close()

    def _ask(self, target: memoryview | None = None, **request: object) -> bytes:
        attempts = Retrying(
            retry=retry_if_exception_type(OSError),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            stop=stop_after_attempt(3),
            reraise=True,
        )
        try:
            return attempts(self._once, target, {"directory": self._directory, **request})
        except OSError as error:
            raise Unreachable(self.path, f"{request['file']} cannot be fetched: {error}") from error

    def _once(self, target: memoryview | None, request: Mapping[str, object]) -> bytes:
        if self._cancelled.is_set():
            raise Unreachable(self.path, NOT_WANTED)
        try:
            connection = self._connection()
            connection.sendall(json.dumps(request).encode() + b"\n")
            (length,) = struct.unpack("<Q", self._exactly(connection, 8))
            if length == _FAILED:
                (length,) = struct.unpack("<I", self._exactly(connection, 4))
                message = self._exactly(connection, length).decode(errors="replace")
                raise DamagedCheckpoint(self.path, f"{request['file']} cannot be fetched: {message}")
            if target is None:
                return self._exactly(connection, length)
            if length != len(target):
                raise DamagedCheckpoint(self.path, f"{request['file']} ends early")
            self._into(connection, target)
            return b""
        except OSError:
            self._own.connection = None
            raise

    def _connection(self) -> socket.socket:
        connection: socket.socket | None = getattr(self._own, "connection", None)
        if connection is None:
            host, _, port = self._address.rpartition(":")
            connection = self._own.connection = socket.create_connection((host, int(port)), timeout=CONNECT_S)
            connection.settimeout(POLL_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(connection)
            connection.sendall(self._token.encode() + b"\n")
        return connection

    def _exactly(self, connection: socket.socket, length: int) -> bytes:
        data = bytearray(length)
        self._into(connection, memoryview(data))
        return bytes(data)

    def _into(self, connection: socket.socket, target: memoryview) -> None:
        heard_t = time.monotonic()
        while target:
            try:
                count = connection.recv_into(target)
            except TimeoutError:
                if self._cancelled.is_set():
                    raise Unreachable(self.path, NOT_WANTED) from None
                if time.monotonic() - heard_t > TIMEOUT_S:
                    raise
                continue
            if count == 0:
                raise ConnectionResetError("the other node closed the connection")
            heard_t, target = time.monotonic(), target[count:]
