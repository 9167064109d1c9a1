"""Which ranks of a generation are on which node, and on which of its devices."""

from hypothesis import given
from hypothesis import strategies as st

from resilient.control.assignment import RankAssignment


@st.composite
def assignments(draw: st.DrawFn) -> RankAssignment:
    nodes = draw(st.lists(st.integers(0, 20), min_size=1, max_size=8, unique=True))
    devices = {node: tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True).map(sorted))) for node in nodes}
    return RankAssignment(nodes, [len(devices[node]) for node in nodes], devices)


@given(assignments())
def test_each_rank_is_on_one_node_and_one_device_in_the_order_of_the_nodes(assignment: RankAssignment):
    found = [(node, rank) for node in assignment.nodes for rank in assignment.ranks(node)]
    assert [rank for _, rank in found] == list(range(assignment.world_size))
    assert [(assignment.node_of(rank), rank) for rank in range(assignment.world_size)] == found
    assert [assignment.nodes[assignment.node_rank_of(rank)] for _, rank in found] == [node for node, _ in found]
    on = [(node, assignment.device_of(rank)) for node, rank in found]
    assert on == [(node, device) for node in assignment.nodes for device in assignment.devices(node)]


def test_a_node_that_takes_no_part_has_no_ranks_and_one_that_is_whole_has_its_devices_from_0():
    assignment = RankAssignment((4, 2), (2, 3))
    assert 2 in assignment and 3 not in assignment and not assignment.ranks(3)
    assert assignment.ranks(2) == range(2, 5) and assignment.devices(2) == (0, 1, 2) and assignment.device_of(4) == 2
