"""What speaks of a generation that is over is ignored, except records and news of the snapshot daemon."""

import pytest
from control_play import VICTIM, Play, beat, shard

from checkpoint.framing import NotAMessage
from checkpoint.protocol import Held, TierTrouble
from resilient.control.ends import SETTLE_S
from resilient.outbox import AcknowledgeRecords, WriteEvent, WriteMetrics
from resilient.protocol.messages import (
    AgentMessage,
    EndsFound,
    Inspected,
    Inspection,
    Proposed,
    Record,
    Report,
    Started,
    Stop,
    WorkerEnded,
)
from resilient.recovery.faults import WorkerEnd

OLD = [
    WorkerEnded(generation=5, end=WorkerEnd(1, 1, 77, -9, 9.0, 7, "step"), stopped=False),
    Proposed(generation=5, checked=40),
    Started(generation=5, pids={0: 7}),
    EndsFound(generation=5),
    Inspected(generation=5, ranks={0: Inspection(state="T", cpu=0.0, stacks="")}),
    Report(generation=5, heartbeats={0: beat(400, 9.0), 1: beat(400, 9.0, silent_s=700.0, state="T")}),
    Report(generation=7, heartbeats={0: beat(400, 9.0)}),
]


@pytest.fixture
def sixth(play: Play) -> Play:
    """The sixth generation runs."""
    play.exit(1)
    play.again()
    assert play.generation == 6
    return play


@pytest.mark.parametrize("message", OLD, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("draining", [False, True])
def test_what_is_said_of_another_generation_has_no_effect(sixth: Play, message: AgentMessage, draining: bool):
    if draining:
        sixth.do("stop", "SIGTERM")
    assert not sixth.deliver(0, message) and not sixth.deliver(1, message)


def test_an_answer_of_another_generation_is_none(sixth: Play):
    sixth.slow_agents = {1}
    sixth.exit(0, 1, VICTIM)
    sixth.deliver(1, EndsFound(generation=5))
    assert not sixth.sent(Stop, sixth.wait(SETTLE_S + 1.0))


def test_records_are_written_under_their_own_generation_and_acknowledged(sixth: Play):
    records = (Record(0, 9.0, None, {"step": 7}), Record(0, 9.1, "eval", {"step": 7}), Record(0, 9.2, "resumed", {"step": 7}))
    assert sixth.deliver(0, Report(generation=5, records=records)) == [
        WriteMetrics({"step": 7}, 5, 9.0),
        WriteEvent("eval", {"step": 7}, 5, 9.1, "n0"),
        AcknowledgeRecords(0, 3),
    ]
    sixth.resumed(3)
    assert sixth.events("generation_started")[-1]["resumed_step"] == 3


def test_news_of_a_daemon_count_whenever_they_come(sixth: Play):
    for node in (0, 1):
        sixth.deliver(node, Report(generation=5, news=(Held(generation=5, shard=shard(9, node)),)))
    assert sixth.coordinator.snapshots.checkpoints == [9], "the next generation may go on from it"
    trouble = TierTrouble(generation=5, tier="scratch", detail="No space left on device")
    effects = sixth.deliver(0, Report(generation=5, news=(trouble,)))
    assert [fault["kind"] for fault in sixth.events("fault", effects)] == ["storage"]


def test_a_proposal_that_is_answered_for_another_generation_arms_nobody(sixth: Play):
    sixth.do("stop", "SIGTERM")
    sixth.deliver(0, Proposed(generation=5, checked=41))
    assert not sixth.deliver(1, Proposed(generation=6, checked=42))
    assert sixth.deliver(0, Proposed(generation=6, checked=43))


OF_RANK_0 = [
    WorkerEnded(generation=6, end=WorkerEnd(0, 1, 77, -9, 9.0, 7, "step"), stopped=False),
    Started(generation=6, pids={0: 7}),
    Inspected(generation=6, ranks={0: Inspection(state="T", cpu=0.0, stacks="")}),
    Report(generation=6, heartbeats={0: beat(400, 9.0)}),
]


@pytest.mark.parametrize("message", OF_RANK_0, ids=lambda message: type(message).__name__)
def test_a_node_speaks_of_its_own_ranks_alone(sixth: Play, message: AgentMessage):
    sixth.coordinator.check(0, message)
    with pytest.raises(NotAMessage, match="about rank 0, and the node has 1 to 1"):
        sixth.coordinator.check(1, message)


def test_records_of_a_rank_that_a_node_had_before_are_good(sixth: Play):
    sixth.coordinator.check(1, Report(generation=6, records=(Record(0, 9.0, None, {"step": 7}),)))
