"""The control plane's messages: JSON objects, one a line, over TCP.

Owns their framing and both ends of the connection. Every message has a `type`; which ones there are stands in
`resilient.driver.coordinator`.
"""

import asyncio
import ipaddress
import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

Message = dict[str, Any]

TOKEN_VARIABLE = "RESILIENT_TOKEN"
"""In an agent's environment: what it says to the driver to show that it belongs to the run."""

TRY_S = 5.0  # of one address, where there are others

KEPT_AT_ONCE = 64  # records: their room in the page is not to be missed
LINE_LIMIT = 16 << 20  # bytes; a line longer than this is a broken peer


_TCP_RTO_MAX_MS = 44  # of Linux 6.15; Python has no name for it yet
_RESEND_MS = 1000  # the least that the kernel takes
_UNANSWERED_MS = 900_000  # as long as Linux takes by itself to give a connection up


class Disconnected(Exception):
    """The other end of the control connection has gone."""


def encode(message: Mapping[str, object]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Raises ValueError if the line is not a message."""
    message = json.loads(line)
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ValueError(f"not a control message: {line[:80]!r}")
    return message


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """`host:port,[address]:port` as pairs. Raises ValueError."""
    pairs = [each.rpartition(":") for each in text.split(",")]
    return [(host.strip("[]"), int(port)) for host, _, port in pairs]


def _connect(addresses: Sequence[tuple[str, int]], timeout_s: float) -> socket.socket:
    """The first address that answers; the others may be of networks that this node does not have."""
    for address in addresses[:-1]:
        try:
            return socket.create_connection(address, timeout=min(timeout_s, TRY_S))
        except OSError:
            continue
    return socket.create_connection(addresses[-1], timeout=timeout_s)


def _elsewhere(addresses: Sequence[tuple[str, int]], here: str) -> str:
    """An address of this very machine that others can use, too: where a name leads to the loopback, numbers do not."""
    for host, _ in addresses:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            continue
        return host
    return here


def outlast_outages(connection: socket.socket) -> None:
    """Have the kernel resend at least every second, so that a connection is alive again as soon as its link is.

    By itself it doubles the pauses: after an outage of 20 s it may wait as long again, and an agent fence itself although nothing
    is wrong any more. Kernels before 6.15 cannot be told so. How long silence is borne is the fence's matter alone.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RESEND_MS)


class Connection:
    """An agent's connection to its driver.

    Args:
        addresses: hosts and ports of the driver, best first.
        timeout_s: how long to try to connect, and how long one send may block.

    Raises:
        OSError: the driver could not be reached in that time.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], *, timeout_s: float) -> None:
        attempts = Retrying(
            retry=retry_if_exception_type(OSError),
            wait=wait_random_exponential(multiplier=0.05, max=2.0),
            stop=stop_after_delay(timeout_s),
            reraise=True,
        )
        self._socket: socket.socket = attempts(_connect, addresses, timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        outlast_outages(self._socket)
        self._addresses = addresses
        self._pending = b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def own_address(self) -> str:
        """This node's address on the network that leads to the driver, and on the driver's own node one that others reach."""
        here, there = self._socket.getsockname()[0], self._socket.getpeername()[0]
        return str(here if here != there or not here.startswith(("127.", "::1")) else _elsewhere(self._addresses, here))

    def send(self, message: Mapping[str, object]) -> None:
        """Raises Disconnected if it cannot be sent."""
        try:
            self._socket.sendall(encode(message))
        except OSError as error:
            raise Disconnected(str(error)) from error

    def receive(self) -> list[Message]:
        """The messages that have arrived; call it when the socket is readable.

        Raises:
            Disconnected: the driver has closed the connection, or sent what is no message.
        """
        try:
            data = self._socket.recv(1 << 16)
        except OSError as error:
            raise Disconnected(str(error)) from error
        if not data:
            raise Disconnected("closed by the driver")
        *lines, self._pending = (self._pending + data).split(b"\n")
        try:
            return [decode(line) for line in lines]
        except ValueError as error:
            raise Disconnected(str(error)) from error

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Line:
    """The driver's end of an agent's connection, for what it says.

    That records were kept (`kept`) is said with the next other message, a ping at the latest: each message wakes a processor there.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._kept = 0

    def send(self, message: Mapping[str, Any]) -> None:
        """Returns at once; what cannot be sent shows where this connection is read."""
        if message["type"] == "kept":
            self._kept += message["count"]
            if self._kept < KEPT_AT_ONCE:
                return
        if self._kept:
            self._writer.write(encode({"type": "kept", "count": self._kept}))
            self._kept = 0
        if message["type"] != "kept":
            self._writer.write(encode(message))

    def close(self) -> None:
        """Hang up: what was sent goes first."""
        self._writer.close()
