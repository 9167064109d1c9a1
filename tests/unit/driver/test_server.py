"""The driver's server over real TCP: who is let in as which node, what is refused, and peers that do not read."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from handshakes import open_agent

from checkpoint.framing import Decoder, Message, NotAMessage, encode
from checkpoint.protocol import SnapshotKey, Sync
from resilient.driver import server as module
from resilient.driver.server import Listeners, Server
from resilient.protocol.candidates import Candidate, last_member, pack
from resilient.protocol.messages import (
    AgentFailed,
    AgentMessage,
    Alive,
    DaemonRequests,
    DriverMessage,
    Hello,
    Inspect,
    Ping,
    RecordsWritten,
    Start,
)

SECRET = "s3cret"
PATIENCE_S = 120.0


class Peer:
    """Whoever connects."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.decoder: Decoder[DriverMessage] = Decoder(DriverMessage)

    async def say(self, *messages: Message | bytes) -> None:
        self.writer.write(b"".join(each if isinstance(each, bytes) else encode(each) for each in messages))
        await self.writer.drain()

    async def hear(self) -> list[DriverMessage]:
        """What comes next; nothing where the connection was closed."""
        async with asyncio.timeout(PATIENCE_S):
            while data := await self.reader.read(1 << 16):
                if found := self.decoder.feed(data):
                    return found
        return []


