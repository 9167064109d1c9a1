"""The driver's server: agents' connections, from hello to their end.

Owns who is connected as which node. A connection is of one agent: its node and its incarnation are proved to come from somebody who
knows the run's secret (`checkpoint.handshake`), and count for all that follows. An agent that is not the one that was started last
for its node is refused. What is no message is refused in one line of the log, and its connection closed. A peer that does not read
fills no memory: it is lost.
"""

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from checkpoint.framing import Decoder, NotAMessage, encode
from checkpoint.handshake import DRIVER_AGENT, Peer, derive
from checkpoint.listener import Listener, bind, stream
from checkpoint.protocol import DriverRequest
from resilient import clock
from resilient.protocol.candidates import encode_start
from resilient.protocol.connection import outlast_outages, subject_of
from resilient.protocol.messages import (
    AgentFailed,
    AgentMessage,
    DaemonRequests,
    DriverMessage,
    Hello,
    Ping,
    RecordsWritten,
    Start,
)

log = logging.getLogger(__name__)

READ_BYTES = 1 << 16
HELLO_S = 30.0  # after the handshake
UNREAD_BYTES = 64 << 20  # that a node has not read
RECORDS_AT_ONCE = 64  # the workers need their room in the heartbeat regions again
REFUSALS = 10  # that are logged in a minute
BACKLOG = 4096
ERROR_LENGTH = 300  # characters of an agent's own error that are told


@dataclass
class Line:
    """An agent's connection, for what is said to it.

    Attributes:
        written: records of which `RecordsWritten` is still to be said.
        requests: for its snapshot daemon, of this turn.
        error: by which it ends, where it has said so.
    """

    incarnation: int
    writer: asyncio.StreamWriter
    written: int = 0
    requests: list[DriverRequest] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True)
class Listeners:
    """Who is told what: an agent has connected (its node, and its hello); it has said something
    (raises NotAMessage where it may not say that); it has told an error that it ends with; it is gone, and why."""

    connected: Callable[[int, Hello], None]
    received: Callable[[int, AgentMessage], None]
    failing: Callable[[int], None]
    lost: Callable[[int, int, str], None]


