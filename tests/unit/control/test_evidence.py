"""What proves that a silent node is gone, when that is asked, and what follows from the answer."""

import math
from collections.abc import Sequence

import pytest
from control_play import Play

from resilient.control.evidence import AGAIN_S, ANSWER_S, AT_ONCE, EAGER_S, LATER_S, REFUSED_S, SILENT_S, Evidence, proof
from resilient.outbox import InquireAbout, Launch

# states of Slurm, what became of a connection, seconds of silence, whether it is gone
TABLE = [
    ((), "unknown", 20.0, False),  # nobody knows anything: its link may be down
    ((), "unreachable", 34.0, False),  # which no connection can get through either
    (("ALLOCATED",), "unreachable", 20.0, False),
    (("ALLOCATED", "NOT_RESPONDING"), "unreachable", 20.0, False),  # nor does it get through to Slurm
    (("IDLE", "NOT_RESPONDING"), "unknown", 20.0, False),
    (("ALLOCATED", "DRAIN"), "unreachable", 20.0, False),  # it is to go, and is not gone
    (("ALLOCATED",), "open", 34.0, False),  # its agent is stopped, or what it has sent is sent again later
    (("MIXED", "REBOOT_REQUESTED"), "unreachable", 20.0, False),
    (("DOWN",), "unknown", SILENT_S, True),
    (("DOWN", "NOT_RESPONDING"), "unreachable", 5.0, True),
    (("DOWN", "DRAIN"), "open", 5.0, True),  # nothing of the job runs there any more
    (("DOWN",), "open", SILENT_S - 0.1, False),  # it was heard of since
    (("IDLE", "POWERED_DOWN"), "unknown", 5.0, True),
    (("IDLE", "POWERING_DOWN"), "unknown", 5.0, True),
    (("DOWN", "REBOOT_ISSUED"), "unreachable", 5.0, True),
    ((), "refused", REFUSED_S, True),  # it has booted again
    (("ALLOCATED",), "refused", 10.0, True),
    (("ALLOCATED",), "refused", REFUSED_S - 0.1, False),  # the daemon that follows is not there yet
    ((), "refused", 0.0, False),
    (("DOWN",), "unknown", math.inf, True),  # it was lost already, and is waited for
    (("ALLOCATED",), "unknown", math.inf, False),
]


@pytest.mark.parametrize(("states", "door", "silent_s", "gone"), TABLE)
def test_what_proves_that_a_node_is_gone(states, door, silent_s, gone):
    assert (proof(Evidence(1, frozenset(states), door), silent_s) is not None) == gone


def shrinking() -> Play:
    """Three nodes, of which two would do; no spare."""
    play = Play(3, fewer=(2,))
    play.start()
    play.resumed(0)
    return play


def asked(play: Play) -> list[tuple[int, ...]]:
    return [each.nodes for each in play.effects if isinstance(each, InquireAbout)]


def answered(play: Play, *states: str, node: int = 2) -> None:
    play.do("inquired", [Evidence(node, frozenset(states))])


def test_nobody_is_asked_about_while_all_are_heard_of():
    play = shrinking()
    play.wait(30.0)
    assert not asked(play)


def test_a_silent_node_is_asked_about_at_once_and_then_every_few_seconds():
    play = shrinking()
    play.wait(SILENT_S + 1.0, silent=[2])
    (first,) = (each for each in play.effects if isinstance(each, InquireAbout))
    assert first == InquireAbout((2,), ("10.0.0.2:9",))
    play.wait(5.0, silent=[2])
    assert len(asked(play)) == 1, "asked again before the answer"
    answered(play, "ALLOCATED")
    play.wait(AGAIN_S + 0.5, silent=[2])
    assert len(asked(play)) == 2
    play.wait(ANSWER_S + 0.5, silent=[2])
    assert len(asked(play)) == 3, "an answer that never comes ends the questions"


