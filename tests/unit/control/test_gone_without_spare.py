"""A node is gone and no spare is there: what is decided is done, and told with its figures."""

from control_play import Play

from resilient.control.evidence import Evidence
from resilient.exits import Exit
from resilient.recovery.without_spare import Measured


def lost(**settings) -> Play:
    """Of three nodes, of which two would do, one is gone."""
    play = Play(3, fewer=(2,), **settings)
    play.start()
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
