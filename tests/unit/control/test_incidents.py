"""Ranks that do not get on, links, stragglers: what is found, and what is done about it."""

import pytest
from control_play import Play, beat, shard
from msgspec import structs

from checkpoint.protocol import Retain
from resilient.control.coordinator import State
from resilient.control.inspection import PATIENCE_S
from resilient.control.response import INSPECT_AGAIN_S
from resilient.control.stragglers import Rules
from resilient.outbox import (
    Effect,
    Launch,
    WriteEvent,
    WriteText,
)
from resilient.protocol.messages import (
    Inspect,
    Inspected,
    Inspection,
    LinkChange,
    LinksChanged,
    Start,
    Stop,
)

# -- workers that do not get on ------------------------------------------------------------------------------------------

STACKS = 'Current thread 0x1 (most recent call first):\n  File "data.py", line 1 in wait\n'
IDLE = Inspection(state="S", cpu=0.0, stacks=STACKS)
AT_A_COLLECTIVE = Inspection(state="S", cpu=0.0, stacks=STACKS.replace("data.py", "torch/distributed/x.py"))


def hang(play: Play, silent_s: float = 11.0) -> list[Effect]:
    """Both ranks do some steps and say nothing more."""
    for step in range(10):
        for node in (0, 1):
            play.wait(0.1)
            play.beat(node, step)
    play.wait(silent_s)
    return [*play.beat(0, 9, silent_s=silent_s, state="S"), *play.beat(1, 9, silent_s=silent_s, state="S")]


def test_a_silent_rank_is_looked_at_and_the_culprit_named(play):
    effects = hang(play)
    assert [send.node for send in play.sent(Inspect, effects)] == [0, 1]
    assert not play.inspected(0, AT_A_COLLECTIVE)
    effects = play.inspected(1, IDLE)
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["ranks"], fault["step"], fault["detect_s"]) == ("hang", [1], 10, 11.0)
    assert [effect.path for effect in effects if isinstance(effect, WriteText)] == [
        f"incidents/{fault['fault_id']}/rank{rank}.txt" for rank in (0, 1)
    ]
    assert len(play.sent(Stop, effects)) == 2


def test_a_node_that_does_not_answer_a_look_is_not_waited_for(play):
    hang(play)
    play.inspected(0, AT_A_COLLECTIVE)
    play.wait(PATIENCE_S)
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["ranks"]) == ("hang", [1])
    assert [action["name"] for action in play.events("action")] == ["restart_workers"]


def test_the_time_that_an_inspection_takes_is_part_of_the_detection_and_of_the_downtime(play):
    hang(play)
    play.wait(2.0)
    play.inspected(0, AT_A_COLLECTIVE)
    play.inspected(1, IDLE)
    (fault,) = play.events("fault")
    assert fault["detect_s"] == pytest.approx(13.0) and "silent for 13.0 s" in fault["detail"]
    play.again()
    play.resumed(9)
    play.wait(1.0)
    play.beat(0, 10)
    (recovered,) = play.events("recovered")
    assert recovered["downtime_s"] == pytest.approx(14.0)


def test_the_downtime_of_a_lost_node_counts_from_its_last_word_or_from_the_last_step_after_it():
    def lost(silent_s: float, stands_s: float) -> float:
        """Its downtime, where the other node finishes steps until `stands_s` before it is lost."""
        play = Play()
        play.start()
        play.resumed(0)
        play.beat(0, 5)
        play.wait(silent_s - stands_s, silent=[1])
        play.beat(0, 6)
        play.wait(stands_s, silent=[1])
        play.do("lost", 1, "no word")
        play.join(1)
        play.again(0)
        play.resumed(6)
        play.wait(1.0)
        play.beat(0, 7)
        (recovered,) = play.events("recovered")
        return recovered["downtime_s"]

    assert lost(6.0, 6.0) == pytest.approx(7.0)
    assert lost(6.0, 2.0) == pytest.approx(3.0)


def test_a_node_of_which_nothing_is_heard_is_waited_for_until_it_is_lost(play):
    hang(play)
    play.inspected(0, AT_A_COLLECTIVE)
    for _ in range(3):
        play.wait(INSPECT_AGAIN_S, silent=[1])
        play.beat(0, 9, silent_s=20.0, state="S")
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["nodes"]) == ("link_down", [1])
    assert [action["name"] for action in play.events("action")] == ["wait"]
    assert not play.sent(Stop)
    play.wait(30.0, silent=[1])
    assert [fault["kind"] for fault in play.events("fault")] == ["link_down", "node_lost"]
    assert play.events("action")[-1]["name"] == "replace_node"
    first, second = play.events("fault")
    assert first["incident_id"] == first["fault_id"] == second["incident_id"] != second["fault_id"]
    assert {action["incident_id"] for action in play.events("action")} == {first["incident_id"]}


def test_what_was_not_heard_of_for_a_while_goes_on_without_a_restart(play):
    hang(play)
    play.inspected(0, AT_A_COLLECTIVE)
    play.wait(PATIENCE_S, silent=[1])
    play.beat(1, 10)
    (recovered,) = play.events("recovered")
    assert (recovered["fault_id"], recovered["lost_steps"]) == (play.events("fault")[0]["fault_id"], 0)


