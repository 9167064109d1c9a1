"""Nodes that leave, return, and stand in for each other."""

import pytest
from control_play import Play, inventory, shard

from checkpoint.protocol import SnapshotKey
from resilient.control.coordinator import State
from resilient.control.membership import LAUNCH_ATTEMPTS
from resilient.exits import Exit
from resilient.outbox import Effect, Launch
from resilient.protocol.candidates import unpack
from resilient.protocol.messages import Health, HealthFinding, Message, Ready, Record, Shutdown, Start, Stop

FULL = HealthFinding(check="disk", verdict="fail", text="it is full")


def test_a_spare_takes_over_with_the_replicas_of_the_node_that_is_gone():
    play = Play(spares=1)
    play.start()
    assert [send.node for send in play.sent(Start)] == [0, 1]
    effects = play.do("lost", 1, "process 9 ended by SIGKILL")
    assert [send.node for send in play.sent(Stop, effects)] == [0]
    assert play.events("action")[0]["reason"] == "node 1 is gone: spare node 2 takes over"
    effects = play.again(0, shards={0: [shard(9, 0), shard(9, 1, replica=True)]})
    starts = play.sent(Start, effects)
    assert [(send.node, send.message.node_rank) for send in starts] == [(0, 0), (2, 1)]
    (candidate,) = unpack(starts[1].message.candidates)
    assert candidate.key == SnapshotKey(9, 5)
    assert [[(holder.node, holder.address) for holder in shard] for shard in candidate.shards] == [[(0, "10.0.0.0:9")]] * 2
    assert starts[0].message.candidates == starts[1].message.candidates
    assert play.coordinator.snapshots.newest == SnapshotKey(9, 5)


def test_without_a_spare_fewer_nodes_go_on_once_the_time_to_return_is_over():
    play = Play(fewer=(1,))
    play.start()
    play.do("lost", 1, "gone")
    play.again(0)
    assert len(play.sent(Start)) == 2
    play.wait(20.1)
    (start,) = play.sent(Start)[2:]
    assert (start.node, start.message.nodes) == (0, 1)
    assert [action["name"] for action in play.events("action")] == ["replace_node", "shrink"]
    play.resumed(0)
    assert play.events("generation_started")[-1]["layout"] == {"dp": 1}
    play.exit(0, 0, step=300)  # one rank is all there are
    assert play.finish().code is Exit.OK


def shrunken() -> Play:
    play = Play(fewer=(1,))
    play.start()
    play.do("lost", 1, "gone")
    play.again(0)
    play.wait(20.1)
    play.resumed(0)
    play.effects.clear()
    return play


def test_a_node_that_returns_is_taken_in_at_the_next_snapshot():
    play = shrunken()
    play.held(0, 7)
    play.join(1)
    assert not play.sent(Stop)
    effects = play.held(0, 8)
    assert [send.node for send in play.sent(Stop, effects)] == [0]
    assert play.events("action") == [
        {"fault_id": "g5-1", "incident_id": "g5-1", "name": "grow", "reason": "nodes have returned; all go on from step 8"},
    ]
    held = shard(8, 0, of=1, generation=play.generation)
    effects = play.again(0, shards={0: [held]})
    assert [(send.node, send.message.node_rank) for send in play.sent(Start, effects)] == [(0, 0), (1, 1)]
    assert not play.events("fault")


def test_a_node_that_returns_while_the_fence_is_raised_is_taken_in_at_the_next_snapshot():
    play = Play(fewer=(1,))
    play.start()
    play.do("lost", 1, "gone")
    play.fence = None
    play.again(0)
    play.wait(20.1)
    assert play.coordinator.state is State.FENCING
    play.join(1)
    assert [send.node for send in play.sent(Start, play.do("fence_raised", 6, None))] == [0]
    assert play.events("action")[-1]["reason"] == "no spare stands in for node 1: 1 node goes on, with the same global batch"
    play.resumed(0)
    assert [send.node for send in play.sent(Stop, play.held(0, 8))] == [0]
    assert play.events("action")[-1]["name"] == "grow"


def saved(play: Play, step: int) -> list[Effect]:
    """Rank 0 tells that the script has written a checkpoint by itself, and trains on."""
    return play.report(0, records=(Record(0, play.now, "script_checkpoint", {"path": "last.pt", "step": step}),))


def shrunken_script() -> Play:
    """One node goes on with a script that keeps nothing but checkpoints of its own."""
    play = Play(fewer=(1,), script=True)
    play.start()
    play.beat(0, 1)
    play.do("lost", 1, "gone")
    play.again(0)
    play.wait(20.1)
    play.beat(0, 1)
    play.effects.clear()
    return play


def test_a_node_that_returns_to_a_script_is_taken_in_at_its_next_checkpoint():
    play = shrunken_script()
    saved(play, 7)
    play.join(1)
    assert not play.sent(Stop, saved(play, 7))  # as another rank tells it
    effects = saved(play, 8)
    assert [send.node for send in play.sent(Stop, effects)] == [0]
    assert play.events("action")[-1]["reason"] == "nodes have returned; all go on from step 8"
    (told,) = play.events("script_checkpoint", effects)
    assert told["step"] == 8
    starts = play.sent(Start, play.again(0))
    assert [(send.node, send.message.node_rank) for send in starts] == [(0, 0), (1, 1)]
    assert starts[0].message.saved_step == 8 and not play.events("fault")


def test_a_node_that_returns_to_a_script_whose_steps_are_not_seen_is_taken_in_at_its_next_checkpoint():
    play = Play(fewer=(1,), script=True)
    play.start()
    play.do("lost", 1, "gone")
    play.again(0)
    play.wait(20.1)
    saved(play, 0)
    play.join(1)
    effects = saved(play, 0)
    assert [action["name"] for action in play.events("action", effects)] == ["grow"]
    assert play.events("action", effects)[0]["reason"].endswith("all go on from the newest checkpoint of the script")


