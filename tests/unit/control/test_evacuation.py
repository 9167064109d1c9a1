"""Nodes that are left before they go."""

import pytest
from control_play import Play, beat, candidates, shard
from evacuations import boundary, evacuate, left, names, running

from resilient.control.evacuation import UNSEEN_S
from resilient.exits import Exit
from resilient.outbox import Launch
from resilient.protocol.messages import Health, HealthFinding, Propose, Proposed, Record, Shutdown, Start, Stop
from resilient.recovery.faults import Raised
from resilient.recovery.without_spare import Measured


def ill(play: Play, node: int, device: int = 0) -> None:
    """The driver of a node's GPUs reports a fault of one of them, and its rank goes on."""
    finding = HealthFinding(check="GPU 0000:3b:00", verdict="warn", text="Xid 95; reset the GPU", device=device)
    play.deliver(node, Health(generation=play.generation, took_s=0.0, findings=(finding,)))


def test_a_spare_takes_over_from_the_snapshot_of_the_very_step_and_the_node_is_released():
    play = running(spares=1)
    evacuate(play, 1)
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
    for node in (0, 2):
        play.held(node, 13)
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
    play.held(0, 13)
    play.wait(1)
    play.do("lost", 1, "it has ended")
    assert Launch(1) not in play.wait(300)
    evacuate(play)
    assert Launch(1) in play.wait(1)
    play.join(1)
    play.held(0, 14)
    play.again(0, shards={0: [shard(14, 0, of=1, generation=play.generation)]})
    assert play.sent(Start)[-1].message.nodes == 2
    assert names(play) == ["evacuate", "resume", "grow"] and not play.events("fault")


def test_with_nowhere_to_go_it_is_told_once_and_the_node_is_left_when_a_spare_is_there():
    play = running(spares=1)
    play.do("lost", 2, "gone")
    evacuate(play, 1)
    play.wait(30)
    assert names(play).count("evacuation_waits") == 1 and not play.sent(Propose)
    play.join(2)
    play.wait(1)
    assert [send.node for send in play.sent(Propose)] == [0, 1]


def test_of_two_nodes_only_as_many_are_left_as_the_others_can_do_without():
    play = running(nodes=3, fewer=(2,))
    evacuate(play, 0, 1)
    play.wait(1)
    assert "node 1 is to be left" in play.events("action")[-1]["reason"]
    boundary(play)
    play.again(0, 1, 2)
    assert [send.node for send in play.sent(Start)] == [1, 2]


def test_a_spare_is_released_without_disturbing_anybody():
    play = running(spares=1)
    evacuate(play, 2)
    play.wait(1)
    assert [send.node for send in play.sent(Shutdown)] == [2] and not play.sent(Propose)


def test_a_stop_while_the_ranks_stop_for_an_evacuation_ends_the_job_at_that_step():
    play = running(spares=1)
    evacuate(play, 1)
    play.wait(1)
    play.do("stop", "SIGTERM")
    boundary(play)
    assert len(play.sent(Propose)) == 2
    assert play.finish().code is Exit.STOPPED


def test_a_worker_that_fails_while_the_ranks_stop_does_not_keep_the_node():
    play = running(spares=1)
    evacuate(play, 1)
    play.wait(1)
    play.exit(0)
    play.again(0, 1)
    assert [send.node for send in play.sent(Start)] == [0, 2]


def test_ranks_that_do_not_stop_are_ended_where_they_are():
    play = running(spares=1)
    evacuate(play, 1)
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
    evacuate(play, 1)
    play.wait(1)
    assert not play.sent(Propose) and not names(play)


def test_a_node_with_a_gpu_that_needs_a_reset_is_left_at_a_step_boundary_although_its_ranks_go_on():
    play = running(spares=1)
    ill(play, 1)
    ill(play, 1)
    play.wait(1)
    assert [send.node for send in play.sent(Propose)] == [0, 1] and not play.sent(Stop)
    (fault,) = play.events("fault")
    assert (fault["nodes"], "Xid 95" in fault["detail"]) == ([1], True)
    boundary(play)
    failed = HealthFinding(check="GPU 0000:3b:00", verdict="fail", text="Xid 95; reset the GPU")
    play.deliver(1, Health(generation=play.generation, took_s=0.1, findings=(failed,)))  # before it is ready it checks itself
    play.again(0, 1)
    assert [(send.node, send.message.node_rank) for send in play.sent(Start)] == [(0, 0), (2, 1)]
    assert names(play) == ["exclude_node", "evacuate"] and len(play.events("fault")) == 1
    assert "Xid 95" in play.events("action")[-1]["reason"]


