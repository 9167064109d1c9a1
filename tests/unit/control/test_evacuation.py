"""Nodes that are left before they go."""

from control_play import Play, candidates, shard

from resilient.exits import Exit
from resilient.outbox import Launch
from resilient.protocol.messages import Arm, Propose, Proposed, Shutdown, Start, Stop


def running(**settings: object) -> Play:
    play = Play(**settings)
    play.start()
    play.resumed(0)
    play.effects.clear()
    return play


def names(play: Play) -> list[str]:
    return [action["name"] for action in play.events("action")]


def boundary(play: Play, step: int = 12) -> None:
    """The ranks of the members stop at one boundary, and end."""
    members = play.coordinator.membership.members
    for node in members:
        play.deliver(node, Proposed(generation=play.generation, checked=step - 1))
    assert {send.message.target for send in play.sent(Arm)} == {step}
    for rank in range(len(members)):
        play.exit(rank, 0, stopped=True, step=step)


def left(play: Play) -> None:
    """Node 1 is left: a snapshot of the boundary is held by the members."""
    play.do("evacuate", {1})
    play.wait(1)
    boundary(play)
    play.again(0, 1, shards={node: [shard(12, node, generation=play.generation)] for node in (0, 1)})


def test_a_spare_takes_over_from_the_snapshot_of_the_very_step_and_the_node_is_released():
    play = running(spares=1)
    play.do("evacuate", {1})
    play.wait(1)
    assert [send.node for send in play.sent(Propose)] == [0, 1] and not play.sent(Stop)
    boundary(play)
    assert [send.node for send in play.sent(Stop)] == [0, 1]
    play.again(0, shards={0: [shard(12, 0)]})
    assert not play.sent(Start)  # what the node holds is not known yet
    play.again(1, shards={1: [shard(12, 1)]})
    starts = play.sent(Start)
    assert [(send.node, send.message.node_rank) for send in starts] == [(0, 0), (2, 1)]
    assert (12, "ram") in candidates(starts[0].message)
    play.wait(5)
    assert not play.sent(Shutdown)  # it may still be read
    play.resumed(12, "ram")
    play.wait(1)
    (release,) = play.sent(Shutdown)
    assert (release.node, release.message.clear) == (1, ("ram",))
    effects = [*play.do("lost", 1, "it has ended"), *play.wait(300)]
    assert Launch(1) not in effects
    assert names(play) == ["evacuate"] and not play.events("fault")


def test_without_a_spare_the_others_go_on_at_once_and_take_it_in_when_it_is_resumed():
    play = running(fewer=(1,))
    left(play)
    (start,) = play.sent(Start)
    assert (start.node, start.message.nodes) == (0, 1)
    play.resumed(12, "ram")
    play.wait(1)
    play.do("lost", 1, "it has ended")
    assert Launch(1) not in play.wait(300)
    play.do("evacuate", ())
    assert Launch(1) in play.wait(1)
    play.join(1)
    play.held(0, 13)
    play.again(0, shards={0: [shard(13, 0, of=1, generation=play.generation)]})
    assert play.sent(Start)[-1].message.nodes == 2
    assert names(play) == ["evacuate", "resume", "grow"] and not play.events("fault")


def test_with_nowhere_to_go_it_is_told_once_and_the_node_is_left_when_a_spare_is_there():
    play = running(spares=1)
    play.do("lost", 2, "gone")
    play.do("evacuate", {1})
    play.wait(30)
    assert names(play).count("evacuation_waits") == 1 and not play.sent(Propose)
    play.join(2)
    play.wait(1)
    assert [send.node for send in play.sent(Propose)] == [0, 1]


def test_of_two_nodes_only_as_many_are_left_as_the_others_can_do_without():
    play = running(nodes=3, fewer=(2,))
    play.do("evacuate", {0, 1})
    play.wait(1)
    assert "node 1 is to be left" in play.events("action")[-1]["reason"]
    boundary(play)
    play.again(0, 1, 2)
    assert [send.node for send in play.sent(Start)] == [1, 2]


def test_a_spare_is_released_without_disturbing_anybody():
    play = running(spares=1)
    play.do("evacuate", {2})
    play.wait(1)
    assert [send.node for send in play.sent(Shutdown)] == [2] and not play.sent(Propose)


def test_a_stop_while_the_ranks_stop_for_an_evacuation_ends_the_job_at_that_step():
    play = running(spares=1)
    play.do("evacuate", {1})
    play.wait(1)
    play.do("stop", "SIGTERM")
    boundary(play)
    assert len(play.sent(Propose)) == 2
    assert play.finish().code is Exit.STOPPED


def test_a_worker_that_fails_while_the_ranks_stop_does_not_keep_the_node():
    play = running(spares=1)
    play.do("evacuate", {1})
    play.wait(1)
    play.exit(0)
    play.again(0, 1)
    assert [send.node for send in play.sent(Start)] == [0, 2]


def test_ranks_that_do_not_stop_are_ended_where_they_are():
    play = running(spares=1)
    play.do("evacuate", {1})
    play.wait(play.job.drain_s - 1)
    assert not play.sent(Stop)
    play.wait(3)
    assert [send.node for send in play.sent(Stop)] == [0, 1]
    play.again(0, 1)
    assert [send.node for send in play.sent(Start)] == [0, 2]


def test_a_job_that_stops_anyway_leaves_no_node_first():
    play = running(spares=1)
    play.do("stop", "SIGTERM")
    play.effects.clear()
    play.do("evacuate", {1})
    play.wait(1)
    assert not play.sent(Propose) and not names(play)
