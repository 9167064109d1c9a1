"""A server that sends a byte now and then, so that no read ever times out: a request ends at its limit all the same."""

import socket
import threading
from collections.abc import Iterator

import pytest

from resilient.sinks.base import Line, NotTaken
from resilient.sinks.following import LineFile
from resilient.sinks.in_time import in_time
from resilient.sinks.process import made

LIMIT_S = 1.0
HEAD = b"HTTP/1.1 200 OK\r\nX-Filling: "


class Dripping:
    """A server that begins an answer and never ends it.

    Attributes:
        gone: set when a client has closed, or shut down, its connection.
        begins: what it sends at once, before the bytes that come one by one.
    """

    def __init__(self, begins: bytes) -> None:
        self.gone, self._over, self._begins = threading.Event(), threading.Event(), begins
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/hook"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._drip, args=(client,), daemon=True).start()

    def _drip(self, client: socket.socket) -> None:
        with client:
            try:
                client.sendall(self._begins)
                while not self._over.wait(LIMIT_S / 10):
                    client.sendall(b"x")
            except OSError:
                self.gone.set()

    def close(self) -> None:
        self._over.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


@pytest.fixture
def dripping(request: pytest.FixtureRequest) -> Iterator[Dripping]:
    server = Dripping(getattr(request, "param", HEAD))
    yield server
    server.close()


def events(written) -> list[Line]:
    written.started()
    written.fault(1)
    return list(LineFile(written.run_dir / "events.jsonl").read())


@pytest.mark.timeout(60)
def test_a_webhook_whose_answer_never_ends_is_given_up(written, dripping):
    sink = made("webhook")(written.campaign(), {"url": dripping.url, "timeout_s": LIMIT_S})
    with pytest.raises(TimeoutError, match="the whole answer was not there after 1 s"):
        sink.take(events(written))
    assert dripping.gone.wait(60)


@pytest.mark.timeout(60)
def test_a_collector_whose_answer_never_ends_is_given_up_and_told(written, dripping):
    sink = made("otlp")(written.campaign(), {"endpoint": dripping.url, "timeout_s": LIMIT_S})
    with pytest.raises(NotTaken, match="the whole answer was not there after 1 s"):
        sink.take(events(written))
    assert dripping.gone.wait(60)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dripping", [HEAD, b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"], indirect=True)
def test_an_mlflow_server_whose_answer_never_ends_is_given_up(written, dripping, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("mlflow")
    monkeypatch.setattr("resilient.sinks.mlflow_run.ANSWER_S", LIMIT_S)
    with pytest.raises(TimeoutError, match="the whole answer was not there after 1 s"):
        made("mlflow")(written.campaign(), {"uri": dripping.url})
    assert dripping.gone.wait(60)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dripping", [b"\x16\x03\x03\x40\x00"], indirect=True)  # a record of a handshake, which does not end
def test_a_tls_handshake_that_never_ends_is_given_up(written, dripping):
    url = dripping.url.replace("http:", "https:")
    sink = made("webhook")(written.campaign(), {"url": url, "timeout_s": LIMIT_S})
    with pytest.raises(TimeoutError, match="the whole answer was not there after 1 s"):
        sink.take(events(written))
    assert dripping.gone.wait(60)


def test_no_other_connection_is_opened_once_the_time_is_over(dripping):
    with pytest.raises(TimeoutError, match="after 1 s"), in_time(LIMIT_S):
        while True:
            socket.create_connection(("127.0.0.1", dripping.port)).close()


def test_connections_outside_of_a_limit_and_of_other_threads_are_left_alone(dripping):
    before = socket.create_connection(("127.0.0.1", dripping.port))
    beside: list[socket.socket] = []
    with pytest.raises(TimeoutError), in_time(0.01):
        other = threading.Thread(target=lambda: beside.append(socket.create_connection(("127.0.0.1", dripping.port))))
        other.start()
        other.join()
        while True:
            socket.create_connection(("127.0.0.1", dripping.port)).close()
    for each in (before, *beside):
        with each:
            assert each.recv(len(HEAD), socket.MSG_WAITALL) == HEAD
    with in_time(60.0), socket.create_connection(("127.0.0.1", dripping.port)) as after:
        assert after.recv(len(HEAD), socket.MSG_WAITALL) == HEAD


def test_what_a_request_raises_by_itself_in_time_is_raised():
    with pytest.raises(ConnectionRefusedError), in_time(60.0), socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        socket.create_connection(unused.getsockname())
