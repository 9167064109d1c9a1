"""Several nodes that are lost, or do not come back, while one generation has ended and the next one has not begun."""

from itertools import pairwise

import pytest
from control_play import Play
from hypothesis import given
from hypothesis import strategies as st

from resilient.control.coordinator import State
from resilient.control.membership import JOIN_S, LAUNCH_ATTEMPTS, LONGEST_PAUSE_S, Membership
from resilient.control.shares import Rules
from resilient.exits import Exit
from resilient.outbox import Effect, Launch
from resilient.protocol.messages import Start

XID = "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."


def trained(nodes: int, **settings: object) -> Play:
    """All have finished step 7."""
    play = Play(nodes, **settings)
    play.start()
    play.resumed(2)
    for node in range(nodes):
        play.beat(node, 7)
    return play


def names(play: Play) -> list[str]:
    return [action["name"] for action in play.events("action")]


def lost(play: Play, *nodes: int) -> None:
    for node in nodes:
        play.do("lost", node, "its connection was closed")


@pytest.mark.parametrize("settings", [{"spares": 8}, {"fewer": (8,)}])
def test_nodes_that_are_lost_together_have_ended_one_attempt(settings):
    play = trained(16, **settings)
    lost(play, *range(8))
    play.again(*range(8, 16 + settings.get("spares", 0)))
    play.wait(30.0)
    assert play.coordinator.state is State.RUNNING
    assert not set(range(8)) & set(play.coordinator.membership.members)
    assert "give_up" not in names(play)
    assert not [action for action in play.events("action") if "failures without progress" in action["reason"]]


def test_nodes_that_are_lost_one_after_the_other_without_a_step_between_them_use_the_budget_up():
    play = trained(4, spares=4, give_up_after_same_step=2)
    for node in (3, 4, 5, 6):
        assert "give_up" not in names(play)
        lost(play, node)
        play.again(0, 1, 2, *range(node + 1, 8))
        play.wait(30.0)
        play.resumed(7)
    assert names(play)[-1] == "give_up"


def test_where_the_spares_are_silent_too_the_way_to_all_nodes_is_given_as_long_as_without_a_spare():
    play = trained(8, spares=2)
    play.wait(9.0, silent=range(1, 10))
    assert not play.events("fault")
    play.wait(2.0)
    play.wait(9.0, silent={1})
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["nodes"]) == ("node_lost", [1])


# -- who takes part -------------------------------------------------------------------------------------------------------


def test_a_spare_takes_the_place_of_a_lost_node_before_that_of_one_which_lacks_a_device():
    play = Play(2, spares=1, procs_per_node=2, min_procs_per_node=1, layouts={4: {"dp": 4}, 3: {"dp": 3}})
    play.start()
    play.resumed(2)
    play.exit(0, 1, log=XID)
    lost(play, 1)
    play.again(0)
    play.wait(60.0)
    assert play.coordinator.state is State.RUNNING
    assert play.coordinator.membership.members == (0, 2)


def test_a_slow_node_is_used_again_where_another_one_is_lost():
    play = trained(2, spares=1)
    membership = play.coordinator.membership
    membership.shun(0)
    play.exit(0)
    play.again(0, 1, 2)
    assert membership.members == (2, 1)
    play.resumed(7)
    lost(play, 1)
    play.again(0, 2)
    play.wait(60.0)
    assert play.coordinator.state is State.RUNNING
    assert set(membership.members) == {0, 2}


@given(
    st.integers(1, 4),
    st.lists(st.sampled_from(["ready", "slow", "one device", "slow, one device", "absent", "unfit"]), min_size=4, max_size=7),
    st.lists(st.integers(0, 6), max_size=4, unique=True),
)
def test_whatever_is_left_of_the_nodes_the_best_of_them_go_on_if_they_can(least, states, before):
    """Nobody is waited for any more. Of those that are ready none is left out that is better than one that takes part."""
    nodes = Membership(Rules(2, 1, 1, tuple(range(2 * least, 9))), len(states) - 4, 20.0)
    nodes.begin(0.0)
    members = [index for index in before if index < len(states)]
    for index in range(len(states)):
        nodes.hello(index, f"n{index}", "", 1.0)
        nodes.is_ready(index, 6000)
    if len(members) >= least:
        nodes.start(members)
    for index, state in enumerate(states):
        nodes.is_ready(index, 6000)
        if "device" in state:
            nodes.leave_out(index, {0})
        if "slow" in state:
            nodes.shun(index)
        if state == "absent":
            nodes.lost(index, "x", 2.0)
        if state == "unfit":
            nodes.refused(index, "x")
    late_s = JOIN_S + 1000.0
    chosen = nodes.choose(late_s)
    assert (chosen is not None) == (nodes.fewer() > 0)
    assert (chosen is None) == (nodes.hopeless(late_s) is not None)
    if chosen is not None:
        assert len(set(chosen)) == len(chosen)
        whole = [index for index, state in enumerate(states) if state == "ready"]
        assert set(whole) <= set(chosen) or set(chosen) <= set(whole)


# -- agents that die before they are ready --------------------------------------------------------------------------------


def flaps(play: Play, node: int, times: int) -> None:
    """Its agent connects, and dies before it is ready."""
    for _ in range(times):
        play.wait(1.0)
        play.hello(node)
        play.wait(3.0)
        play.do("lost", node, "it has failed: the template ended")


def test_others_go_on_without_a_node_whose_agents_die_before_they_are_ready():
    play = trained(4, fewer=(3,))
    lost(play, 3)
    play.again(0, 1, 2)
    flaps(play, 3, LAUNCH_ATTEMPTS)
    play.wait(1.0)
    assert play.coordinator.state is State.RUNNING
    assert play.coordinator.membership.members == (0, 1, 2)
    assert names(play)[-1] == "shrink"


def test_so_they_do_at_the_start_of_a_job():
    play = Play(4, fewer=(3,))
    play.do("begin")
    play.do("prepared")
    for node in range(3):
        play.join(node)
    flaps(play, 3, LAUNCH_ATTEMPTS)
    play.wait(1.0)
    assert [send.node for send in play.sent(Start)] == [0, 1, 2]


def test_a_job_that_needs_such_a_node_ends_and_says_so():
    play = Play(2)
    play.do("begin")
    play.do("prepared")
    play.join(0)
    flaps(play, 1, LAUNCH_ATTEMPTS)
    finish = play.finish()
    assert finish.code is Exit.UNUSABLE
    assert "the agent of node 1 does not start (it has failed: the template ended)" in finish.message


def test_an_agent_of_a_spare_that_dies_before_it_is_ready_is_started_at_growing_intervals():
    play = trained(2, spares=1)
    lost(play, 2)
    times = [play.now]
    for _ in range(10):
        flaps(play, 2, 1)
        effects: list[Effect] = []
        for _ in range(100):
            effects += play.do("tick") if not effects else []
            if Launch(2) in effects:
                break
            effects = play.wait(1.0)
        assert Launch(2) in effects
        times.append(play.now)
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps[-1] > LONGEST_PAUSE_S > gaps[0]
    assert len(play.events("fault")) == 1 + LAUNCH_ATTEMPTS


def test_a_node_that_is_ready_once_in_a_while_is_started_at_once():
    play = trained(2, spares=1)
    for _ in range(2 * LAUNCH_ATTEMPTS):
        play.effects.clear()
        lost(play, 2)
        assert Launch(2) in play.effects
        play.join(2)