def questions(play: Play, seconds: int, silent: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """About whom is asked meanwhile, where Slurm answers at once that nothing is wrong."""
    before = len(asked(play))
    for _ in range(4 * seconds):
        count = len(asked(play))
        play.wait(0.25, silent=silent)
        if len(asked(play)) > count:
            answered(play, "ALLOCATED")
    return asked(play)[before:]


def test_a_node_that_is_silent_for_long_is_asked_about_more_seldom_and_another_one_often_again():
    play = shrinking()
    assert len(questions(play, int(SILENT_S + EAGER_S), silent=[2])) > EAGER_S / (2 * AGAIN_S)
    assert len(questions(play, int(2 * LATER_S), silent=[2])) in (2, 3)
    both = questions(play, int(SILENT_S + LATER_S), silent=[1, 2])
    assert both.count((1, 2)) > 3, "of the other one nobody knows yet"


def test_a_question_is_about_no_more_nodes_than_can_be_asked_about():
    play = Play(AT_ONCE + 10)
    play.start()
    play.wait(SILENT_S + 1.0, silent=range(1, AT_ONCE + 10))
    assert [len(nodes) for nodes in asked(play)] == [AT_ONCE]


def test_a_node_that_slurm_calls_down_is_lost_and_not_waited_for():
    play = shrinking()
    play.wait(SILENT_S + 1.0, silent=[2])
    answered(play, "DOWN", "NOT_RESPONDING")
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["nodes"], fault["evidence"]) == ("node_lost", [2], "silent for 4 s, and Slurm calls it DOWN")
    assert any(effect == Launch(2) for effect in play.effects), "it is to come back one day"
    generation = play.generation
    play.again(0, 1)
    play.wait(0.5)
    assert play.generation == generation + 1 and play.coordinator.membership.members == (0, 1)
    assert [action["name"] for action in play.events("action")] == ["replace_node", "shrink"]


def lost_and_asked_about() -> tuple[Play, int]:
    """Node 2 is waited for, and Slurm is asked what it knows. The generation is that in which it was lost."""
    play = shrinking()
    play.do("lost", 2, "its connection broke")
    generation = play.generation
    play.again(0, 1)
    play.wait(6.0)
    assert asked(play)[0] == (2,) and play.generation == generation
    return play, generation


def test_a_node_that_was_lost_already_is_waited_for_until_slurm_calls_it_down():
    play, generation = lost_and_asked_about()
    answered(play, "ALLOCATED", "NOT_RESPONDING")
    play.wait(1.0)
    assert play.generation == generation
    answered(play, "DOWN")
    assert play.generation == generation + 1 and play.coordinator.membership.members == (0, 1)


def goes_on_without(play: Play, generation: int) -> None:
    """The next generation is of nodes 0 and 1, and no agent of node 2 is started any more."""
    (told,) = [each["reason"] for each in play.events("action") if each["name"] == "departed"]
    assert told.startswith("node 2 has left the job")
    play.wait(1.0)
    assert play.generation == generation + 1 and play.coordinator.membership.members == (0, 1)
    (shrunk,) = [each["reason"] for each in play.events("action") if each["name"] == "shrink"]
    assert shrunk == "no spare stands in for node 2: 2 nodes go on, with the same global batch"
    play.effects.clear()
    play.wait(130.0)
    assert Launch(2) not in play.effects


def test_a_node_that_slurm_has_taken_out_of_the_job_is_neither_waited_for_nor_started_again():
    play, generation = lost_and_asked_about()
    play.do("inquired", [Evidence(2, departed=True)])
    goes_on_without(play, generation)


def test_a_node_whose_agent_still_lives_when_slurm_takes_it_is_lost_at_once():
    play = shrinking()
    generation = play.generation
    play.do("departed", [2])
    play.do("departed", [2])
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["nodes"], fault["evidence"]) == ("node_lost", [2], "Slurm has taken it out of the job")
    play.again(0, 1)
    play.do("lost", 2, "its connection broke")
    goes_on_without(play, generation)


def test_where_the_others_cannot_go_on_the_end_says_that_the_node_has_left_the_job():
    play = Play(2)
    play.start()
    play.resumed(0)
    play.do("departed", [1])
    play.again(0)
    play.wait(1.0)
    assert "node 1 has left the job" in play.finish().message


@pytest.mark.parametrize("seconds", [5.0, 10.0, 20.0])
def test_a_link_that_flaps_loses_no_node(seconds):
    play = shrinking()
    for _ in range(int(seconds)):
        before = len(asked(play))
        play.wait(1.0, silent=[2])
        if len(asked(play)) > before:
            play.do("inquired", [Evidence(2, frozenset({"ALLOCATED", "NOT_RESPONDING"}), "unreachable")])
    play.beat(2, 1)
    play.wait(5.0)
    assert not play.events("fault") and asked(play)


def test_an_answer_that_is_late_loses_no_node_that_is_heard_of_again():
    play = shrinking()
    play.wait(SILENT_S + 1.0, silent=[2])
    play.beat(2, 1)
    answered(play, "DOWN")
    assert not play.events("fault")


def test_a_node_that_has_come_back_is_not_given_up_for_an_answer_about_the_one_before():
    play = shrinking()
    play.do("lost", 2, "its connection broke")
    play.again(0, 1)
    play.join(2)
    answered(play, "DOWN")
    play.wait(1.0)
    assert play.coordinator.membership.members == (0, 1, 2)
