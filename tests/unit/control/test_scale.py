"""A large world: what is told of it stays small, and a message costs the same however many ranks there are.

Work is counted in calls of Python functions, which are the same on every machine.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from control_play import Play, beat

from checkpoint.protocol import Synced
from resilient.control.coordinator import State
from resilient.control.inspection import NODES_ASKED
from resilient.control.stragglers import Rules, Stragglers
from resilient.outbox import WriteText
from resilient.protocol.messages import Inspect, Inspected, Inspection, Start, Stop

PROCS = 8
WAITING = Inspection(state="S", cpu=0.0, stacks='Thread 0x1:\n  File "torch/distributed/x.py", line 1 in wait\n')
LOADING = Inspection(state="S", cpu=0.0, stacks='Thread 0x1:\n  File "data.py", line 1 in wait\n')


def world(nodes: int, **settings: Any) -> Play:
    play = Play(nodes, procs_per_node=PROCS, **settings)
    play.start()
    play.effects.clear()
    return play


def beats(play: Play, node: int, step: int, **how: Any) -> list[Any]:
    ranks = range(node * PROCS, (node + 1) * PROCS)
    return play.report(node, heartbeats={rank: beat(step, play.now - how.get("silent_s", 0.0), **how) for rank in ranks})


def calls(work: Callable[[], object]) -> int:
    """How many functions are called."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def trained(nodes: int) -> Play:
    """Some steps of all ranks, with stragglers looked for."""
    play = world(nodes, stragglers=Rules(1.5, 50))
    for step in range(1, 8):
        play.now += 1.0
        play.do("tick")
        for node in range(nodes):
            beats(play, node, step, own_s=0.5 * step)
    return play


def test_a_report_costs_the_same_in_a_world_of_any_size():
    costs = []
    for nodes in (8, 256):
        play = trained(nodes)
        play.now += 1.0
        play.do("tick")
        beats(play, 0, 8, own_s=4.0)  # the first of a step changes what is learned
        costs.append(calls(lambda play=play: [beats(play, node, 8, own_s=4.0) for node in range(1, 8)]))  # type: ignore[misc]
    small, large = costs
    assert large <= 1.1 * small, costs


def test_a_tick_costs_the_same_in_a_world_of_any_size():
    costs = []
    for nodes in (8, 256):
        play = trained(nodes)
        play.now += 0.1
        costs.append(calls(lambda play=play: play.do("tick")))  # type: ignore[misc]
    small, large = costs
    assert large <= small + 20, costs


def test_from_the_first_greeting_to_the_first_start_work_grows_with_the_number_of_nodes_alone():
    costs = [calls(lambda nodes=nodes: world(nodes)) / nodes for nodes in (64, 512)]  # type: ignore[misc]
    small, large = costs
    assert large <= 1.3 * small, costs


def test_stragglers_of_a_large_world_are_found_without_comparing_each_with_each():
    costs = []
    for ranks in (64, 1024):
        stragglers = Stragglers(Rules(1.5, 10))
        stragglers.begin(ranks)
        for step in range(1, 16):
            for rank in range(ranks):
                stragglers.on_heartbeat(rank, beat(step, float(step), own_s=0.1 * step))
        costs.append(calls(stragglers.judge) / ranks)
    small, large = costs
    assert large <= 1.5 * small, costs


def hung(nodes: int, culprit: int) -> Play:
    """All ranks wait in a collective, but those of one node, who have been silent for longest."""
    play = trained(nodes)
    play.now += 1.0
    for node in range(nodes):
        beats(play, node, 8, phase="data" if node == culprit else "step")
    for second in range(1, 14):
        play.now += 1.0
        play.do("tick")
        for node in range(nodes):
            beats(play, node, 8, silent_s=second + (1.0 if node == culprit else 0.5), state="S")
    return play


def test_of_many_nodes_those_are_inspected_that_lag_behind_and_the_culprit_is_among_them():
    play = hung(200, culprit=150)
    asked = [send.node for send in play.sent(Inspect)]
    assert len(asked) == len(set(asked)) <= 2 * NODES_ASKED and 150 in asked
    for node in asked:
        ranks = dict.fromkeys(range(node * PROCS, (node + 1) * PROCS), LOADING if node == 150 else WAITING)
        play.deliver(node, Inspected(generation=5, ranks=ranks))
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["nodes"], fault["ranks"]) == ("hang", [150], list(range(1200, 1208)))
    assert "waiting" not in fault["detail"] and " more wait for others" in fault["detail"]
    assert len([effect for effect in play.effects if isinstance(effect, WriteText)]) == 64
    assert len(play.sent(Stop)) == 200


