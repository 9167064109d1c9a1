"""A driver that was away: it counts nobody's silence in that time."""

import pytest
from control_play import VICTIM, Play, beat

from resilient.control.attendance import AWAY_S, Attendance
from resilient.control.coordinator import State
from resilient.control.ends import SETTLE_S
from resilient.control.presence import Presence
from resilient.outbox import Effect
from resilient.protocol.messages import Alive, Health, Inspection, Stop
from resilient.recovery.faults import Raised

WAITING = Inspection(state="S", cpu=0.0, stacks='Thread 0x1:\n  File "torch/distributed/x.py", line 1 in wait\n')


def trained(play: Play, steps: int) -> None:
    """A step each second, of which all nodes report."""
    for step in range(1, steps + 1):
        play.wait(1.0)
        for node in range(play.nodes):
            play.beat(node, step)


def away(play: Play, seconds: float) -> None:
    """The driver handles nothing; the test does what has queued up."""
    play.now += seconds


@pytest.mark.parametrize("seconds", [10, 40, 120])
@pytest.mark.parametrize("first", ["messages", "tick"])
def test_a_driver_that_was_stopped_finds_no_fault_in_what_has_queued_up(seconds: int, first: str):
    play = Play(4)
    play.start()
    trained(play, 10)
    left_t = play.now
    away(play, seconds)
    effects: list[Effect] = [] if first == "messages" else play.do("tick")
    for node in range(4):  # a node's whole queue, then that of the next one
        for second in range(1, seconds + 1):
            effects += play.report(node, heartbeats={node: beat(10 + second, left_t + second)})
        play.now += 0.1
        effects += play.do("tick")
    effects += play.wait(6, silent=[3])
    trained(play, 5)
    assert not play.events("fault") and not play.sent(Stop, effects)
    assert play.generation == 5 and play.coordinator.state is State.RUNNING


def test_nodes_that_are_silent_before_and_after_an_absence_are_lost_when_they_were_silent_for_long_enough(play):
    play.wait(20, silent=[1])
    away(play, 120)
    play.wait(9.5, silent=[1])
    assert not play.events("fault")
    play.wait(2, silent=[1])
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["nodes"]) == ("node_lost", [1])
    assert 29 < fault["detect_s"] < 32


def test_agents_have_as_long_as_ever_to_answer_an_inspection(play):
    trained(play, 10)
    for node in (0, 1):
        play.beat(node, 10, silent_s=11.0, state="S")
    play.inspected(0, WAITING)
    away(play, 40)
    play.do("tick")
    assert not play.events("fault")
    play.beat(0, 11), play.beat(1, 11)  # they have gone on meanwhile
    play.wait(6)
    assert not play.events("fault")


def test_an_answer_that_has_waited_for_the_driver_is_no_proof_that_its_node_is_cut_off(play):
    trained(play, 10)
    for node in (0, 1):
        play.beat(node, 10, silent_s=11.0, state="S")
    away(play, 40)
    play.inspected(0, WAITING)
    play.wait(6, silent=[])
    assert "link_down" not in [fault["kind"] for fault in play.events("fault")]


def test_a_peer_that_was_blamed_has_its_moment_still(play):
    play.exit(0, 1, VICTIM)
    away(play, 40)
    play.do("tick")
    assert not play.events("fault")
    play.exit(1, 1, Raised("ValueError", "boom", "culprit's traceback", 9.2))
    assert play.events("fault")[0]["ranks"] == [1]


def test_a_peer_that_is_never_heard_of_is_waited_for_no_longer_than_a_moment(play):
    play.exit(0, 1, VICTIM)
    away(play, 40)
    play.wait(SETTLE_S + 0.6)
    assert play.events("fault")[0]["ranks"] == [0]


def test_a_node_that_is_to_return_has_its_time_still():
    play = Play(fewer=(1,))
    play.start()
    play.do("lost", 1, "gone")
    play.again(0)
    away(play, 300)
    play.wait(15, silent=[])
    assert play.generation == 5
    play.wait(6)
    assert play.generation == 6


def test_a_drain_is_over_when_it_was_to_be_however_long_the_driver_was_away(play):
    play.do("stop", "SIGTERM")
    away(play, 40)
    play.do("tick")
    assert play.coordinator.finished


@pytest.mark.parametrize("late_s", [400.0, 0.0])
def test_a_greeting_that_has_waited_for_the_driver_is_no_clock_that_is_behind(late_s: float):
    play = Play()
    play.do("begin")
    play.do("prepared")
    if late_s:
        away(play, late_s)
    play.hello(1, skew_s=-400.0)
    play.deliver(1, Health(generation=0, took_s=0.1))
    assert bool(play.events("health")) == (not late_s)


def test_attended_time_stands_still_while_nothing_is_handled():
    attendance = Attendance()
    assert attendance.note(100.0).attended_s == 100.0
    assert attendance.note(100.0 + AWAY_S).attended_s == 100.0 + AWAY_S  # busy, not away
    back = attendance.note(150.0)
    assert (back.now, back.attended_s, back.late_s) == (150.0, 102.0, 48.0)
    assert attendance.note(151.0).attended_s == 103.0
    assert attendance.note(152.0).late_s == 48.0
    assert attendance.note(152.5).late_s == 0.0
    assert attendance.note(100.0).attended_s == 104.5  # the clock was set back


def test_only_nodes_that_are_due_are_looked_at():
    presence, asked = Presence(), []
    for node in range(1000):
        presence.joined(node, 0.0)
    for now in range(1, 40):
        for node in range(999):
            presence.on_message(node, float(now))
        found = presence.overdue(float(now), lambda node: asked.append(node) or 35.0, least_s=8.0)
        assert found == ([999] if now > 35 else [])
    assert set(asked) == {999}
    presence.left(999)
    assert presence.overdue(100.0, lambda node: 1000.0, least_s=8.0) == []


def test_a_node_that_only_says_that_it_lives_is_not_lost(play):
    for _ in range(40):
        play.now += 1.0
        play.do("tick")
        for node in (0, 1):
            play.deliver(node, Alive(generation=5))
    assert not play.events("fault")