class Server:
    """Invariants: a node has at most one line; `_expected` has the incarnation that was started last for each node.

    Args:
        secret: of the run.
        generation: the present one.
    """

    def __init__(self, secret: str, generation: Callable[[], int], listeners: Listeners) -> None:
        self._keys = {DRIVER_AGENT: derive(secret, DRIVER_AGENT)}
        self._generation = generation
        self._listeners = listeners
        self._expected: dict[int, int] = {}
        self._lines: dict[int, Line] = {}
        self._waiting: dict[int, Line] = {}  # lines with requests that were not sent yet
        self._refused: deque[float] = deque(maxlen=REFUSALS)  # monotonic times
        self._listener: Listener | None = None
        self._serving: set[asyncio.Task[None]] = set()

    def listen(self, addresses: Sequence[str]) -> int:
        """Wait for agents at these addresses of this machine, and at no others; the port. Raises OSError."""
        sockets = bind(addresses, backlog=BACKLOG)
        port: int = sockets[0].getsockname()[1]
        self._listener = Listener(sockets, self._keys, self._on_admitted, log)
        return port

    def _on_admitted(self, connection: socket.socket, peer: Peer) -> None:
        task = asyncio.create_task(self._serve(connection, peer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    def expect(self, node: int, incarnation: int) -> None:
        """An agent is started for a node: no other one is let in."""
        self.hang_up(node)
        self._expected[node] = incarnation

    def hang_up(self, node: int) -> None:
        """End a node's connection, if it has one; nobody is told. What was sent goes first."""
        line = self._lines.pop(node, None)
        self._waiting.pop(node, None)
        if line is not None:
            line.writer.close()

    @property
    def nodes(self) -> list[int]:
        """Those that are connected."""
        return list(self._lines)

    # -- what is said --------------------------------------------------------------------------------------------------

    def send(self, node: int, message: DriverMessage) -> None:
        """Returns at once. What cannot be sent shows where the connection is read; requests of this turn go first."""
        line = self._lines.get(node)
        if line is None:
            return
        data = b""
        if line.requests:
            data += encode(DaemonRequests(generation=self._generation(), requests=tuple(line.requests)))
            line.requests.clear()
            self._waiting.pop(node, None)
        if line.written:
            data += encode(RecordsWritten(generation=self._generation(), count=line.written))
            line.written = 0
        self._write(node, line, data + (encode_start(message) if isinstance(message, Start) else encode(message)))

    def request(self, node: int, request: DriverRequest) -> None:
        """A request for a node's snapshot daemon, sent at the end of the turn at the latest."""
        line = self._lines.get(node)
        if line is not None:
            line.requests.append(request)
            self._waiting[node] = line

    def records_written(self, node: int, incarnation: int, count: int) -> None:
        """Say so with the next message, a ping at the latest: each one wakes a processor there."""
        line = self._lines.get(node)
        if line is None or line.incarnation != incarnation:
            return
        line.written += count
        if line.written >= RECORDS_AT_ONCE:
            count, line.written = line.written, 0
            self._write(node, line, encode(RecordsWritten(generation=self._generation(), count=count)))

    def incarnation(self, node: int) -> int:
        """Of the agent that is connected, or was started last."""
        return self._expected.get(node, 0)

    def end_turn(self) -> None:
        """Send the requests that were collected, in one message a node."""
        waiting, self._waiting = self._waiting, {}
        for node, line in waiting.items():
            message = DaemonRequests(generation=self._generation(), requests=tuple(line.requests))
            line.requests.clear()
            self._write(node, line, encode(message))

    def ping(self) -> None:
        """Tell all nodes that the driver lives."""
        for node in self.nodes:
            self.send(node, Ping(generation=self._generation()))

    def _write(self, node: int, line: Line, data: bytes) -> None:
        if line.writer.transport.get_write_buffer_size() + len(data) > UNREAD_BYTES:
            line.writer.transport.abort()
            if self._lines.pop(node, None) is not None:
                # Not from within a turn of the coordinator.
                why = f"it does not read: {UNREAD_BYTES >> 20} MiB wait for it"
                asyncio.get_running_loop().call_soon(self._listeners.lost, node, line.incarnation, why)
            return
        line.writer.write(data)

    # -- what is received -------------------------------------------------------------------------------------------------

    async def _serve(self, connection: socket.socket, peer: Peer) -> None:
        """An agent's connection, from its handshake to its end."""
        try:
            outlast_outages(connection)
            reader, writer = await stream(connection, peer, limit_bytes=READ_BYTES)
        except OSError as error:
            self._log_refusal(f"agent {peer.subject}: its connection broke: {error}")
            connection.close()
            return
        node: int | None = None
        line: Line | None = None
        why = "its connection was closed"
        try:
            hello, data = await asyncio.wait_for(_hello(reader), HELLO_S)
            if isinstance(hello, AgentFailed):
                self._never_started(hello, peer)
            elif hello is not None and self._admits(hello, peer):
                node = hello.node
                line = self._lines[node] = Line(hello.incarnation, writer)
                self._listeners.connected(node, msgspec.structs.replace(hello, t=clock.here(hello.t)))
                await self._read(node, line, reader, data)
        except NotAMessage as error:
            self._log_refusal(f"{f'node {node}' if node is not None else f'agent {peer.subject}'}: {error}")
            why = f"it said what is {error}"
        except OSError as error:  # a TimeoutError as well
            why = f"its connection broke: {type(error).__name__}: {error}"
        except asyncio.CancelledError:
            return  # the run is over
        finally:
            writer.close()
        if node is not None and line is not None and self._lines.get(node) is line:
            del self._lines[node]
            self._waiting.pop(node, None)
            self._listeners.lost(node, line.incarnation, f"it has failed: {line.error}" if line.error else why)

    def _never_started(self, message: AgentFailed, peer: Peer) -> None:
        """An agent has ended before it could say hello."""
        for node, incarnation in self._expected.items():
            if peer.subject == subject_of(node, incarnation) and node not in self._lines:
                self._listeners.lost(node, incarnation, f"it has failed: {_in_a_line(message.error)}")
                return
        self._log_refusal(f"agent {peer.subject}: it is not the one that was started last")

    def _admits(self, hello: Hello, peer: Peer) -> bool:
        who = f"agent {hello.incarnation} of node {hello.node}"
        if peer.subject != subject_of(hello.node, hello.incarnation):
            self._log_refusal(f"{who}: it has authenticated itself as {peer.subject!r}")
        elif self._expected.get(hello.node) != hello.incarnation:
            self._log_refusal(f"{who}: it is not the one that was started last")
        elif hello.node in self._lines:
            self._log_refusal(f"a second connection of {who}")
        else:
            return True
        return False

    async def _read(self, node: int, line: Line, reader: asyncio.StreamReader, data: bytes) -> None:
        decoder: Decoder[AgentMessage | AgentFailed] = Decoder(AgentMessage | AgentFailed)
        while True:
            for message in decoder.feed(data):
                if self._lines.get(node) is not line:
                    return
                if isinstance(message, Hello):
                    raise NotAMessage("not a message: a second hello")
                if isinstance(message, AgentFailed):
                    # It is lost when its connection ends: until then it ends its workers, beside which no other agent may start.
                    line.error = _in_a_line(message.error)
                    self._listeners.failing(node)
                    continue
                self._listeners.received(node, message)
            data = await reader.read(READ_BYTES)
            if not data:
                return

    def _log_refusal(self, what: str) -> None:
        """In one line, and not more often than a person can read."""
        now = time.monotonic()
        if len(self._refused) == REFUSALS and now - self._refused[0] < 60.0:
            return
        self._refused.append(now)
        log.warning("refused %s", what)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for node in self.nodes:
            self.hang_up(node)
        for task in self._serving:
            task.cancel()


def _in_a_line(error: str) -> str:
    return " ".join(error.split())[:ERROR_LENGTH]


async def _hello(reader: asyncio.StreamReader) -> tuple[Hello | AgentFailed | None, bytes]:
    """The first message, and what has arrived behind it. Raises NotAMessage, OSError."""
    data = b""
    while b"\n" not in data:
        if len(data) > READ_BYTES:
            raise NotAMessage(f"not a message: a first line of more than {READ_BYTES} bytes")
        part = await reader.read(READ_BYTES)
        if not part:
            return None, b""
        data += part
    first, _, rest = data.partition(b"\n")
    decoder: Decoder[Hello | AgentFailed] = Decoder(Hello | AgentFailed)
    return decoder.decode(first), rest