def test_a_fault_of_all_ranks_names_eight_and_lists_sixty_four():
    play = hung(20, culprit=0)
    for node in range(20):
        play.deliver(node, Inspected(generation=5, ranks=dict.fromkeys(range(node * PROCS, (node + 1) * PROCS), LOADING)))
    (fault,) = play.events("fault")
    assert len(fault["ranks"]) == 64 and fault["ranks_total"] == 160
    assert fault["nodes"] == list(range(20)) and "nodes_total" not in fault
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 152 more are blocked" in fault["detail"]


def test_the_evidence_of_a_straggler_names_the_slowest_and_counts_the_rest():
    stragglers = Stragglers(Rules(1.5, 10))
    stragglers.begin(100)
    found: list[Any] = []
    for step in range(1, 40):
        for rank in range(100):
            stragglers.on_heartbeat(rank, beat(step, float(step), own_s=(0.9 if rank == 50 else 0.1) * step))
        found += stragglers.judge()
    (episode,) = found
    evidence = episode.fault("g1-straggler-1", 0).evidence
    assert evidence.count("rank ") == 8 and "rank 50 900.0 ms" in evidence and evidence.endswith(" and 92 more")


@pytest.mark.parametrize(("nodes", "report_s"), [(1, 0.2), (64, 0.2), (1024, 0.5)])
def test_agents_of_a_large_world_report_less_often(nodes: int, report_s: float):
    play = Play(nodes)
    play.start()
    starts = play.sent(Start)
    assert {send.message.report_s for send in starts} == {report_s} and play.coordinator.state is State.RUNNING
    assert len({id(send.message.candidates) for send in starts}) == 1


def saving(nodes: int) -> Play:
    """A job at its end, while its daemons settle what workers have left."""
    play = Play(nodes)
    play.silent_daemons = set(range(nodes))
    play.start()
    play.resumed(0)
    for node in range(nodes):
        play.held(node, 9)
    play.do("stop", "SIGTERM")
    for rank in range(nodes):
        play.exit(rank, 0, stopped=True, step=9)
    play.again()
    assert play.coordinator.state is State.SAVING
    return play


def test_news_of_a_daemon_costs_the_same_in_a_world_of_any_size_while_the_job_saves():
    costs = []
    for nodes in (8, 256):
        play = saving(nodes)
        costs.append(calls(lambda play=play: [play.news(node, Synced(generation=play.generation)) for node in range(1, 7)]))  # type: ignore[misc]
    small, large = costs
    assert large <= 1.1 * small, costs


def draining(nodes: int) -> Play:
    """A third of the nodes are to be left, and the others cannot go on without them."""
    play = Play(nodes)
    play.start()
    play.resumed(0)
    play.do("evacuate", dict.fromkeys(range(nodes // 3), "Slurm drains it"), ())
    play.wait(1.0)
    return play


def test_while_nodes_wait_to_be_left_a_tick_costs_the_same_for_each_of_them_in_a_world_of_any_size():
    costs = []
    for nodes in (64, 512):
        play = draining(nodes)
        play.now += 0.1
        costs.append(calls(lambda play=play: play.do("tick")) / nodes)  # type: ignore[misc]
    small, large = costs
    assert large <= 1.3 * small, costs


@pytest.mark.parametrize("told", [lambda play, node: play.do("lost", node, "gone"), lambda play, node: play.do("departed", [node])])
def test_of_nodes_that_are_lost_together_each_costs_the_same_in_a_world_of_any_size(told: Callable[[Play, int], object]):
    """A switch takes thousands along, or it is the driver's own link."""
    costs = []
    for nodes in (64, 512):
        play = world(nodes, fewer=(nodes // 4,))
        costs.append(calls(lambda play=play, nodes=nodes: [told(play, node) for node in range(nodes // 2)]) / nodes)  # type: ignore[misc]
    small, large = costs
    assert large <= 1.3 * small, costs
