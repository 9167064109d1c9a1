"""The agent's end of the control connection: typed messages, one a line, over TCP.

Owns the socket and what waits to be written to it. Nothing here waits once the connection is made: what is sent is queued, and a
driver that does not read stops no agent. A connection is made once both ends have proved that they know the run's secret
(`checkpoint.handshake`); whoever listens at one of the driver's addresses and does not know it is passed over.
"""

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from checkpoint.framing import Decoder, NotAMessage, encode
from checkpoint.handshake import DRIVER_AGENT, authenticate, derive
from resilient.protocol.messages import AgentFailed, AgentMessage, DriverMessage

TOKEN_VARIABLE = "RESILIENT_TOKEN"
"""In an agent's environment: the run's secret, a dot, and the agent's incarnation. The secret itself is told to nobody else."""

TRY_S = 5.0  # of one address, where there are others

DROPPABLE_BYTES = 1 << 20  # beyond a queue of so much, messages that may be dropped are
QUEUE_BYTES = 64 << 20  # and beyond so much the driver counts as gone
_READ_BYTES = 1 << 16

_TCP_RTO_MAX_MS = 44  # of Linux 6.15; Python has no name for it yet
_RESEND_MS = 1000  # the least that the kernel takes
_UNANSWERED_MS = 900_000  # as long as Linux takes by itself to give a connection up


class Disconnected(Exception):
    """The control connection is of no use any more: the other end has gone, or has said what is no message."""


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """`host:port,[address]:port` as pairs. Raises ValueError."""
    pairs = [each.rpartition(":") for each in text.split(",")]
    return [(host.strip("[]"), int(port)) for host, _, port in pairs]


def subject_of(node: int, incarnation: int) -> str:
    """As whom an agent authenticates itself."""
    return f"{incarnation} of node {node}"


def _connect(addresses: Sequence[tuple[str, int]], key: str, subject: str, timeout_s: float) -> socket.socket:
    """The first address at which the driver answers; the others may be of networks that this node does not have."""
    for address in addresses[:-1]:
        try:
            return _connect_to(address, key, subject, min(timeout_s, TRY_S))
        except OSError:
            continue
    return _connect_to(addresses[-1], key, subject, timeout_s)


def _connect_to(address: tuple[str, int], key: str, subject: str, timeout_s: float) -> socket.socket:
    """Raises OSError; Refused is one."""
    connection = socket.create_connection(address, timeout=timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return authenticate(connection, key, DRIVER_AGENT, subject, timeout_s=timeout_s)
    except BaseException:
        connection.close()
        raise


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

    Invariant: what was sent is written in order, each message whole, or the connection is of no use.

    Args:
        addresses: hosts and ports of the driver, best first.
        token: the run's secret.
        node, incarnation: of the agent.
        timeout_s: how long to try to connect; the only wait of this class.

    Raises:
        OSError: the driver could not be reached in that time, or nobody has proved to be it.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], *, token: str, node: int, incarnation: int, timeout_s: float) -> None:
        attempts = Retrying(
            retry=retry_if_exception_type(OSError),
            wait=wait_random_exponential(multiplier=0.05, max=2.0),
            stop=stop_after_delay(timeout_s),
            reraise=True,
        )
        key, subject = derive(token, DRIVER_AGENT), subject_of(node, incarnation)
        self._socket: socket.socket = attempts(_connect, addresses, key, subject, timeout_s)
        outlast_outages(self._socket)
        self._socket.setblocking(False)
        self._addresses = addresses
        self._decoder: Decoder[DriverMessage] = Decoder(DriverMessage)
        self._queue = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def own_address(self) -> str:
        """This node's address on the network that leads to the driver, and on the driver's own node one that others reach."""
        here, there = self._socket.getsockname()[0], self._socket.getpeername()[0]
        return str(here if here != there or not here.startswith(("127.", "::1")) else _elsewhere(self._addresses, here))

    @property
    def queued_bytes(self) -> int:
        """What was sent and waits for room in the kernel's buffer; `flush` when the socket is writable."""
        return len(self._queue)

    def send(self, message: AgentMessage | AgentFailed, *, droppable: bool = False) -> bool:
        """Queue a message and write what the kernel takes; returns at once.

        Args:
            droppable: leave it out where the driver is slow to read; whether it was sent is returned.

        Raises:
            Disconnected: the connection is broken, or the driver has not read for so long that the queue is full.
        """
        if droppable and len(self._queue) > DROPPABLE_BYTES:
            return False
        self._queue += encode(message)
        self.flush()
        if len(self._queue) > QUEUE_BYTES:
            raise Disconnected(f"it has left {len(self._queue)} bytes unread")
        return True

    def flush(self) -> None:
        """Write what the kernel takes. Raises Disconnected."""
        try:
            while self._queue:
                del self._queue[: self._socket.send(self._queue)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise Disconnected(str(error)) from error

    def receive(self) -> list[DriverMessage]:
        """The messages that have arrived, none where nothing has.

        Raises:
            Disconnected: the driver has closed the connection, or sent what is no message.
        """
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Disconnected(str(error)) from error
        if not data:
            raise Disconnected("closed by the driver")
        try:
            return self._decoder.feed(data)
        except NotAMessage as error:
            raise Disconnected(str(error)) from error

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