def test_what_a_person_asks_for_takes_no_node_back_that_is_ill_until_it_is_resumed():
    play = running(fewer=(1,))
    ill(play, 1)
    play.wait(1)
    boundary(play)
    play.again(0, 1)
    play.resumed(12, "ram")
    play.wait(1)
    play.do("lost", 1, "it has ended")
    evacuate(play)
    assert Launch(1) not in play.wait(300)
    evacuate(play, resumed=[1])
    assert Launch(1) in play.wait(1)
    assert names(play) == ["exclude_node", "evacuate", "resume"]


def test_a_finding_that_names_no_device_of_the_job_moves_nobody():
    play = running(spares=1)
    finding = HealthFinding(check="GPU 0000:99:00", verdict="warn", text="Xid 95; reset the GPU")
    play.deliver(1, Health(generation=play.generation, took_s=0.0, findings=(finding,)))
    play.wait(5)
    assert not play.sent(Propose) and not names(play)


WORLDS = {ranks: {"dp": ranks} for ranks in range(1, 5)}


def partly(**settings: object) -> Play:
    """Two nodes of two ranks, which go on with one as well."""
    return running(procs_per_node=2, layouts=WORLDS, min_procs_per_node=1, **settings)


def test_a_device_that_needs_a_reset_is_left_out_at_a_step_boundary_and_its_node_goes_on_with_the_others():
    play = partly()
    ill(play, 1, device=0)
    play.wait(1)
    assert [send.node for send in play.sent(Propose)] == [0, 1] and not play.sent(Stop)
    for node in (0, 1):
        play.deliver(node, Proposed(generation=play.generation, checked=11))
    for rank in range(4):
        play.exit(rank, 0, stopped=True, step=12)
    failed = HealthFinding(check="GPU 0000:3b:00", verdict="fail", text="Xid 95; reset the GPU", device=0)
    play.deliver(1, Health(generation=play.generation, took_s=0.1, findings=(failed,)))  # before it is ready it checks itself
    play.again(0, 1)
    first, second = (send.message for send in play.sent(Start))
    assert (first.world_size, first.first_rank, first.devices) == (3, 0, (0, 1))
    assert (second.world_size, second.first_rank, second.devices) == (3, 2, (1,))
    play.resumed(12, "ram")
    assert names(play) == ["leave_out"] and not play.events("fault")
    started = play.events("generation_started")[-1]
    assert (started["left_out"], started["ranks"]) == ({"1": [0]}, [2, 1])
    play.wait(30)
    assert len(play.sent(Propose)) == 2  # once
    play.report(1, heartbeats={2: beat(13, play.now)})  # its rank has moved up


def test_a_rank_whose_device_has_failed_leaves_the_others_of_its_node_and_one_that_fails_otherwise_does_not():
    play = partly()
    play.exit(2, 1, raised=Raised("AcceleratorError", "CUDA error: uncorrectable ECC error encountered", "Traceback", 1.0))
    play.again(0, 1)
    assert [send.message.devices for send in play.sent(Start)] == [(0, 1), (1,)]
    assert names(play) == ["restart_workers", "leave_out"]
    play = partly()
    play.exit(2, 1, raised=Raised("ValueError", "boom", "Traceback", 1.0))
    play.again(0, 1)
    assert [send.message.devices for send in play.sent(Start)] == [(0, 1), (0, 1)]


def test_a_node_with_too_few_devices_left_takes_no_part():
    play = running(procs_per_node=2, layouts={2: {"dp": 2}, 4: {"dp": 4}})
    failed = HealthFinding(check="GPU 0000:3b:00", verdict="fail", text="Xid 95; reset the GPU", device=0)
    play.exit(2, 1)
    play.deliver(1, Health(generation=play.generation, took_s=0.1, findings=(failed,)))
    play.again(0, 1)
    assert [(send.node, send.message.world_size) for send in play.sent(Start)] == [(0, 2)]


