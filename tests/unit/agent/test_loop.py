"""The agent's loop, and the conversation with its driver in the middle of waits."""

import logging
import os
import threading
from collections.abc import Iterator

import pytest
from parts import PATIENCE_S, Talk
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from resilient.agent.ending import end_workers
from resilient.agent.limits import QUIET_S
from resilient.protocol import connection as connection_module
from resilient.protocol.messages import Alive, Inspect, Ping, RecordsWritten, Stop


@pytest.fixture
def talk() -> Iterator[Talk]:
    made = Talk()
    yield made
    made.close()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Undying:
    """Workers whose processes never go; stands for processes that the kernel holds."""

    def __init__(self) -> None:
        self._never, self._writer = os.pipe()
        self.killed = 0

    def kill(self) -> None:
        self.killed += 1

    def remaining(self) -> list[int]:
        return [self._never]

    def left_behind(self) -> list[int]:
        return [0]


def test_workers_that_do_not_die_are_left_behind_after_the_limit_and_pings_are_answered_meanwhile(talk: Talk):
    workers = Undying()
    talk.peer.send(Ping(generation=0))
    assert not end_workers(workers, talk.loop, limit_s=0.5)
    assert workers.killed == 1
    assert talk.peer.next() == Alive(generation=0)


def test_workers_that_die_are_waited_for_no_longer_than_that(talk: Talk):
    class Dying(Undying):
        def kill(self) -> None:
            os.close(self._writer)  # its sentinel becomes readable

        def left_behind(self) -> list[int]:
            return []

    assert end_workers(Dying(), talk.loop, limit_s=1e9)


def test_what_is_not_for_now_waits_in_the_inbox_in_order(talk: Talk):
    talk.peer.send(Inspect(generation=1), Ping(generation=1), Stop(generation=1))
    assert talk.loop.wait_until(lambda: talk.driver.awaits(Stop), PATIENCE_S)
    assert [talk.driver.next(), talk.driver.next(), talk.driver.next()] == [Inspect(generation=1), Stop(generation=1), None]


def test_what_has_a_handler_is_dealt_with_during_a_wait():
    counts: list[int] = []
    talk = Talk({RecordsWritten: lambda message: counts.append(message.count)})
    talk.peer.send(RecordsWritten(generation=1, count=3), RecordsWritten(generation=1, count=4))
    assert talk.loop.wait_until(lambda: len(counts) == 2, PATIENCE_S)
    assert counts == [3, 4]
    talk.close()


def test_a_ping_is_not_answered_where_something_was_said_a_moment_ago():
    clock = Clock()
    talk = Talk(clock=clock)

    def pinged(number: int) -> None:
        talk.peer.send(Ping(generation=number), Inspect(generation=number))
        assert talk.loop.wait_until(lambda: talk.driver.awaits(Inspect), PATIENCE_S)
        talk.driver.next()

    pinged(1)
    clock.now += QUIET_S / 2
    pinged(2)
    assert talk.peer.next() == Alive(generation=0)
    assert not talk.peer.arrived()
    clock.now += QUIET_S / 2
    pinged(3)
    assert talk.peer.next() == Alive(generation=0)
    assert not talk.peer.arrived()
    talk.close()


def test_a_driver_that_is_silent_for_longer_than_the_fence_is_given_up_and_one_that_speaks_is_not():
    clock = Clock()
    talk = Talk(fence_s=30.0, clock=clock)
    clock.now += 29.0
    talk.peer.send(Ping(generation=0))
    assert talk.loop.wait_until(lambda: bool(talk.peer.arrived()), PATIENCE_S)
    clock.now += 29.0
    talk.loop.turn(0.0)
    assert not talk.driver.fenced
    clock.now += 2.0
    with pytest.raises(RendezvousGracefulExitError, match="fenced"):
        talk.loop.turn(0.0)
    assert talk.driver.fenced
    talk.loop.turn(0.0)  # once is enough: what has to be done at the end needs the loop
    talk.close()


