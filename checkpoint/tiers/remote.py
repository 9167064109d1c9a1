"""Shards of other nodes, read over TCP.

Owns the reader's end of the protocol (the handshake, ReadRequest, ReadReply); the other is `checkpoint.daemon.server`. All bytes
are checked by whoever reads them.
"""

import socket
import threading
import time
from pathlib import Path

import crc32c
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from checkpoint import shard_manifest
from checkpoint.errors import DamagedCheckpoint, UnreachableCheckpoint
from checkpoint.framing import Decoder, NotAMessage, encode
from checkpoint.handshake import WORKER_DAEMON, authenticate
from checkpoint.layout import Shard
from checkpoint.shard_manifest import ShardManifest
from checkpoint.shard_reads import ReadReply, ReadRequest
from checkpoint.source import Source

TIMEOUT_S = 30.0  # without a byte
CONNECT_S = 5.0
POLL_S = 0.5
NOT_WANTED = "nobody waits for it any more"
_REPLY_LIMIT_BYTES = 1 << 16
_AT_ONCE_BYTES = 1 << 12


class RemoteShard(Source):
    """A shard that another node holds.

    Args:
        address: host:port of that node's server.
        directory: of the shard, on that node.
        key: of the reader's role.
        cancelled: set once nobody waits for it any more.
        role: in which it is read; see `checkpoint.handshake`.

    Raises UnreachableCheckpoint where nobody answers, DamagedCheckpoint where it is none.
    """

    def __init__(
        self, address: str, directory: str, key: str, cancelled: threading.Event | None = None, *, role: str = WORKER_DAEMON
    ) -> None:
        self.path = Path(f"{address}:{directory}")
        self._address = address
        self._directory = directory
        self._key, self._role = key, role
        self._cancelled = cancelled if cancelled is not None else threading.Event()
        self._own = threading.local()
        self._sockets: list[socket.socket] = []  # of all threads
        try:
            self.manifest: ShardManifest = shard_manifest.decode(self.path, self._ask(file=shard_manifest.NAME))
        except BaseException:  # nobody gets it to close it
            self.close()
            raise

    def document(self, name: str) -> bytes:
        """A metadata file, compared with what the shard's manifest says of it. Raises DamagedCheckpoint."""
        text = self._ask(file=name)
        entry = self.manifest.files.get(name)
        if entry is None or (len(text), crc32c.crc32c(text)) != (entry.size_bytes, entry.crc32c):
            raise DamagedCheckpoint(self.path, f"{name} does not match {shard_manifest.NAME}")
        return text

    def documents(self) -> dict[str, bytes]:
        """All metadata files. Raises DamagedCheckpoint."""
        return {name: self.document(name) for name in self.manifest.files}

    def holds(self, shard: Shard, slot: int) -> bool:
        return slot in self.manifest.chunks.get(shard.path, ())

    def expected(self, shard: Shard, slot: int) -> int | None:
        return self.manifest.chunks[shard.path].get(slot)

    def read(self, shard: Shard, slot: int, target: memoryview) -> None:
        self._ask(target, file=shard.path, offset=shard.array.offset(slot), length=len(target))

    def close(self) -> None:
        for each in self._sockets:
            each.close()

    def _ask(self, target: memoryview | None = None, *, file: str, offset: int = 0, length: int | None = None) -> bytes:
        request = ReadRequest(directory=self._directory, file=file, offset=offset, length=length)
        attempts = Retrying(
            retry=retry_if_exception_type(OSError),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            stop=stop_after_attempt(3),
            reraise=True,
        )
        try:
            return attempts(self._once, target, request)
        except OSError as error:
            raise UnreachableCheckpoint(self.path, f"{file} cannot be fetched: {error}") from error

    def _once(self, target: memoryview | None, request: ReadRequest) -> bytes:
        if self._cancelled.is_set():
            raise UnreachableCheckpoint(self.path, NOT_WANTED)
        try:
            connection = self._connection()
            connection.sendall(encode(request))
            reply, begun = self._reply(connection)
            if reply.error is not None:
                raise DamagedCheckpoint(self.path, f"{request.file} cannot be fetched: {reply.error}")
            if target is None:
                target = memoryview(bytearray(reply.size_bytes))
            elif reply.size_bytes != len(target):
                self._forget()  # bytes that nobody wants are on their way
                raise DamagedCheckpoint(self.path, f"{request.file} ends early")
            if len(begun) > len(target):
                raise ConnectionError("the other node sends more than was asked for")
            target[: len(begun)] = begun
            rest = target[len(begun) :]
            while rest:
                rest = rest[self._receive(connection, rest) :]
            return bytes(target) if request.length is None else b""
        except OSError:
            self._forget()
            raise

    def _forget(self) -> None:
        """Close this thread's connection; the next request makes another one."""
        self._own.connection = None
        for each in getattr(self._own, "sockets", ()):
            each.close()
            self._sockets.remove(each)
        self._own.sockets = []

    def _owned(self, made: socket.socket) -> None:
        """A socket of this thread, which `_forget` closes, or `close`."""
        self._own.sockets = [*getattr(self._own, "sockets", ()), made]
        self._sockets.append(made)

    def _connection(self) -> socket.socket:
        connection: socket.socket | None = getattr(self._own, "connection", None)
        if connection is None:
            host, _, port = self._address.rpartition(":")
            made = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)
            self._owned(made)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = authenticate(made, self._key, self._role, timeout_s=TIMEOUT_S, given_up=self._cancelled.is_set)
            if connection is not made:  # TLS has taken its place
                self._owned(connection)
            connection.settimeout(POLL_S)
            self._own.connection = connection
        return connection

    def _reply(self, connection: socket.socket) -> tuple[ReadReply, bytes]:
        """The head of the answer, and what has come of the bytes behind it."""
        data = bytearray()
        buffer = memoryview(bytearray(_AT_ONCE_BYTES))
        while b"\n" not in data:
            if len(data) > _REPLY_LIMIT_BYTES:
                raise ConnectionError("the other node does not answer with a message")
            data += buffer[: self._receive(connection, buffer)]
        line, _, begun = bytes(data).partition(b"\n")
        try:
            reply = Decoder[ReadReply](ReadReply).decode(line)
        except NotAMessage as error:
            raise ConnectionError(f"the other node's answer is {error}") from None
        if reply.size_bytes < 0:
            raise ConnectionError(f"the other node promises {reply.size_bytes} bytes")
        return reply, begun

    def _receive(self, connection: socket.socket, target: memoryview) -> int:
        """Wait for bytes; how many have come."""
        began = time.monotonic()
        while True:
            try:
                count = connection.recv_into(target)
            except TimeoutError:
                if self._cancelled.is_set():
                    raise UnreachableCheckpoint(self.path, NOT_WANTED) from None
                if time.monotonic() - began > TIMEOUT_S:
                    raise
                continue
            if count == 0:
                raise ConnectionResetError("the other node closed the connection")
            return count
