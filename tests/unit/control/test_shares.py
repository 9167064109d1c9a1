"""How many ranks nodes have where devices do not work, as tables, and whatever they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.control.shares import Rules, shares, whole, whole_nodes


def rules(procs: int = 4, least: int = 1, unit: int = 1, one: int = 1, nodes: int = 3, least_nodes: int = 1) -> Rules:
    """Of a layout whose replicas have `one` ranks."""
    return Rules(procs, least, unit, tuple(range(one, nodes * procs + 1, one)), least_nodes)


@pytest.mark.parametrize(
    ("devices", "of", "found"),
    [
        ([4, 4, 4], rules(), (4, 4, 4)),
        ([4, 3, 4], rules(), (4, 3, 4)),
        ([4, 0, 4], rules(), (4, 0, 4)),
        ([4, 3, 4], rules(least=4), (4, 0, 4)),
        ([4, 1, 4], rules(least=2), (4, 0, 4)),
        ([4, 3, 4], rules(unit=2, one=2), (4, 2, 4)),
        ([4, 3, 4], rules(unit=2, one=4), (4, 0, 4)),
        ([4, 3], rules(one=2), (4, 2)),
        ([4, 3], rules(one=2, least=3), (3, 3)),
        ([4, 3, 4], rules(one=8), (4, 0, 4)),
        ([3, 4, 4], rules(one=8), (0, 4, 4)),
        ([3, 3, 3], rules(one=8), (3, 3, 2)),
        ([4, 1], rules(least_nodes=2), (4, 1)),
        ([4, 0], rules(least_nodes=2), ()),
        ([4, 4, 4], whole_nodes([1, 2], 4), (4, 4, 0)),
        ([4, 4, 3], whole_nodes([1, 3], 4), (4, 0, 0)),
        ([3, 3, 3], whole_nodes([1, 3], 4), ()),
        ([1, 1], whole_nodes([1, 2]), (1, 1)),
    ],
)
def test_the_ranks_of_nodes(devices: list[int], of: Rules, found: tuple[int, ...]):
    assert shares(devices, of) == found


@given(st.data())
def test_whatever_works_ranks_are_on_devices_that_do_in_groups_that_stay_together(data: st.DataObject):
    procs, unit = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2)]))
    nodes = data.draw(st.integers(1, 5))
    of = rules(procs, data.draw(st.integers(1, procs)), unit, unit * data.draw(st.integers(1, 4)), nodes)
    devices = data.draw(st.lists(st.integers(0, procs), min_size=nodes, max_size=nodes))
    found = shares(devices, of)
    if not found:
        return
    assert sum(found) in of.worlds
    for count, working in zip(found, devices, strict=True):
        assert count <= working and count % unit == 0 and (count == 0 or count >= of.least)
    if of.worlds[0] == unit and of.least <= unit:  # then nothing need be idle but what does not fill a group
        assert sum(found) == sum(working // unit * unit for working in devices)


@given(st.data())
def test_the_ranks_of_whole_nodes_are_counted_without_the_nodes(data: st.DataObject):
    procs = data.draw(st.integers(1, 8))
    worlds = tuple(sorted(data.draw(st.sets(st.integers(1, 48), min_size=1))))
    of = Rules(procs, data.draw(st.integers(0, 9)), data.draw(st.integers(1, procs)), worlds, data.draw(st.integers(0, 4)))
    count = data.draw(st.integers(0, 8))
    assert whole(count, of) == sum(shares([procs] * count, of))