def test_a_driver_that_closes_the_connection_without_a_word_is_gone_and_was_not_silent(talk: Talk):
    assert not talk.driver.gone
    talk.peer.close()
    with pytest.raises(RendezvousGracefulExitError, match="closed by the driver"):
        talk.loop.wait_until(lambda: False, PATIENCE_S)
    assert (talk.driver.gone, talk.driver.fenced) == (True, False)


def test_what_is_no_message_is_refused_in_one_line_of_log_and_ends_the_conversation(talk: Talk, caplog: pytest.LogCaptureFixture):
    talk.peer.send_bytes(b'{"type":"stop","generation":"one"}\n')
    with caplog.at_level(logging.INFO), pytest.raises(RendezvousGracefulExitError, match="not a message"):
        talk.loop.wait_until(lambda: False, PATIENCE_S)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "not a message: Expected `int`, got `str` - at `$.generation`" in line and "\n" not in line


def test_a_driver_that_does_not_read_stops_no_turn(talk: Talk):
    """More is sent than the kernel's buffers hold; it waits in the agent, and arrives when it is read."""
    number = 0
    while talk.connection.queued_bytes < 1 << 20:
        talk.driver.send(Alive(generation=number))
        number += 1
    for _ in range(3):
        talk.loop.turn(0.0)
    assert talk.connection.queued_bytes > 1 << 19
    found: list[int] = []
    while len(found) < number:
        found += [message.generation for message in talk.peer.arrived()]
        talk.loop.turn(0.0)
    assert found == list(range(number))


def test_a_driver_that_never_reads_is_given_up(talk: Talk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection_module, "QUEUE_BYTES", 1 << 16)
    with pytest.raises(RendezvousGracefulExitError, match="unread"):
        while True:
            talk.driver.send(Alive(generation=1))
    assert not talk.driver.send(Alive(generation=1)), "nothing is said to a driver that was given up"


def test_a_function_that_blocks_does_not_keep_the_loop(talk: Talk):
    gate = threading.Event()
    future = talk.loop.in_thread(lambda: gate.wait(PATIENCE_S), "test")
    talk.peer.send(Ping(generation=0))
    assert talk.loop.wait_until(lambda: bool(talk.peer.arrived()), PATIENCE_S)
    assert not future.done()
    gate.set()
    assert talk.loop.wait_until(future.done, PATIENCE_S)
    assert future.result()


def test_what_a_thread_raises_is_raised_where_its_result_is_asked_for(talk: Talk):
    future = talk.loop.in_thread(lambda: 1 // 0, "test")
    assert talk.loop.wait_until(future.done, PATIENCE_S)
    with pytest.raises(ZeroDivisionError):
        future.result()


def test_a_handler_may_wait_and_is_not_called_again_meanwhile(talk: Talk):
    first, second = os.pipe(), os.pipe()
    calls: list[str] = []

    def wait() -> None:
        calls.append("in")
        os.write(second[1], b"x")  # no earlier, or the other one is called once more when there is nothing left to read
        assert talk.loop.wait_until(lambda: "other" in calls, PATIENCE_S)
        os.read(first[0], 1)
        calls.append("out")

    def other() -> None:
        os.read(second[0], 1)
        calls.append("other")

    talk.loop.watch(first[0], wait)
    talk.loop.watch(second[0], other)
    os.write(first[1], b"x")
    assert talk.loop.wait_until(lambda: "out" in calls, PATIENCE_S)
    assert calls == ["in", "other", "out"]


def test_a_descriptor_is_waited_for_in_turns(talk: Talk):
    reader, writer = os.pipe()
    assert not talk.loop.wait_readable(reader, 0.0)
    talk.peer.send(Ping(generation=0))
    writing = threading.Timer(0.2, os.write, (writer, b"x"))
    writing.start()
    assert talk.loop.wait_readable(reader, PATIENCE_S)
    assert talk.peer.next() == Alive(generation=0)
    writing.join()
    for each in (reader, writer):
        os.close(each)
