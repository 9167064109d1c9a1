"""Nodes that were left: how long they are kept for what they hold, and when they take part again."""

from control_play import candidates, shard
from evacuations import boundary, evacuate, left, names, running

from resilient.control.evacuation import KEPT_S
from resilient.exits import Exit
from resilient.protocol.messages import Health, HealthFinding, Propose, Shutdown, Start


def test_a_node_is_kept_while_nothing_as_new_is_whole_without_it():
    play = running(spares=1)
    left(play)
    play.resumed(12, "ram")
    play.wait(5)
    assert not play.sent(Shutdown)
    play.exit(0)
    play.effects.clear()
    play.again(0, shards={0: [shard(12, 0)]})
    play.again(2)
    assert (12, "ram") in candidates(play.sent(Start)[0].message)
    play.resumed(12, "ram")
    play.held(0, 13)
    play.wait(1)
    assert not play.sent(Shutdown)
    play.held(2, 13)
    play.wait(1)
    assert [send.node for send in play.sent(Shutdown)] == [1]


def test_a_node_whose_shards_others_hold_too_or_that_are_durable_is_released_as_soon_as_all_go_on():
    play = running(spares=1)
    evacuate(play, 1)
    play.wait(1)
    boundary(play)
    play.again(0, 1, shards={0: [shard(12, 0), shard(12, 1, replica=True)], 1: [shard(12, 1), shard(12, 0, replica=True)]})
    play.resumed(12, "ram")
    play.wait(1)
    assert [send.node for send in play.sent(Shutdown)] == [1]
    play = running(spares=1)
    for node in (0, 1):
        play.held(node, 12, wants=["scratch"])
    ((_, request), *_) = play.jobs("flush")
    play.flushed(request)
    play.committed(request)
    left(play)
    play.resumed(12, "ram")
    play.wait(1)
    assert [send.node for send in play.sent(Shutdown)] == [1]


def test_of_two_nodes_that_hold_the_same_shard_one_is_kept():
    play = running(nodes=3, fewer=(1,))
    evacuate(play, 1, 2)
    play.wait(1)
    boundary(play)
    both = [shard(12, number, of=3, replica=number == 2) for number in (1, 2)]
    play.again(0, 1, 2, shards={0: [shard(12, 0, of=3)], 1: both, 2: [shard(12, number, of=3) for number in (1, 2)]})
    play.resumed(12, "ram")
    play.wait(5)
    assert [send.node for send in play.sent(Shutdown)] == [1]
    play.do("lost", 1, "it has ended")
    play.wait(5)
    assert [send.node for send in play.sent(Shutdown)] == [1]
    play.held(0, 13)
    play.wait(1)
    assert [send.node for send in play.sent(Shutdown)] == [1, 2]


def test_a_node_that_is_kept_for_long_is_told_once():
    play = running(spares=1)
    left(play)
    play.resumed(12, "ram")
    play.wait(KEPT_S)
    assert names(play) == ["evacuate"]
    play.wait(2 * KEPT_S)
    assert names(play) == ["evacuate", "evacuation_waits"] and not play.sent(Shutdown)
    reason = play.events("action")[-1]["reason"]
    assert reason == "node 1 was left, and its agent does not end yet: what it holds of step 12 is not durable and nowhere else"


def test_a_node_that_is_kept_and_heard_of_anew_tells_what_it_holds_before_it_is_released():
    play = running(spares=1)
    left(play)
    play.resumed(12, "ram")
    play.do("lost", 1, "its connection was closed")
    play.wait(1)
    play.hello(1)
    play.wait(5)
    assert not play.sent(Shutdown)
    play.ready(1, 6001, [shard(12, 1)])
    play.wait(5)
    assert not play.sent(Shutdown)
    for node in (0, 2):
        play.held(node, 13)
    play.wait(1)
    assert [send.node for send in play.sent(Shutdown)] == [1]


def test_a_node_that_was_left_takes_part_again_where_its_stand_in_dies_before_it_is_released():
    play = running(spares=1)
    left(play)
    play.effects.clear()
    play.do("lost", 2, "its host has gone down")
    play.again(0, shards={0: [shard(12, 0)]})
    play.wait(2)
    starts = play.sent(Start)
    assert [(send.node, send.message.node_rank) for send in starts] == [(0, 0), (1, 1)]
    assert (12, "ram") in candidates(starts[0].message)
    assert names(play) == ["replace_node", "evacuation_waits"]
    play.resumed(12, "ram")
    play.wait(300)
    assert names(play).count("evacuation_waits") == 1 and not play.sent(Shutdown)
    play.join(2)
    play.wait(1)
    assert {send.node for send in play.sent(Propose)} == {0, 1}
    boundary(play, 20)
    play.again(0, 1)
    assert [send.node for send in play.sent(Start)[2:]] == [0, 2]
    assert names(play)[-1] == "evacuate"


def test_a_node_that_has_not_ended_its_workers_yet_takes_part_again_as_well():
    play = running(spares=1)
    evacuate(play, 1)
    play.wait(1)
    boundary(play)
    play.effects.clear()
    play.do("lost", 2, "its host has gone down")
    play.again(0)
    for _ in range(3):
        play.do("lost", 2, "it does not start")
    play.wait(1)
    assert not play.sent(Start) and not play.coordinator.draining
    play.again(1)
    play.wait(1)
    assert [send.node for send in play.sent(Start)] == [0, 1]


def test_of_the_nodes_that_were_left_only_as_many_take_part_again_as_are_needed_and_those_that_are_ill_last():
    play = running(nodes=3, spares=2)
    finding = HealthFinding(check="GPU 0000:3b:00", verdict="warn", text="Xid 95; reset the GPU", device=0)
    play.deliver(0, Health(generation=play.generation, took_s=0.0, findings=(finding,)))
    evacuate(play, 1)
    play.wait(1)
    boundary(play)
    play.again(0, 1, 2)
    assert [send.node for send in play.sent(Start)] == [3, 4, 2]
    play.effects.clear()
    play.do("lost", 4, "its host has gone down")
    play.again(2, 3)
    play.wait(2)
    assert [send.node for send in play.sent(Start)] == [3, 1, 2]


def test_a_node_that_has_failed_its_check_since_it_was_left_does_not_take_part_again():
    play = running(spares=1)
    evacuate(play, 1)
    play.wait(1)
    boundary(play)
    failed = HealthFinding(check="GPU 0000:3b:00", verdict="fail", text="Xid 95; reset the GPU")
    play.deliver(1, Health(generation=play.generation, took_s=0.1, findings=(failed,)))
    play.again(0, 1)
    play.effects.clear()
    play.do("lost", 2, "its host has gone down")
    play.again(0)
    play.wait(125)
    assert not play.sent(Start) and "evacuation_waits" not in names(play)
    assert play.finish().code is Exit.UNUSABLE and "Xid 95" in play.finish().message


def test_a_node_that_was_told_to_end_does_not_take_part_again():
    play = running(spares=1)
    left(play)
    play.resumed(12, "ram")
    for node in (0, 2):
        play.held(node, 13)
    play.wait(1)
    assert [send.node for send in play.sent(Shutdown)] == [1]
    play.effects.clear()
    play.do("lost", 2, "its host has gone down")
    play.again(0)
    play.wait(2)
    assert not play.sent(Start)
