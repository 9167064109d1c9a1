"""The agent's end of the control connection, over real sockets."""

import select
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from handshakes import as_driver

from checkpoint.framing import Decoder, encode
from resilient.protocol import connection as connection_module
from resilient.protocol.connection import Connection, Disconnected
from resilient.protocol.messages import AgentMessage, Alive, DriverMessage, Heartbeat, Propose, Report

SECRET = "secret"


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        yield listener


@pytest.fixture
def pair(server: socket.socket) -> Iterator[tuple[Connection, socket.socket]]:
    """A connection, and the driver's socket, whose buffer is small."""
    with ThreadPoolExecutor(1) as other:
        accepted = other.submit(accept, server)
        with connect([server.getsockname()], 60.0) as connection, accepted.result() as peer:
            yield connection, peer


def accept(server: socket.socket) -> socket.socket:
    peer, _ = server.accept()
    as_driver(peer, SECRET)
    return peer


def connect(addresses: Sequence[tuple[str, int]], timeout_s: float) -> Connection:
    return Connection(addresses, token=SECRET, node=3, incarnation=2, timeout_s=timeout_s)


def receive(connection: Connection) -> list[DriverMessage]:
    """Waits for something to come."""
    select.select([connection], [], [], 60.0)
    return connection.receive()


def test_messages_arrive_whole_however_the_bytes_are_cut(pair: tuple[Connection, socket.socket]):
    connection, peer = pair
    wanted = [Propose(generation=n, reason="ü" * n) for n in range(100)]
    data = b"".join(map(encode, wanted))

    def trickle() -> None:
        for at in range(0, len(data), 7):
            peer.sendall(data[at : at + 7])

    thread = threading.Thread(target=trickle)
    thread.start()
    found: list[DriverMessage] = []
    while len(found) < len(wanted):
        found += receive(connection)
    thread.join()
    assert found == wanted


def test_where_nothing_has_come_nothing_is_waited_for(pair: tuple[Connection, socket.socket]):
    assert pair[0].receive() == []


def test_a_closed_driver_is_noticed(pair: tuple[Connection, socket.socket]):
    connection, peer = pair
    peer.close()
    with pytest.raises(Disconnected, match="closed by the driver"):
        receive(connection)


@pytest.mark.parametrize("line", [b"[1]\n", b"{}\n", b'{"type":3}\n', b"nonsense\n", b'{"type":"hello"}\n', b'{"type":"ping"}\n'])
def test_what_is_no_message_ends_the_connection(pair: tuple[Connection, socket.socket], line: bytes):
    connection, peer = pair
    peer.sendall(line)
    with pytest.raises(Disconnected, match="not a message"):
        receive(connection)


def test_a_driver_that_is_not_there_is_an_error_after_the_timeout():
    with socket.socket() as silent:  # bound, so that nobody else has its port, and not listening
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(OSError):
            connect([silent.getsockname()], 0.2)


def test_what_a_driver_does_not_read_waits_and_arrives_whole_and_in_order_once_it_does(pair: tuple[Connection, socket.socket]):
    connection, peer = pair
    count = 0
    while connection.queued_bytes < 100_000:
        connection.send(Alive(generation=count))
        count += 1
    decoder: Decoder[AgentMessage] = Decoder(AgentMessage)
    found: list[AgentMessage] = []
    while len(found) < count:
        connection.flush()
        found += decoder.feed(peer.recv(1 << 16))
    assert [message.generation for message in found] == list(range(count))
    assert not connection.queued_bytes


def test_a_driver_that_is_slow_to_read_gets_no_more_of_what_may_be_dropped(
    pair: tuple[Connection, socket.socket], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connection_module, "DROPPABLE_BYTES", 10_000)
    connection, _ = pair
    beats = Report(generation=1, heartbeats={rank: Heartbeat(5, "step", 1.5, 2.5, 0.25, "S", True, None) for rank in range(8)})
    while connection.send(beats, droppable=True):
        pass
    left = connection.queued_bytes
    assert 10_000 < left < 20_000
    assert connection.send(beats)
    assert connection.queued_bytes > left


def test_a_driver_that_leaves_too_much_unread_counts_as_gone(
    pair: tuple[Connection, socket.socket], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connection_module, "QUEUE_BYTES", 50_000)
    connection, _ = pair
    with pytest.raises(Disconnected, match="unread"):
        while True:
            connection.send(Alive(generation=1))
