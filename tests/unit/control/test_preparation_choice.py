"""Who runs the preparation."""

from resilient.control.preparation import Preparation


def test_the_first_agent_prepares_and_no_other():
    choice = Preparation()
    assert [choice.launched(node) for node in (0, 1, 2)] == [True, False, False]
    assert not any(choice.connected(node) for node in (0, 1, 2))


def test_a_lost_node_is_followed_by_one_that_is_there():
    choice = Preparation()
    choice.launched(0)
    assert choice.lost(1, {0, 2}) is None
    assert choice.lost(0, {2, 1}) == 1
    assert not choice.launched(0)
    assert choice.lost(1, {2}) == 2


def test_where_nobody_is_there_the_next_one_that_comes_prepares():
    choice = Preparation()
    choice.launched(0)
    assert choice.lost(0, ()) is None
    assert choice.connected(1)
    assert not choice.launched(0)
    assert choice.lost(1, ()) is None
    assert choice.launched(0)


def test_once_it_is_done_nobody_prepares_again():
    choice = Preparation()
    choice.launched(0)
    choice.done = True
    assert choice.lost(0, {1}) is None
    assert not choice.launched(0)
    assert not choice.connected(1)


def test_one_whose_process_is_killed_is_tried_three_times():
    choice = Preparation()
    choice.launched(0)
    assert [choice.killed() for _ in range(3)] == [True, True, False]
