"""A node is gone and no spare is there: what is decided is done, and told with its figures."""

import pytest
from control_play import Play, beat

from resilient.control.coordinator import State
from resilient.control.evidence import Evidence
from resilient.control.stragglers import Rules
from resilient.exits import Exit
from resilient.protocol.messages import Start
from resilient.recovery.without_spare import Measured


def lost(*ends_s: float | None, **settings) -> Play:
    """Of three nodes, of which two would do, one is gone. Args: ends_s: what is told of the job's end, seconds from now."""
    play = Play(3, fewer=(2,), **settings)
    play.start()
    for end_s in ends_s:
        play.do("limit_is", None if end_s is None else play.now + end_s)
    play.resumed(0)
    play.beat(0, 1)
    play.do("lost", 2, "its connection broke")
    play.again(0, 1)
    return play


def test_fewer_go_on_once_it_was_waited_for_a_while():
    play = lost(without_spare="auto")
    play.wait(play.job.rejoin_s + 1.0)
    assert play.coordinator.membership.members == (0, 1)
    first, second = play.events("action")
    assert (first["name"], second["name"]) == ("replace_node", "shrink")
    assert "2 nodes go on: estimated loss of training " in first["reason"]


def test_a_node_is_waited_for_whatever_slurm_says_and_however_often_it_does_not_start():
    play = lost(without_spare="wait")
    generation = play.generation
    for _ in range(5):
        play.do("lost", 2, "it could not be started")
        play.do("inquired", [Evidence(2, frozenset({"DOWN"}))])
        play.wait(60.0)
    assert play.generation == generation and "resilience.without_spare: wait" in play.events("action")[0]["reason"]
    play.join(2)
    assert play.generation == generation + 1 and play.coordinator.membership.members == (0, 1, 2)


def test_a_wait_that_was_chosen_is_given_up_once_it_has_taken_longer_than_ever():
    play = lost(without_spare="auto", measured=Measured(returns_s=(40.0,), restarts_s=(200.0,)))
    generation = play.generation
    assert "it is waited for: estimated loss of training" in play.events("action")[0]["reason"]
    play.wait(50.0)
    assert play.generation == generation
    play.wait(15.0)
    assert play.generation == generation + 1 and play.coordinator.membership.members == (0, 1)


def test_the_next_job_goes_on_with_what_is_held():
    play = lost(without_spare="next_job")
    play.wait(30.0)
    finish = play.finish()
    assert finish.code is Exit.STOPPED and "node 2 is gone: the next job goes on" in finish.message


def test_what_comes_back_at_once_says_nothing_of_a_host_that_is_gone():
    play = lost(without_spare="auto", measured=Measured(returns_s=(3.0, 3.0, 3.0), restarts_s=(200.0,)))
    assert "never seen to come back" in play.events("action")[0]["reason"]


@pytest.mark.parametrize("without_spare", ["shrink", "wait", "auto", "next_job"])
def test_a_slow_node_that_stands_by_takes_over(without_spare):
    settings = {"spares": 1, "fewer": (1,), "stragglers": Rules(1.5, 20), "replace_stragglers": True}
    play = Play(without_spare=without_spare, measured=Measured(returns_s=(900.0,), restarts_s=(1000.0,)), **settings)
    play.start()
    play.resumed(0)
    slow = beats(play, slow=0)
    play.again(*slow)
    assert play.coordinator.membership.members == (2, 1)
    play.resumed(100)
    play.effects.clear()
    play.do("lost", 1, "its host has gone down")
    (action,) = play.events("action")
    assert action["reason"] == "node 1 is gone: node 0, which was slow, takes over"
    play.again(2)
    assert [(send.node, send.message.node_rank) for send in play.sent(Start)] == [(2, 0), (0, 1)]


def beats(play: Play, slow: int) -> tuple[int, ...]:
    """The rank of a node needs twice as long for its part of a step, until its node is replaced; the members before."""
    members = play.coordinator.membership.members
    for number in range(1, 7):
        play.wait(2.0)
        for rank in range(2):
            if play.coordinator.state is State.RUNNING:
                own_s = float(number) if rank == slow else number / 2
                play.report(rank, heartbeats={rank: beat(20 * number, play.now, own_s=own_s)})
    assert play.events("fault")[-1]["kind"] == "straggler"
    return members


def test_what_is_left_of_the_job_is_weighed_by_its_end_as_it_was_told_last():
    def why(*ends_s: float | None) -> str:
        reason: str = lost(*ends_s, without_spare="auto", end_t=1000.0 + 3600.0).events("action")[0]["reason"]
        return reason

    assert ", 3600 s left)" in why()
    assert ", 70000 s left)" in why(5.0, 70_000.0)
    assert " left)" not in why(5.0, None)
