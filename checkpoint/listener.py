"""Listening: connections are accepted, and handed on once their clients have authenticated themselves.

Owns the listening sockets and the connections until then. Whoever connects costs a descriptor and at most `HANDSHAKE_BYTES` for at
most `HANDSHAKE_S`, and all errors of that time together cost a line of log a minute. Nobody keeps out who knows the key: a client
says its first word at once, and of those that have said nothing the oldest gives way to the next.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from checkpoint.framing import NotAMessage
from checkpoint.handshake import HANDSHAKE_BYTES, Nonces, Peer, Refused, Server, endpoint
from checkpoint.tls import server_context

HANDSHAKE_S = 5.0
WAITING = 64  # connections whose clients have not shown that they know a key
CHALLENGED = 4096  # that have, and have not answered yet
AT_ONCE = 16  # are accepted before those that are there are read again
TRIES = 20  # of a port that is free on one address and taken on another
PAUSE_S = 0.1  # of accepting, where there is no descriptor to be had
REPORTED_EVERY_S, REPORTED_AT_LEAST_EVERY_S = 60.0, 3600.0  # while it goes on
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Admitted = Callable[[socket.socket, Peer], None]
"""Gets a connection that does not block, and who its client is; nothing that follows the handshake was read."""


class Refusals:
    """What was refused, in one line a minute at most: the first at once, those that follow counted, and told ever less often."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._count = 0
        self._last = ""
        self._pause_s = REPORTED_EVERY_S
        self._timer: asyncio.TimerHandle | None = None

    def add(self, who: str, why: str) -> None:
        """Somebody was refused."""
        self._count, self._last = self._count + 1, f"{who}: {why}"
        if self._timer is None:
            self._report()

    def _report(self) -> None:
        self._timer = None
        if not self._count:
            self._pause_s = REPORTED_EVERY_S
            return
        if self._count == 1:
            self._log.warning("a connection was refused before its handshake was done, of %s", self._last)
        else:
            text = "%d connections were refused before their handshakes were done, the last one of %s"
            self._log.warning(text, self._count, self._last)
        self._count = 0
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._report)
        self._pause_s = min(2 * self._pause_s, REPORTED_AT_LEAST_EVERY_S)

    def close(self) -> None:
        """Tell what was not told yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._report()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@dataclass(eq=False)
class _Stranger:
    """A connection before its handshake is done."""

    connection: socket.socket
    who: str
    handshake: Server
    timer: asyncio.TimerHandle | None = None
    received: bytearray = field(default_factory=bytearray)
    total_bytes: int = 0


class Listener:
    """Sockets that listen, and who has connected to them.

    Invariants: `_waiting` and `_challenged` hold, oldest first, what was accepted and neither handed on nor closed; after each turn
    of the loop `_waiting` has at most `WAITING` entries.

    Args:
        sockets: bound; they are this object's to close.
        keys: by role, of the clients that are let in.
        admitted: called in the event loop.
        log: gets the refusals.
    """

    def __init__(self, sockets: Sequence[socket.socket], keys: Mapping[str, str], admitted: Admitted, log: logging.Logger) -> None:
        self._sockets, self._keys, self._admitted = list(sockets), keys, admitted
        self._refusals = Refusals(log)
        self._nonces = Nonces()
        self._waiting: dict[_Stranger, None] = {}
        self._challenged: dict[_Stranger, None] = {}
        self._paused: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        for each in self._sockets:
            each.setblocking(False)
        self._go_on()

    @property
    def waiting(self) -> int:
        """Connections that have not shown that they know a key."""
        return len(self._waiting)

    def close(self) -> None:
        """Listen no more; what was handed on is not touched."""
        if self._paused is not None:
            self._paused.cancel()
        for listening in self._sockets:
            self._loop.remove_reader(listening)
            listening.close()
        self._sockets = []
        for stranger in (*self._waiting, *self._challenged):
            self._let_go(stranger)
            stranger.connection.close()
        self._refusals.close()

    # -- accepting -----------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        self._paused = None
        for listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _pause(self) -> None:
        for listening in self._sockets:
            self._loop.remove_reader(listening)
        self._paused = self._loop.call_later(PAUSE_S, self._go_on)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, address = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._on_no_room(error)
                return
            self._begin(connection, address)
            if len(self._waiting) > WAITING:
                self._refuse(next(iter(self._waiting)), "it had said nothing, and gave way to others")

    def _on_no_room(self, error: OSError) -> None:
        """The oldest stranger gives way; without one, others must close something first."""
        oldest = next(iter(self._waiting or self._challenged), None)
        if oldest is not None and error.errno in _NO_ROOM:
            self._refuse(oldest, f"it gave way to others: {error.strerror}")
        else:
            self._refusals.add("somebody", f"no connection can be accepted: {error.strerror}")
            self._pause()

    def _begin(self, connection: socket.socket, address: Any) -> None:
        connection.setblocking(False)
        try:
            # asyncio does that by itself for sockets that it has accepted, and for others only where their protocol is named.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            own = endpoint(connection.getsockname())
        except OSError:  # it was reset before it was accepted
            connection.close()
            return
        stranger = _Stranger(connection, str(address[0]), Server(self._keys, self._nonces, own))
        late = f"no handshake within {HANDSHAKE_S:.0f} s"
        stranger.timer = self._loop.call_later(HANDSHAKE_S, self._refuse, stranger, late)
        self._waiting[stranger] = None
        self._loop.add_reader(connection, self._read, stranger)
        self._read(stranger)  # what has come with it

    # -- the handshake -------------------------------------------------------------------------------------------------

    def _read(self, stranger: _Stranger) -> None:
        try:
            while _read_on(stranger):
                line = bytes(stranger.received[:-1])
                stranger.received.clear()
                if stranger.handshake.challenged:
                    peer = stranger.handshake.admit(line)
                    self._let_go(stranger)
                    self._admitted(stranger.connection, peer)
                    return
                self._challenge(stranger, line)
            if stranger.total_bytes >= HANDSHAKE_BYTES:
                self._refuse(stranger, f"{HANDSHAKE_BYTES} bytes, and no handshake")
        except BlockingIOError:
            return
        except (NotAMessage, OSError) as error:
            self._refuse(stranger, str(error))

    def _challenge(self, stranger: _Stranger, line: bytes) -> None:
        """Raises NotAMessage, OSError."""
        answer = stranger.handshake.challenge(line)
        if stranger.connection.send(answer) < len(answer):
            raise Refused("it reads nothing")
        del self._waiting[stranger]
        self._challenged[stranger] = None
        if len(self._challenged) > CHALLENGED:
            self._refuse(next(iter(self._challenged)), "it did not answer, and gave way to others")

    def _refuse(self, stranger: _Stranger, why: str) -> None:
        self._let_go(stranger)
        stranger.connection.close()
        self._refusals.add(stranger.who, why)

    def _let_go(self, stranger: _Stranger) -> None:
        if stranger.timer is not None:
            stranger.timer.cancel()
        self._waiting.pop(stranger, None)
        self._challenged.pop(stranger, None)
        self._loop.remove_reader(stranger.connection)


def _read_on(stranger: _Stranger) -> bool:
    """Read to the end of a line at most, since what follows may be for somebody else: whether it has come to one.

    Raises OSError: nothing has come, or the client has hung up.
    """
    left_bytes = HANDSHAKE_BYTES - stranger.total_bytes
    if not left_bytes:
        return False
    coming = stranger.connection.recv(left_bytes, socket.MSG_PEEK)
    if not coming:
        raise ConnectionResetError("it hung up")
    data = stranger.connection.recv(coming.find(b"\n") + 1 or len(coming))
    stranger.total_bytes += len(data)
    stranger.received += data
    return data.endswith(b"\n")


async def stream(connection: socket.socket, peer: Peer, *, limit_bytes: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that was handed on, as asyncio's streams, over TLS where its client's key asks for it. Raises OSError."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=limit_bytes)
    protocol = asyncio.StreamReaderProtocol(reader)
    if peer.tls_key is None:
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection)
    else:
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, connection, ssl=server_context(peer.tls_key), ssl_handshake_timeout=HANDSHAKE_S
        )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def bind(addresses: Sequence[str], *, backlog: int) -> list[socket.socket]:
    """Sockets that listen on one free port of all these addresses. Raises OSError where an address is not this machine's."""
    for attempt in range(1, TRIES + 1):
        sockets: list[socket.socket] = []
        try:
            for address in addresses:
                port = sockets[0].getsockname()[1] if sockets else 0
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                sockets.append(socket.create_server((address, port), family=family, backlog=backlog))
            return sockets
        except OSError as error:
            for each in sockets:
                each.close()
            if error.errno != errno.EADDRINUSE or attempt == TRIES:
                raise
    raise AssertionError("unreachable")
