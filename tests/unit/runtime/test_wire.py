"""The control connection, over real sockets."""

import json
import socket
import threading

import pytest

from resilient.wire import KEPT_AT_ONCE, Connection, Disconnected, Line, decode, encode


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def connect(server: socket.socket) -> tuple[Connection, socket.socket]:
    connection = Connection([server.getsockname()], timeout_s=5.0)
    peer, _ = server.accept()
    return connection, peer


def collect(connection: Connection, count: int) -> list[dict[str, object]]:
    messages: list[dict[str, object]] = []
    while len(messages) < count:
        messages += connection.receive()
    return messages


def test_messages_arrive_whole_however_the_bytes_are_cut(server):
    connection, peer = connect(server)
    data = b"".join(encode({"type": "ping", "n": n, "pad": "ü" * n}) for n in range(200))

    def trickle() -> None:
        for at in range(0, len(data), 7):
            peer.sendall(data[at : at + 7])

    thread = threading.Thread(target=trickle)
    thread.start()
    assert [message["n"] for message in collect(connection, 200)] == list(range(200))
    thread.join()
    connection.close()
    peer.close()


def test_a_closed_driver_is_noticed(server):
    connection, peer = connect(server)
    peer.close()
    with pytest.raises(Disconnected):
        connection.receive()
    connection.close()


@pytest.mark.parametrize("line", [b"[1]\n", b"{}\n", b'{"type": 3}\n', b"nonsense\n"])
def test_what_is_no_message_ends_the_connection(server, line):
    connection, peer = connect(server)
    peer.sendall(line)
    with pytest.raises(Disconnected):
        connection.receive()
    with pytest.raises(ValueError):
        decode(line)
    connection.close()
    peer.close()


def test_a_driver_that_is_not_there_is_an_error_after_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    with pytest.raises(OSError):
        Connection([address], timeout_s=0.2)


class Written(list[bytes]):
    """What a line has written."""

    write = list.append


def test_that_records_were_kept_is_said_with_the_next_message():
    written = Written()
    line = Line(written)
    line.send({"type": "kept", "count": 2})
    line.send({"type": "kept", "count": 3})
    assert not written
    line.send({"type": "ping"})
    assert [json.loads(each) for each in written] == [{"type": "kept", "count": 5}, {"type": "ping"}]
    line.send({"type": "ping"})
    assert len(written) == 3


def test_that_many_records_were_kept_is_said_at_once():
    written = Written()
    line = Line(written)
    for _ in range(KEPT_AT_ONCE):
        line.send({"type": "kept", "count": 1})
    assert [json.loads(each) for each in written] == [{"type": "kept", "count": KEPT_AT_ONCE}]
