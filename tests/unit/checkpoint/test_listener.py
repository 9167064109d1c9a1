"""The handshake over real TCP, and what whoever connects without a key can do: nothing, and that cheaply."""

import asyncio
import logging
import os
import resource
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from handshakes import let_in

from checkpoint import listener as module
from checkpoint.handshake import DAEMON_DAEMON, WORKER_DAEMON, Client, Peer, Refused, authenticate, daemon_keys, derive, endpoint
from checkpoint.listener import Listener, bind

KEYS = daemon_keys("s3cret")
PATIENCE_S = 120.0

log = logging.getLogger("test.listener")


class House:
    """A listener, and who was let in."""

    def __init__(self) -> None:
        self.admitted: list[Peer] = []
        self.connections: list[socket.socket] = []
        (listening,) = bind(["127.0.0.1"], backlog=512)
        self.address = listening.getsockname()
        self.listener = Listener([listening], KEYS, self._on_admitted, log)

    def _on_admitted(self, connection: socket.socket, peer: Peer) -> None:
        self.connections.append(connection)
        self.admitted.append(peer)

    async def client(self, *, key: str = KEYS[WORKER_DAEMON], role: str = WORKER_DAEMON, subject: str = "") -> None:
        """Somebody who does it right, as workers do."""

        def work() -> None:
            with socket.create_connection(self.address, timeout=PATIENCE_S) as connection:
                authenticate(connection, key, role, subject, timeout_s=PATIENCE_S)

        await asyncio.to_thread(work)

    async def says(self, words: bytes) -> bytes:
        """What a stranger hears until it is hung up on."""
        reader, writer = await asyncio.open_connection(*self.address[:2])
        heard = b""
        with suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                writer.write(words)
                heard = await reader.read()
        writer.close()
        return heard

    async def until(self, what: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not what():
                await asyncio.sleep(0.002)

    def close(self) -> None:
        self.listener.close()
        for each in self.connections:
            each.close()


def play(work: Callable[[House], Awaitable[None]]) -> House:
    async def run() -> House:
        house = House()
        try:
            await work(house)
        finally:
            house.close()
        return house

    return asyncio.run(run())


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Handler()
    log.addHandler(handler)
    yield found
    log.removeHandler(handler)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is hung up on for the time that a handshake takes on a busy machine, but for the reason that a test is about."""
    monkeypatch.setattr(module, "HANDSHAKE_S", PATIENCE_S)


def test_who_knows_the_key_of_a_role_is_let_in_as_that():
    async def work(house: House) -> None:
        await house.client(subject="rank 3")
        await house.client(key=KEYS[DAEMON_DAEMON], role=DAEMON_DAEMON)
        await house.until(lambda: len(house.admitted) == 2)

    assert play(work).admitted == [Peer(WORKER_DAEMON, "rank 3"), Peer(DAEMON_DAEMON, "")]


def test_small_answers_are_sent_at_once():
    async def work(house: House) -> None:
        await house.client()
        await house.until(lambda: house.admitted)
        (connection,) = house.connections
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    play(work)


@pytest.mark.usefixtures("unhurried")
def test_the_key_of_one_role_does_not_open_another(lines: list[str]):
    async def work(house: House) -> None:
        for key, role in ((KEYS[WORKER_DAEMON], DAEMON_DAEMON), ("s3cret", WORKER_DAEMON), (KEYS[WORKER_DAEMON], "driver-agent")):
            with pytest.raises(OSError):
                await house.client(key=key, role=role)

    assert play(work).admitted == []
    assert "does not know the campaign's secret" in lines[0]


def test_a_key_is_of_its_purpose_and_leads_to_no_other():
    keys = {derive("s3cret", purpose) for purpose in ("driver-agent", DAEMON_DAEMON, WORKER_DAEMON, "store 1", "store 2")}
    assert len(keys) == 5 and "s3cret" not in "".join(keys)
    assert derive("other", WORKER_DAEMON) not in keys


def test_neither_the_secret_nor_a_key_is_on_the_wire():
    heard = bytearray()

    async def work(house: House) -> None:
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(4096):
                heard.extend(data)
                writer.write(data)
            writer.close()  # from Python 3.12 on a server waits for its connections

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection(*house.address[:2])
            await asyncio.gather(relay(reader, there[1]), relay(there[0], writer))

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as between:
            with pytest.raises(OSError):  # for it answers at another address
                await asyncio.to_thread(connect, between.sockets[0].getsockname())

    def connect(address: tuple[str, int]) -> None:
        with socket.create_connection(address, timeout=PATIENCE_S) as connection:
            authenticate(connection, KEYS[WORKER_DAEMON], WORKER_DAEMON, timeout_s=PATIENCE_S)

    play(work)
    assert b"challenge" in heard
    for secret in ("s3cret", *KEYS.values()):
        assert secret.encode() not in heard


def test_a_handshake_that_was_heard_cannot_be_said_again(lines: list[str]):
    async def work(house: House) -> None:
        reader, writer = await asyncio.open_connection(*house.address[:2])
        client = Client(KEYS[WORKER_DAEMON], WORKER_DAEMON, "", endpoint(writer.get_extra_info("peername")))
        writer.write(client.opening)
        response = client.respond((await reader.readuntil(b"\n"))[:-1])
        writer.write(response)
        await house.until(lambda: house.admitted)
        assert await house.says(client.opening + response) == b""
        assert await house.says(response) == b""
        fresh = Client(KEYS[WORKER_DAEMON], WORKER_DAEMON, "", endpoint(house.address))
        assert b"challenge" in await house.says(fresh.opening + response)  # is answered, and not let in
        writer.close()

    assert len(play(work).admitted) == 1
    assert "3 connections" in " ".join(lines) or "repeats" in lines[0]


def test_a_server_that_does_not_know_the_key_is_left():
    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, suppress(Refused, OSError):
            let_in(connection, {WORKER_DAEMON: "a guess"})

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        with socket.create_connection(server.getsockname(), timeout=PATIENCE_S) as connection, pytest.raises(OSError):
            authenticate(connection, KEYS[WORKER_DAEMON], WORKER_DAEMON, timeout_s=PATIENCE_S)
        thread.join()


def test_a_server_that_answers_with_a_guess_is_refused_and_hears_no_response():
    heard: list[bytes] = []

    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b'{"type":"challenge","nonce":"00","proof":"' + b"0" * 64 + b'"}\n')
            heard.append(connection.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        with socket.create_connection(server.getsockname(), timeout=PATIENCE_S) as connection:
            with pytest.raises(Refused, match="does not know the campaign's secret"):
                authenticate(connection, KEYS[WORKER_DAEMON], WORKER_DAEMON, timeout_s=PATIENCE_S)
        thread.join()
    assert heard == [b""]


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(
    "words", [b"x" * (1 << 20), b"\n" * 4097, b"[" * 4095 + b"\n", b'{"type":"authenticate"}\n', b"\xff\x00\n"]
)
def test_what_is_no_handshake_is_refused_in_one_line(lines: list[str], words: bytes):
    async def work(house: House) -> None:
        await house.says(words)
        await house.until(lambda: lines)
        await house.client()
        await house.until(lambda: house.admitted)

    play(work)
    assert len(lines) == 1 and "\n" not in lines[0] and len(lines[0]) < 400


@pytest.mark.usefixtures("unhurried")
def test_a_line_without_end_takes_no_more_memory_than_a_handshake(lines: list[str]):
    async def work(house: House) -> None:
        reader, writer = await asyncio.open_connection(*house.address[:2])
        writer.write(b"x" * (module.HANDSHAKE_BYTES - 1))
        await house.until(lambda: any(len(each.received) == module.HANDSHAKE_BYTES - 1 for each in house.listener._waiting))
        writer.write(b"x" * (1 << 24))
        await house.until(lambda: not house.listener.waiting)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()

    play(work)
    assert f"{module.HANDSHAKE_BYTES} bytes, and no handshake" in lines[0]  # at once, and not when its time was over


def test_who_says_nothing_is_hung_up_on_in_time(monkeypatch: pytest.MonkeyPatch, lines: list[str]):
    async def work(house: House) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module, "HANDSHAKE_S", 0.05)
            assert await house.says(b"") == b""
        assert b"challenge" in await house.says(Client(KEYS[WORKER_DAEMON], WORKER_DAEMON, "", "").opening)

    play(work)
    assert "no handshake within" in lines[0]


@pytest.mark.usefixtures("unhurried")
def test_idle_connections_keep_nobody_out_and_are_few(lines: list[str]):
    async def work(house: House) -> None:
        with ExitStack() as idle:
            for _ in range(8):
                for _ in range(module.WAITING):
                    idle.enter_context(socket.create_connection(house.address, timeout=PATIENCE_S))
                await house.client()
                assert house.listener.waiting <= module.WAITING
            await house.until(lambda: len(house.admitted) == 8)

    play(work)
    assert len(lines) == 2 and "gave way" in lines[0]  # the first, and at the end how many there were
    assert int(lines[1].split()[0]) > 6 * module.WAITING


def lowest_free_descriptor() -> int:
    free = os.dup(0)
    os.close(free)
    return free


@pytest.mark.usefixtures("unhurried")
def test_without_a_descriptor_to_be_had_strangers_give_way_to_who_knows_the_key(lines: list[str]):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def work(house: House) -> None:
        client = socket.socket()
        client.settimeout(PATIENCE_S)
        client.setblocking(False)
        strangers = [socket.create_connection(house.address, timeout=PATIENCE_S) for _ in range(20)]
        await house.until(lambda: house.listener.waiting == 20)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free_descriptor(), hard))
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, house.address)
        known = Client(KEYS[WORKER_DAEMON], WORKER_DAEMON, "", endpoint(client.getpeername()))
        await loop.sock_sendall(client, known.opening)
        async with asyncio.timeout(PATIENCE_S):
            answer = await loop.sock_recv(client, 4096)
        await loop.sock_sendall(client, known.respond(answer[:-1]))
        await house.until(lambda: house.admitted)
        for each in (client, *strangers):
            each.close()

    try:
        play(work)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "gave way" in lines[0] and "Traceback" not in "".join(lines)