def test_a_script_of_which_no_step_is_seen_is_left_as_well_and_ended_where_it_is():
    play = Play(spares=1, script=True)
    play.start()
    play.effects.clear()
    evacuate(play, 1)
    play.wait(UNSEEN_S - 1.0)
    assert not play.sent(Propose)
    play.wait(2.0)
    assert [send.node for send in play.sent(Propose)] == [0, 1]
    play.wait(play.job.drain_s + 1.0)
    assert [send.node for send in play.sent(Stop)] == [0, 1]
    assert names(play) == ["evacuate"]
    play.again(0, 1)
    assert [send.node for send in play.sent(Start)] == [0, 2]
    play.wait(UNSEEN_S + 1.0)
    assert [send.node for send in play.sent(Shutdown)] == [1]


def test_a_node_that_is_to_go_is_kept_where_another_one_is_lost_before_it_is_left():
    play = running(spares=1)
    evacuate(play, 1)
    play.do("lost", 0, "its connection was closed")
    play.again(1, 2)
    play.wait(200.0)
    assert play.coordinator.membership.members == (2, 1)
    assert "evacuate" not in names(play)
    play.effects.clear()
    play.report(2, records=(Record(0, 1.0, "resumed", {"step": 12}),))
    play.join(0)
    play.wait(1.0)
    assert {send.node for send in play.sent(Propose)} == {1, 2}


@pytest.mark.parametrize("without_spare", ["shrink", "wait", "auto", "next_job"])
def test_a_node_that_dies_before_it_could_be_left_is_not_waited_for(without_spare: str):
    measured = Measured(returns_s=(900.0,), restarts_s=(1000.0,))
    for moment in ("stopping", "ended"):
        play = running(nodes=3, fewer=(1, 2), without_spare=without_spare, measured=measured)
        evacuate(play, 2)
        play.wait(1)
        if moment == "ended":
            boundary(play)
        play.effects.clear()
        play.do("lost", 2, "its host has gone down")
        play.again(0, 1)
        assert [send.node for send in play.sent(Start)] == [0, 1]
        reasons = [action["reason"] for action in play.events("action") if action["name"] == "replace_node"]
        assert all("it was to be left, and the others go on without it" in reason for reason in reasons)
        assert Launch(2) not in play.wait(300)


def test_an_agent_that_was_starting_when_its_node_was_left_takes_no_part_and_ends():
    play = running(spares=1)
    assert Launch(2) in play.do("lost", 2, "its process ended")
    evacuate(play, 2)
    play.wait(2)
    play.join(2)
    play.wait(2)
    assert [send.node for send in play.sent(Shutdown)] == [2]
    play.effects.clear()
    play.do("lost", 0, "its process ended")
    play.again(1)
    play.wait(play.job.rejoin_s + 1.0)
    assert not play.sent(Start)  # nobody stands in
    play.do("lost", 2, "it has ended")
    play.join(0)
    assert play.coordinator.membership.members == (0, 1)
    assert Launch(2) not in play.wait(300)


def test_an_agent_of_a_node_that_is_left_lives_until_all_go_on_for_what_it_holds():
    play = running(fewer=(1,))
    evacuate(play, 1)
    play.wait(1)
    boundary(play)
    play.do("lost", 1, "its connection was closed")
    play.again(0, shards={0: [shard(12, 0)]})
    play.hello(1)
    play.wait(5)
    assert not play.sent(Shutdown)
    play.ready(1, 6001, [shard(12, 1)])
    play.resumed(12, "ram")
    play.wait(1)
    assert [send.node for send in play.sent(Shutdown)] == [1]


def test_a_node_that_is_taken_back_while_its_agent_starts_is_not_ended():
    play = running(spares=1)
    play.do("lost", 2, "its process ended")
    evacuate(play, 2)
    play.now += 0.1
    play.do("tick")
    evacuate(play)
    play.join(2)
    play.wait(2)
    assert not play.sent(Shutdown)
    assert play.coordinator.membership.spare() == 2