def test_checkpoints_of_a_script_take_nobody_in_while_a_stop_is_under_way_nor_where_snapshots_are_gone_on_from():
    play = shrunken_script()
    play.join(1)
    play.do("stop", "SIGTERM")
    assert not play.sent(Stop, saved(play, 8))
    play = shrunken_script()
    play.resumed(2, "ram")
    play.join(1)
    assert not play.sent(Stop, saved(play, 8))
    assert play.sent(Stop, play.held(0, 9))


def test_nobody_is_taken_in_while_a_stop_is_under_way():
    play = shrunken()
    play.join(1)
    play.do("stop", "SIGTERM")
    assert not play.sent(Stop, play.held(0, 8))


def test_a_spare_that_is_lost_disturbs_nobody():
    play = Play(spares=1)
    play.start()
    effects = play.do("lost", 2, "gone")
    assert Launch(2) in effects
    assert not play.sent(Stop)
    assert play.coordinator.state is State.RUNNING
    assert play.events("action")[0]["name"] == "restart_agent"
    assert not play.coordinator.incidents.faults  # it costs nothing of the restart budget


def test_a_fault_after_one_that_stopped_no_rank_has_an_id_of_its_own():
    play = Play(spares=1)
    play.start()
    play.do("lost", 2, "gone")
    play.do("lost", 1, "gone")
    assert [fault["fault_id"] for fault in play.events("fault")] == ["g5-1", "g5-2"]
    assert [(action["fault_id"], action["name"]) for action in play.events("action")] == [
        ("g5-1", "restart_agent"),
        ("g5-2", "replace_node"),
    ]


def test_a_spare_that_is_lost_while_a_stop_is_under_way_does_not_end_it():
    play = Play(spares=1)
    play.start()
    play.do("stop", "SIGTERM")
    play.do("lost", 2, "gone")
    assert play.coordinator.state is State.RUNNING


def test_the_run_ends_when_too_few_nodes_can_ever_be_had(play):
    play.do("lost", 1, "gone")
    play.again(0)
    for _ in range(LAUNCH_ATTEMPTS):
        play.do("lost", 1, "exit code 1")
    assert play.finish().code is Exit.UNUSABLE
    assert "the agent of node 1 does not start (exit code 1)" in play.finish().message


def test_a_silent_node_is_lost_sooner_while_a_spare_stands_by():
    play = Play(spares=1)
    play.start()
    play.wait(7, silent=[1])
    assert not play.events("fault")
    play.wait(2, silent=[1])
    assert play.events("fault")[0]["nodes"] == [1]
    assert play.events("action")[0]["reason"] == "node 1 is gone: spare node 2 takes over"
    play.again(0)  # and from here on there is no spare any more
    play.wait(9, silent=[2])
    assert len(play.events("fault")) == 1


@pytest.mark.parametrize(
    "late",
    [
        Ready(generation=0, store_port=5000, inventory=inventory(1, ())),
        Health(generation=0, took_s=0.1, findings=(FULL,)),
    ],
)
def test_an_agent_that_is_heard_after_it_was_lost_does_not_count_for_the_next_one(late: Message):
    play = Play()
    play.start()
    play.resumed(0)
    play.do("lost", 1, "its connection was closed")
    play.again(0)
    play.hello(1)
    play.do("lost", 1, "silent for 9 s")
    play.deliver(1, late)
    play.wait(5.0, silent=[1])
    play.hello(1)
    play.effects.clear()
    assert not play.sent(Start, play.wait(1.0))
    play.ready(1)
    assert [send.node for send in play.sent(Start)] == [0, 1]


def flapping(play: Play, times: int, *, with_others: bool = False) -> None:
    """The last node is lost after a minute of steps and back ten seconds later, again and again."""
    last, step = len(play.coordinator.membership.members) - 1, 0
    for _ in range(times):
        for _ in range(3):
            step += 1
            play.wait(20.0)
            for node in play.coordinator.membership.members:
                play.beat(node, step)
        gone = (last - 1, last) if with_others else (last,)
        for node in gone:
            play.do("lost", node, "its connection was closed")
        for node in set(range(play.nodes)) - {*gone}:
            play.ready(node, 6000 + node)
        play.wait(10.0)
        for node in gone:
            play.join(node)
        play.resumed(0)


def test_a_node_that_is_lost_again_and_again_is_left_and_ends_no_job():
    play = Play(4, fewer=(3,), max_restarts_per_hour=2)
    play.start()
    play.resumed(0)
    flapping(play, 3)
    assert 3 not in play.coordinator.membership.members and play.coordinator.state is State.RUNNING
    play.wait(1.0)
    assert [send.node for send in play.sent(Shutdown)] == [3]
    play.do("lost", 3, "it has ended")
    replaced, left = play.events("action")[-2:]
    assert (replaced["name"], left["name"]) == ("replace_node", "evacuate")
    assert "lost 3 times within an hour: it is left" in replaced["reason"] and "lost 3 times within an hour" in left["reason"]
    play.exit(0)
    assert play.events("action")[-1]["name"] == "restart_workers"  # its losses use up no restarts of the others
    assert Launch(3) not in play.wait(4000.0)
    play.do("evacuate", {}, [3])
    assert Launch(3) in play.wait(1.0)


def test_nodes_that_are_lost_together_again_and_again_are_not_left():
    play = Play(4, fewer=(1, 2, 3))
    play.start()
    play.resumed(0)
    flapping(play, 4, with_others=True)
    assert play.coordinator.membership.members == (0, 1, 2, 3)
