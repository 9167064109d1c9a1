"""What is found out about nodes: doors that are open, refused, and behind which nobody answers."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from resilient.driver.inquiries import inquire
from resilient.outbox import InquireAbout


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_daemon_lets_in_refuses_or_is_not_known(listening: socket.socket):
    with socket.socket() as closed:  # bound, so that nobody else has its port, and not listening
        closed.bind(("127.0.0.1", 0))
        doors = [f"127.0.0.1:{each.getsockname()[1]}" for each in (listening, closed)]
        found = asyncio.run(inquire(InquireAbout((4, 5, 6), (*doors, None)), None))
    assert [(each.node, each.door, each.states) for each in found] == [
        (4, "open", frozenset()),
        (5, "refused", frozenset()),
        (6, "unknown", frozenset()),
    ]
