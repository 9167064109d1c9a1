"""The control plane's messages: JSON objects, one a line, over TCP.

Owns their framing and the agent's end of the connection. Every message has a `type`; which ones there are stands in
`resilient.driver.coordinator`.
"""

import json
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

Message = dict[str, Any]

LINE_LIMIT = 16 << 20  # bytes; a line longer than this is a broken peer


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


class Connection:
    """An agent's connection to its driver.

    Args:
        address: host and port of the driver.
        timeout_s: how long to try to connect, and how long one send may block.

    Raises:
        OSError: the driver could not be reached in that time.
    """

    def __init__(self, address: tuple[str, int], *, timeout_s: float) -> None:
        attempts = Retrying(
            retry=retry_if_exception_type(OSError),
            wait=wait_random_exponential(multiplier=0.05, max=2.0),
            stop=stop_after_delay(timeout_s),
            reraise=True,
        )
        self._socket: socket.socket = attempts(socket.create_connection, address, timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pending = b""

    def fileno(self) -> int:
        return self._socket.fileno()

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
