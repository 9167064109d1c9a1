"""The control plane's messages: what is sent is what arrives."""

import typing

import msgspec
import pytest

from checkpoint import protocol as daemon
from checkpoint import worker_news
from checkpoint.framing import Decoder, Message, encode
from checkpoint.protocol import Held, NodeShard, SnapshotKey
from resilient.protocol import messages
from resilient.protocol.messages import (
    AgentMessage,
    DriverMessage,
    Heartbeat,
    Record,
    Report,
    WorkerEnded,
)
from resilient.recovery.faults import OutOfMemory, Raised, WorkerEnd

KEY = SnapshotKey(5, 2)
SHARD = NodeShard(tier="ram", directory="/dev/shm/a", key=KEY, shard=1, shards=2, size_bytes=10)


def test_a_report_arrives_as_it_was_sent():
    beat = Heartbeat(5, "step", 1.5, 2.5, 0.25, "S", True, None)
    sent = Report(
        generation=2, heartbeats={3: beat}, records=(Record(3, 1.0, None, {"loss": 0.1}),), news=(Held(generation=2, shard=SHARD),)
    )
    assert Decoder[AgentMessage](AgentMessage).feed(encode(sent)) == [sent]


def test_the_end_of_a_worker_arrives_with_all_that_is_known_of_it():
    raised = Raised("ValueError", "no", "Traceback", 1.0, final=78)
    oom = OutOfMemory("/job", 1 << 30, None, "dmesg")
    sent = WorkerEnded(generation=1, end=WorkerEnd(0, 0, 7, -9, 1.0, 4, "step", raised, "log", "crash", oom), stopped=False)
    assert Decoder[AgentMessage](AgentMessage).feed(encode(sent)) == [sent]


@pytest.mark.parametrize("module", [messages, daemon, worker_news])
def test_every_message_says_of_which_generation_it_speaks(module: object):
    found = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Message) and each is not Message]
    assert len(found) > 5
    assert {each.__name__ for each in found if "generation" not in each.__struct_fields__} == set()


def test_no_two_messages_of_a_direction_share_a_name():
    for union in (AgentMessage, DriverMessage, daemon.DaemonRequest, daemon.DaemonNews, worker_news.WorkerNews):
        tags = [msgspec.inspect.type_info(each).tag for each in typing.get_args(union)]  # type: ignore[union-attr]
        assert len(tags) == len(set(tags))
