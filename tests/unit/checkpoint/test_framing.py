"""Framing: what a stream of bytes decodes to, however it is cut, and what is refused."""

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.framing import Decoder, Message, NotAMessage, encode


class Sum(Message, frozen=True):
    generation: int
    numbers: tuple[int, ...]
    name: str = ""


class NodeLost(Message, frozen=True):
    generation: int


MESSAGES = [Sum(generation=1, numbers=(1, 2)), NodeLost(generation=2), Sum(generation=3, numbers=(), name="ä\nb")]


def decoder(limit_bytes: int = 1 << 20) -> Decoder[Sum | NodeLost]:
    return Decoder(Sum | NodeLost, limit_bytes=limit_bytes)


@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_messages_arrive_whole_and_in_order_however_the_stream_is_cut(cuts: list[int]):
    data = b"".join(map(encode, MESSAGES))
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    reader = decoder()
    found = [message for start, end in itertools.pairwise(places) for message in reader.feed(data[start:end])]
    assert found == MESSAGES


def test_a_message_names_its_class_in_snake_case():
    assert encode(NodeLost(generation=2)) == b'{"type":"node_lost","generation":2}\n'


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"nonsense",
        b'{"type":"other","generation":1}',
        b'{"type":"node_lost"}',
        b'{"type":"node_lost","generation":"1"}',
        b'{"type":"node_lost","generation":1,"more":1}',
        b'{"type":"sum","generation":1,"numbers":[1,"2"]}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_what_is_no_message_is_refused_in_a_short_line(line: bytes):
    with pytest.raises(NotAMessage) as refused:
        decoder().feed(line + b"\n")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_line_without_an_end_is_refused_at_its_limit_and_takes_no_more_memory_than_that():
    reader = decoder(limit_bytes=1 << 20)
    tracemalloc.start()
    with pytest.raises(NotAMessage):
        for _ in range(100):
            reader.feed(b"x" * 100_000)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
