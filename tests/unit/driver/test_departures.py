"""Which nodes are left because Slurm drains them."""

import pytest

from resilient.driver.departures import drained_of

IDLE, DOWN = frozenset({"ALLOCATED"}), frozenset({"DOWN", "NOT_RESPONDING"})


@pytest.mark.parametrize(
    ("hosts", "drained", "left"),
    [
        (4, [], []),
        (1, [0], [0]),
        (2, [1], [1]),
        (2, [0, 1], []),
        (4, [2], [2]),
        (4, [1, 2], []),
        (6, [0, 5], [0, 5]),
        (6, [0, 4, 5], []),
        (100, range(33), range(33)),
        (100, range(34), []),
    ],
)
@pytest.mark.parametrize("state", ["DRAIN", "DRAINED", "DRAINING"])
def test_a_few_drained_nodes_are_left_and_a_machine_that_is_drained_as_a_whole_is_not(hosts, drained, left, state: str):
    names = [f"n{number}" for number in range(hosts)]
    states = {name: frozenset({"ALLOCATED", state}) if number in drained else IDLE for number, name in enumerate(names)}
    assert drained_of(names, states) == (frozenset(drained), frozenset(left))


def test_nodes_that_are_down_or_that_slurm_says_nothing_of_are_not_drained():
    assert drained_of(["a", "b"], {"a": DOWN}) == (frozenset(), frozenset())