class House:
    def __init__(self) -> None:
        self.connected: list[int] = []
        self.said: list[tuple[int, AgentMessage]] = []
        self.failing: list[int] = []
        self.lost: list[tuple[int, int, str]] = []
        self.forbidden: NotAMessage | None = None
        listeners = Listeners(
            lambda node, _: self.connected.append(node),
            self.hear,
            self.failing.append,
            lambda *news: self.lost.append(news),
        )
        self.server = Server(SECRET, lambda: 3, listeners)
        self.peers: list[Peer] = []

    def hear(self, node: int, message: AgentMessage) -> None:
        if self.forbidden is not None:
            raise self.forbidden
        self.said.append((node, message))

    async def peer(self) -> Peer:
        self.peers.append(Peer(*await asyncio.open_connection("127.0.0.1", self.port)))
        return self.peers[-1]

    async def agent(self, node: int, incarnation: int = 1, token: str = SECRET, says: int | None = None) -> Peer:
        """An agent whose handshake is done, and who has said hello as `says`, or as itself."""
        peer = Peer(*await open_agent(self.port, token, node, incarnation))
        self.peers.append(peer)
        named = node if says is None else says
        await peer.say(Hello(generation=0, node=named, incarnation=incarnation, host="h", addr="127.0.0.1", t=0.0))
        return peer

    async def until(self, what: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not what():
                await asyncio.sleep(0.002)


def play(work: Callable[[House], Awaitable[Any]]) -> House:
    async def run() -> House:
        house = House()
        house.port = house.server.listen(["127.0.0.1"])
        try:
            await work(house)
        finally:
            house.server.close()
            for peer in house.peers:
                peer.writer.close()
        return house

    return asyncio.run(run())


def test_what_an_agent_says_counts_for_the_node_of_its_hello():
    async def work(house: House) -> None:
        house.server.expect(2, 1)
        peer = await house.agent(2)
        await peer.say(Alive(generation=3), Alive(generation=3))
        await house.until(lambda: len(house.said) == 2)
        house.server.send(2, Inspect(generation=3))
        assert await peer.hear() == [Inspect(generation=3)]
        peer.writer.close()
        await house.until(lambda: house.lost)

    house = play(work)
    assert house.connected == [2]
    assert {node for node, _ in house.said} == {2}
    assert house.lost == [(2, 1, "its connection was closed")]


def test_an_agent_that_fails_is_lost_with_its_error_in_one_line():
    async def work(house: House) -> None:
        house.server.expect(2, 1)
        peer = await house.agent(2)
        await peer.say(AgentFailed(generation=3, error=f"OSError: [Errno 27] File too large:\n{'x' * 1000}"), Alive(generation=3))
        await house.until(lambda: house.said)
        assert house.failing == [2]
        assert not house.lost, "it still ends its workers, beside which no other agent may start"
        peer.writer.close()
        await house.until(lambda: house.lost)

    house = play(work)
    ((node, incarnation, why),) = house.lost
    assert (node, incarnation) == (2, 1)
    assert why.startswith("it has failed: OSError: [Errno 27] File too large: xxx") and len(why) < 330


def test_an_agent_that_cannot_start_is_lost_with_what_it_says_in_place_of_its_hello():
    async def work(house: House) -> None:
        house.server.expect(2, 1)
        older, own = [Peer(*await open_agent(house.port, SECRET, 2, incarnation)) for incarnation in (0, 1)]
        house.peers += [older, own]
        await older.say(AgentFailed(generation=0, error="of another start"))
        await own.say(AgentFailed(generation=0, error="/runs/x is not there on n3: is it mounted?"))
        await house.until(lambda: house.lost)

    house = play(work)
    assert house.lost == [(2, 1, "it has failed: /runs/x is not there on n3: is it mounted?")]
    assert not house.connected


def test_an_agent_that_says_what_it_may_not_is_lost_with_one_line_of_log(caplog: pytest.LogCaptureFixture):
    async def work(house: House) -> None:
        house.forbidden = NotAMessage("not a message of its own: it is about rank 9")
        house.server.expect(2, 1)
        peer = await house.agent(2)
        await peer.say(Alive(generation=3), Alive(generation=3))
        assert await peer.hear() == []
        await house.until(lambda: house.lost)

    house = play(work)
    assert house.lost == [(2, 1, "it said what is not a message of its own: it is about rank 9")]
    assert house.said == [] and caplog.text.count("node 2: not a message of its own") == 1


def test_an_older_incarnation_cannot_take_over_a_nodes_line(caplog: pytest.LogCaptureFixture):
    async def work(house: House) -> None:
        house.server.expect(0, 2)
        present = await house.agent(0, 2)
        await house.until(lambda: house.connected)
        for incarnation in (1, 2, 3):  # what is over, what is there already, and what nobody has started
            assert await (await house.agent(0, incarnation)).hear() == []
        house.server.send(0, Ping(generation=3))
        assert await present.hear() == [Ping(generation=3)]

    house = play(work)
    assert house.connected == [0] and house.lost == []
    assert "agent 1 of node 0: it is not the one that was started last" in caplog.text


def test_an_agent_that_is_started_anew_has_the_line_and_what_the_old_one_says_is_not_heard():
    async def work(house: House) -> None:
        house.server.expect(0, 1)
        old = await house.agent(0, 1)
        await house.until(lambda: house.connected)
        house.server.expect(0, 2)
        assert await old.hear() == []  # it was hung up
        new = await house.agent(0, 2)
        await new.say(Alive(generation=7))
        await house.until(lambda: house.said)

    house = play(work)
    assert house.said == [(0, Alive(generation=7))] and house.lost == []


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b'{"type": "hello"}\n', b"[" * 100_000 + b"\n", b"x" * 70_000]
)
def test_a_stranger_is_refused_in_one_line(caplog: pytest.LogCaptureFixture, words: bytes):
    async def work(house: House) -> None:
        peer = await house.peer()
        with suppress(ConnectionError):  # it is hung up on while it still speaks
            await peer.say(words)
            assert await peer.hear() == []

    with caplog.at_level(logging.DEBUG, module.__name__):
        house = play(work)
    assert house.connected == [] and house.lost == []
    (record,) = [each for each in caplog.records if each.name == module.__name__]
    assert "\n" not in record.getMessage() and record.exc_info is None


def test_a_wrong_secret_is_refused_and_a_flood_of_them_does_not_fill_the_log(caplog: pytest.LogCaptureFixture):
    async def work(house: House) -> None:
        house.server.expect(0, 1)
        for _ in range(50):
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await house.agent(0, token="guess")

    house = play(work)
    assert house.connected == []
    first, *rest = [each.getMessage() for each in caplog.records if each.name == module.__name__]
    assert "does not know the campaign's secret" in first
    assert [each.split()[0] for each in rest] == ["49"]  # of the others, at the end


def test_an_agent_cannot_speak_as_another_node_than_it_has_authenticated_itself_as(caplog: pytest.LogCaptureFixture):
    async def work(house: House) -> None:
        house.server.expect(3, 1)
        house.server.expect(4, 1)
        assert await (await house.agent(3, says=4)).hear() == []

    house = play(work)
    assert house.connected == [] and house.lost == []
    assert "agent 1 of node 4: it has authenticated itself as '1 of node 3'" in caplog.text