def inspect_waiting_ranks(play: Play) -> list[Effect]:
    return [effect for node in (0, 1) for effect in play.inspected(node, AT_A_COLLECTIVE)]


def tell_link(play: Play, node: int, state: str, down_s: float) -> None:
    change = LinkChange(interface="ib0", state=state, down_s=down_s)
    play.deliver(node, LinksChanged(generation=5, t=play.now, changes=(change,)))


def test_a_stall_while_a_link_is_down_is_waited_for_and_told_once(play):
    tell_link(play, 1, "down", 0.0)
    hang(play)
    inspect_waiting_ranks(play)
    (action,) = play.events("action")
    assert action["name"] == "wait" and "link ib0 of node 1 has been down for 13.0 s" in action["reason"]
    play.wait(INSPECT_AGAIN_S)
    for node in (0, 1):
        play.beat(node, 9, silent_s=16.0, state="S")
    inspect_waiting_ranks(play)
    assert len(play.events("fault")) == 1 and not play.sent(Stop)
    tell_link(play, 1, "up", 14.0)
    play.beat(0, 10)
    (recovered,) = play.events("recovered")
    assert recovered["lost_steps"] == 0


def test_a_stall_that_is_waited_for_keeps_no_generation_from_what_its_rank_0_goes_on_from(play):
    play.resumed(0)
    play.exit(1)
    play.again(shards={node: [shard(8, node)] for node in (0, 1)})
    tell_link(play, 1, "down", 0.0)
    play.wait(20.0, silent=[0])  # its word is on its way
    play.report(1, heartbeats={1: beat(12, play.now - 13.0, silent_s=13.0, state="S", first=(9, play.now - 16.0))})
    play.inspected(1, AT_A_COLLECTIVE)
    play.wait(PATIENCE_S, silent=[0])
    assert [action["name"] for action in play.events("action")] == ["restart_workers", "wait"]
    effects = play.resumed(8, "ram")
    (started,) = play.events("generation_started")[1:]
    assert (started["resumed_step"], started["tier"]) == (8, "ram")
    assert {node for node, _ in play.requests(Retain, effects)} == {0, 1}
    play.beat(0, 13)
    (recovered, _) = play.events("recovered")
    assert recovered["lost_steps"] == 0


def test_a_stall_that_outlasts_the_grace_of_a_link_is_a_fault(play):
    tell_link(play, 1, "down", 0.0)
    hang(play, 61.0)
    inspect_waiting_ranks(play)
    assert [action["name"] for action in play.events("action")] == ["restart_workers"]


@pytest.mark.parametrize("first", [(AT_A_COLLECTIVE, AT_A_COLLECTIVE), (AT_A_COLLECTIVE, None)], ids=["waits", "is cut off"])
def test_a_rank_that_has_waited_for_a_link_has_its_time_once_it_is_seen_to_get_on(play: Play, first: tuple[Inspection | None, ...]):
    """Before it tells of a step, or of anything else."""
    silent_s = 11.0

    def look(found: tuple[Inspection | None, ...]) -> None:
        for node, inspection in enumerate(found):
            if inspection is not None:
                play.inspected(node, inspection)
        play.wait(PATIENCE_S, silent=[node for node, inspection in enumerate(found) if inspection is None])

    tell_link(play, 1, "down", 0.0)
    hang(play, silent_s)
    look(first)
    assert [action["name"] for action in play.events("action")] == ["wait"]
    if None in first:  # that was found out at the end of that patience only
        play.wait(INSPECT_AGAIN_S)
        silent_s += INSPECT_AGAIN_S
    for _ in range(2):
        silent_s += PATIENCE_S
        play.beat(1, 9, silent_s=silent_s, state="S")
        look((AT_A_COLLECTIVE, IDLE))
        assert not play.sent(Stop), "no more than a moment ago it was waiting"
        play.beat(0, 10)
    play.wait(1.0)
    play.beat(1, 9, silent_s=silent_s + PATIENCE_S + 1.0, state="S")
    look((AT_A_COLLECTIVE, IDLE))
    assert [action["name"] for action in play.events("action")] == ["wait", "restart_workers"]
    assert play.events("fault")[-1]["ranks"] == [1]


def test_a_link_is_no_excuse_for_a_rank_that_does_not_wait(play):
    tell_link(play, 1, "flapped", 0.2)
    hang(play)
    play.inspected(0, AT_A_COLLECTIVE)
    play.inspected(1, IDLE)
    assert [action["name"] for action in play.events("action")] == ["restart_workers"]


def test_ranks_that_go_on_while_they_are_looked_at_are_left_alone(play):
    hang(play)
    for node in (0, 1):
        play.beat(node, 10)
        play.inspected(node, IDLE)
    assert not play.events("fault")


# -- links ---------------------------------------------------------------------------------------------------------------

