"""TLS with a pre-shared key behind the handshake, over real TCP."""

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from checkpoint import tls
from checkpoint.daemon.server import Server
from checkpoint.errors import DamagedCheckpoint
from checkpoint.handshake import WORKER_DAEMON, Client, Nonces, authenticate, daemon_keys, derive, encrypting
from checkpoint.handshake import Server as Challenger
from checkpoint.listener import Listener, bind, stream
from checkpoint.tiers.remote import RemoteShard
from resilient.protocol.connection import Connection

SECRET = encrypting("s3cret")
KEYS = daemon_keys(SECRET)
WORDS = b"nobody else reads this" * 3000
PATIENCE_S = 120.0

why = tls.why_not()
with_psk = pytest.mark.skipif(why is not None, reason=str(why))


def exchange(work: Callable[[tuple[str, int]], None], keys: dict[str, str]) -> list[bytes]:
    """What a server hears that sends back what it is told, from the client `work`."""
    heard: list[bytes] = []

    async def run() -> None:
        (listening,) = bind(["127.0.0.1"], backlog=8)
        served: list[asyncio.Task[None]] = []

        async def serve(connection: socket.socket, peer) -> None:
            try:
                reader, writer = await stream(connection, peer, limit_bytes=1 << 16)
            except OSError:
                connection.close()
                return
            heard.append(await reader.readexactly(len(WORDS)))
            writer.write(heard[-1])
            await writer.drain()
            writer.close()

        listener = Listener(
            [listening], keys, lambda *those: served.append(asyncio.ensure_future(serve(*those))), logging.getLogger("test.tls")
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.to_thread(work, listening.getsockname())
                await asyncio.gather(*served, return_exceptions=True)
        finally:
            listener.close()

    asyncio.run(run())
    return heard


def echo(connection: socket.socket) -> bytes:
    connection.sendall(WORDS)
    found = bytearray()
    while len(found) < len(WORDS):
        found += connection.recv(1 << 16)
    return bytes(found)


class Wire:
    """Passes on what a client and a server say to each other, and keeps it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen = bytearray()
        # The proofs cover the server's address, which is another one behind a wire.
        monkeypatch.setattr("checkpoint.handshake.endpoint", lambda _: "somewhere")
        monkeypatch.setattr("checkpoint.listener.endpoint", lambda _: "somewhere")

    def before(self, work: Callable[[tuple[str, int]], None]) -> Callable[[tuple[str, int]], None]:
        def through(address: tuple[str, int]) -> None:
            with socket.create_server(("127.0.0.1", 0)) as between:
                threading.Thread(target=self._pass_on, args=(between, address), daemon=True).start()
                work(between.getsockname())

        return through

    def _pass_on(self, between: socket.socket, address: tuple[str, int]) -> None:
        client, _ = between.accept()
        server = socket.create_connection(address)
        threading.Thread(target=self._copy, args=(server, client), daemon=True).start()
        self._copy(client, server)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return


def says(key: str) -> Callable[[tuple[str, int]], None]:
    def work(address: tuple[str, int]) -> None:
        with socket.create_connection(address, timeout=PATIENCE_S) as plain:
            with authenticate(plain, key, WORKER_DAEMON, timeout_s=PATIENCE_S) as connection:
                assert echo(connection) == WORDS

    return work


@with_psk
def test_what_follows_the_handshake_is_not_on_the_wire(monkeypatch: pytest.MonkeyPatch):
    wire = Wire(monkeypatch)
    assert exchange(wire.before(says(KEYS[WORKER_DAEMON])), KEYS) == [WORDS]
    assert len(wire.seen) > 2 * len(WORDS) and WORDS[:22] not in wire.seen


def test_without_tls_it_is(monkeypatch: pytest.MonkeyPatch):
    wire, keys = Wire(monkeypatch), daemon_keys("s3cret")
    assert exchange(wire.before(says(keys[WORKER_DAEMON])), keys) == [WORDS]
    assert WORDS[:22] in wire.seen


def test_a_key_that_asks_for_tls_is_another_key_and_all_that_follow_from_it_ask_for_it():
    assert all(key.startswith("tls-") for key in KEYS.values())
    assert not any(key.endswith(KEYS[role].removeprefix("tls-")) for role, key in daemon_keys("s3cret").items())


@pytest.mark.parametrize(("theirs", "ours"), [(KEYS, daemon_keys("s3cret")), (daemon_keys("s3cret"), KEYS)])
def test_an_end_without_tls_and_one_with_it_refuse_each_other(theirs: dict[str, str], ours: dict[str, str]):
    def work(address: tuple[str, int]) -> None:
        with pytest.raises(OSError):
            says(ours[WORKER_DAEMON])(address)

    assert exchange(work, theirs) == []


def test_both_ends_find_the_key_of_a_connection_and_no_other_connection_has_it():
    found = []
    for _ in range(2):
        client = Client(KEYS[WORKER_DAEMON], WORKER_DAEMON, "", "here 1")
        server = Challenger(KEYS, Nonces(), "here 1")
        peer = server.admit(client.respond(server.challenge(client.opening[:-1])[:-1])[:-1])
        assert client.tls_key == peer.tls_key and client.tls_key is not None and len(client.tls_key) == 32
        found.append(client.tls_key)
    assert found[0] != found[1]


@with_psk
def test_who_has_another_key_than_the_connections_hears_nothing(monkeypatch: pytest.MonkeyPatch):
    def work(address: tuple[str, int]) -> None:
        secured = tls.secured
        monkeypatch.setattr(tls, "secured", lambda connection, key: secured(connection, bytes(32)))
        with pytest.raises(OSError):
            says(KEYS[WORKER_DAEMON])(address)

    assert exchange(work, KEYS) == []


@with_psk
def test_an_agents_connection_does_not_wait_over_tls_either():
    from resilient.protocol.messages import Alive, Ping

    key = {"driver-agent": derive(SECRET, "driver-agent")}

    async def run(check: Callable[[Connection, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        (listening,) = bind(["127.0.0.1"], backlog=8)
        admitted: asyncio.Queue[tuple] = asyncio.Queue()
        listener = Listener([listening], key, lambda *those: admitted.put_nowait(those), logging.getLogger("test.tls"))

        def connect() -> Connection:
            return Connection([listening.getsockname()], token=SECRET, node=0, incarnation=1, timeout_s=PATIENCE_S)

        async with asyncio.timeout(PATIENCE_S):
            connecting = asyncio.ensure_future(asyncio.to_thread(connect))
            connection, peer = await admitted.get()
            reader, writer = await stream(connection, peer, limit_bytes=1 << 16)
            with await connecting as agent:
                await check(agent, reader, writer)
            writer.close()
        listener.close()

    async def check(agent: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert agent.receive() == []  # at once, since nothing has come
        agent.send(Alive(generation=1))
        assert b"alive" in await reader.readline()
        from checkpoint.framing import encode

        for number in range(3000):  # many records of TLS
            writer.write(encode(Ping(generation=number)))
        heard: list = []
        while len(heard) < 3000:
            heard += agent.receive()
            await asyncio.sleep(0)
        assert [each.generation for each in heard] == list(range(3000))
        while not agent.queued_bytes:  # nobody reads: what the kernel does not take waits here
            for _ in range(10_000):
                agent.send(Alive(generation=1))
        while agent.queued_bytes:
            await reader.read(1 << 16)
            agent.flush()

    asyncio.run(run(check))


@with_psk
def test_a_worker_reads_from_another_nodes_daemon_over_tls(tmp_path: Path):
    async def run() -> None:
        port = Server([tmp_path], KEYS).start("127.0.0.1")
        with pytest.raises(DamagedCheckpoint, match=r"cannot be fetched: .*No such file"):
            await asyncio.to_thread(RemoteShard, f"127.0.0.1:{port}", str(tmp_path / "none"), KEYS[WORKER_DAEMON])

    asyncio.run(run())


@pytest.mark.skipif(sys.version_info >= tls.NEEDED, reason="this Python has TLS with pre-shared keys, and nothing is refused")
def test_a_python_without_it_says_so():
    assert why is not None and "needs Python 3.13 or newer, and this is 3." in why