def test_agents_that_wait_for_files_of_the_run_directory_may_say_hello_late(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("checkpoint.listener.HANDSHAKE_S", 5.0)

    async def work(house: House) -> None:
        house.server.expect(0, 1)
        house.peers.append(Peer(*await open_agent(house.port, SECRET, 0, 1)))
        await asyncio.sleep(5.5)
        await house.peers[0].say(Hello(generation=0, node=0, incarnation=1, host="h", addr="127.0.0.1", t=0.0))
        await house.until(lambda: house.connected)

    play(work)


def test_a_known_node_that_says_what_is_no_message_is_lost_for_that_reason(caplog: pytest.LogCaptureFixture):
    async def work(house: House) -> None:
        house.server.expect(0, 1)
        peer = await house.agent(0)
        await peer.say(Alive(generation=1), b'{"type": "alive", "generation": "one"}\n', Alive(generation=2))
        assert await peer.hear() == []
        await house.until(lambda: house.lost)

    house = play(work)
    assert house.said == []  # what arrived with it is refused as a whole
    ((node, incarnation, why),) = house.lost
    assert (node, incarnation) == (0, 1) and "not a message" in why


def test_requests_of_a_turn_are_one_message_and_go_before_what_is_said_after_them():
    async def work(house: House) -> None:
        house.server.expect(0, 1)
        peer = await house.agent(0)
        await house.until(lambda: house.connected)
        for _ in range(3):
            house.server.request(0, Sync(generation=3))
        house.server.send(0, Inspect(generation=3))
        house.server.request(0, Sync(generation=3))
        house.server.end_turn()
        house.server.end_turn()
        house.server.send(0, Ping(generation=3))
        heard: list[DriverMessage] = []
        while len(heard) < 4:
            heard += await peer.hear()
        assert [type(each) for each in heard] == [DaemonRequests, Inspect, DaemonRequests, Ping]
        assert len(heard[0].requests) == 3 and len(heard[2].requests) == 1

    play(work)


def test_a_start_reaches_each_node_and_what_all_are_told_alike_is_encoded_once():
    common = {"nodes": 2, "master_addr": "a", "master_port": 1, "collective_timeout_s": 9.0, "report_s": 0.2, "mtbf_s": 9.0}
    packed = pack([Candidate(key=SnapshotKey(5, 2), tier="ram", shards=())])
    starts = [Start(generation=3, node_rank=node, candidates=packed, **common) for node in (0, 1)]
    last_member.cache_clear()

    async def work(house: House) -> None:
        for node in (0, 1):
            house.server.expect(node, 1)
        peers = [await house.agent(node) for node in (0, 1)]
        await house.until(lambda: len(house.connected) == 2)
        house.server.request(0, Sync(generation=3))
        for node, start in enumerate(starts):
            house.server.send(node, start)
        heard: list[DriverMessage] = []
        while len(heard) < 2:
            heard += await peers[0].hear()
        assert heard == [DaemonRequests(generation=3, requests=(Sync(generation=3),)), starts[0]]
        assert await peers[1].hear() == [starts[1]]

    play(work)
    assert last_member.cache_info().misses == 1


def test_written_records_are_told_with_the_next_message_or_when_they_are_many():
    async def work(house: House) -> None:
        house.server.expect(0, 1)
        peer = await house.agent(0)
        await house.until(lambda: house.connected)
        house.server.records_written(0, 1, 3)
        house.server.records_written(0, 1, 4)
        house.server.records_written(0, 9, 50)  # of an agent that is gone
        house.server.ping()
        heard: list[DriverMessage] = []
        while len(heard) < 2:
            heard += await peer.hear()
        assert heard == [RecordsWritten(generation=3, count=7), Ping(generation=3)]
        house.server.records_written(0, 1, module.RECORDS_AT_ONCE)
        assert await peer.hear() == [RecordsWritten(generation=3, count=module.RECORDS_AT_ONCE)]

    play(work)


def test_a_peer_that_does_not_read_is_lost_and_fills_no_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "UNREAD_BYTES", 1 << 20)

    async def work(house: House) -> None:
        house.server.expect(0, 1)
        house.server.expect(1, 1)
        await house.agent(0)
        well = await house.agent(1)
        await house.until(lambda: len(house.connected) == 2)
        written = 0
        while not house.lost:
            house.server.request(0, Sync(generation=3))
            for _ in range(1000):
                house.server.request(0, Sync(generation=3))
            house.server.end_turn()
            written += 1
            await asyncio.sleep(0)
            assert written < 10_000
        house.server.ping()
        assert await well.hear() == [Ping(generation=3)]

    house = play(work)
    ((node, incarnation, why),) = house.lost
    assert (node, incarnation) == (0, 1) and "does not read" in why