DOWN = LinkChange(interface="eth0", state="down", detail="no carrier", counters={"carrier_down_count": 1})
UP = LinkChange(interface="eth0", state="up", down_s=2.00049, counters={"carrier_up_count": 1})


def changed(t: float, *changes: LinkChange) -> LinksChanged:
    return LinksChanged(generation=5, t=t, changes=changes)


def test_changes_of_links_are_written_with_their_own_time_and_host_and_restart_nothing(play):
    effects = play.deliver(1, changed(12.5, DOWN, UP))
    assert effects == [
        WriteEvent("link", {"node": 1, **structs.asdict(DOWN)}, 5, 12.5, "n1"),
        WriteEvent("link", {"node": 1, **structs.asdict(UP), "down_s": 2.0}, 5, 12.5, "n1"),
    ]


def test_a_link_that_is_down_or_just_came_back_is_known_while_it_matters(play):
    play.deliver(1, changed(12.5, DOWN))
    play.wait(2)
    assert [(outage.node, outage.down_s) for outage in play.coordinator.links.outages(play.now, within_s=3.0)] == [(1, 2.0)]
    play.deliver(1, changed(14.5, UP))
    assert play.coordinator.links.outages(play.now + 3, within_s=3.0)
    assert not play.coordinator.links.outages(play.now + 4, within_s=3.0)


def test_links_of_a_lost_node_are_not_down_for_ever(play):
    play.deliver(1, changed(12.5, DOWN))
    play.do("lost", 1, "process 9 ended by SIGKILL")
    assert not play.coordinator.links.outages(play.now, within_s=3.0)


def slowed(play: Play, beats: int) -> None:
    """Rank 1 needs twice as long for its part of a step, for so many beats of 20 steps each."""
    for number in range(1, beats + 1):
        play.wait(2.0)
        for rank, own_s in ((0, number / 2), (1, float(number))):
            play.report(rank, heartbeats={rank: beat(20 * number, play.now, own_s=own_s)})


def test_a_straggler_is_told_and_nothing_is_done_to_the_run():
    play = Play(stragglers=Rules(1.5, 20), max_restarts_per_hour=1)
    play.start()
    slowed(play, 6)
    (fault,) = play.events("fault")
    assert (fault["fault_id"], fault["kind"], fault["nodes"]) == ("g5-straggler-1", "straggler", [1])
    assert [action["name"] for action in play.events("action")] == ["report"]
    assert not play.sent(Stop) and play.coordinator.state is State.RUNNING
    play.exit(1)
    assert play.events("action")[-1]["name"] == "restart_workers"  # the report used up nothing


def test_the_node_of_a_straggler_gets_a_new_agent_where_that_is_asked_for():
    play = Play(stragglers=Rules(1.5, 20), replace_stragglers=True)
    play.start()
    play.effects.clear()
    slowed(play, 6)
    assert [action["name"] for action in play.events("action")] == ["replace_node"]
    assert [e.node for e in play.effects if isinstance(e, Launch)] == [1]
    assert [send.node for send in play.sent(Stop)] == [0]
    play.ready(0, 1), play.join(1)
    assert play.sent(Start) and play.coordinator.generation == 6


@pytest.mark.parametrize(("how", "incident"), [("hang", "g5-1"), ("exit", None)])
def test_workers_that_hang_are_asked_for_their_last_words_before_they_are_killed(play: Play, how: str, incident: str | None):
    play.beat(0, 7), play.beat(1, 7)
    play.effects.clear()
    if how == "exit":
        play.exit(1)
    else:
        play.beat(1, 7, silent_s=601.0, state="S")
        waiting = Inspection(state="S", cpu=0.0, stacks="")
        for node in range(2):
            play.inspected(node, waiting)
    assert {send.node: send.message.incident for send in play.sent(Stop)} == {0: incident, 1: incident}


@pytest.mark.parametrize(("leaves", "guilty", "kind"), [("before", [0], "exit"), ("while asked", [1], "collective_timeout")])
def test_a_rank_that_left_with_status_0_is_named_where_the_others_hang_in_a_collective(leaves, guilty, kind):
    """NCCL tells them nothing of its end."""
    play = Play()
    play.start()
    play.resumed(2)
    for step in range(3, 14):
        for node in range(2):
            play.beat(node, step)
        play.now += 1.0
    if leaves == "before":
        play.exit(0, 0, step=13)
    while not play.sent(Inspect):
        play.now += 1.0
        play.beat(1, 13, silent_s=play.now - 1011.0, state="S")
    if leaves == "while asked":
        play.exit(0, 0, step=13)
    play.inspected(1, AT_A_COLLECTIVE)
    play.deliver(0, Inspected(generation=play.generation, ranks={}))
    play.wait(10.0)
    (fault,) = play.events("fault")
    assert (fault["ranks"], fault["kind"]) == (guilty, kind)
    if leaves == "before":
        assert fault["detail"].startswith("exit code 0 after step 13; rank 1 is waiting in a collective at step 14")
        assert fault["evidence"].startswith("process 77 of rank 0 ended by exit code 0")
