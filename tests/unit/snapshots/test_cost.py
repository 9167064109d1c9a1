"""What a snapshot of every step costs, in messages and in operations, whatever the number of nodes."""

import gc
import statistics
import sys
from typing import Any

import pytest
from snapshot_course import Course, replicated

from checkpoint.protocol import Replicate
from resilient.outbox import Effect, RequestDaemon

NODES = (64, 512)


class Operations:
    """Counts the lines and calls of the snapshot core, and of what it calls in Python, as long as it is open.

    No garbage is collected meanwhile: what other tests have left may have destructors.
    """

    def __init__(self) -> None:
        self.count = 0

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        self.count += 1
        return self._trace

    def __enter__(self) -> "Operations":
        gc.disable()
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        gc.enable()


def running(nodes: int) -> Course:
    """A few steps are complete and replicated."""
    course = Course(nodes, replicas=True, buffers=3)
    course.resumed()
    for step in (1, 2, 3):
        for node, request in course.requests(Replicate, course.all_take(step)):
            course.deliver(node, replicated(request, of=nodes))
    return course


def messages(turns: list[list[Effect]], nodes: int) -> list[int]:
    """To each node, where all requests of a turn to a node are one message."""
    counts = [0] * nodes
    for turn in turns:
        for node in {each.node for each in turn if isinstance(each, RequestDaemon)}:
            counts[node] += 1
    return counts


@pytest.mark.parametrize("nodes", NODES)
def test_a_snapshot_with_replicas_is_one_message_to_each_node(nodes: int) -> None:
    course = running(nodes)
    turns = [course.taken(node, 4) for node in course.members]
    for node, request in course.requests(Replicate, turns[-1]):
        turns.append(course.deliver(node, replicated(request, of=nodes)))
    assert course.events("replicated")[-1]["step"] == 4
    assert messages(turns, nodes) == [1] * nodes


@pytest.mark.parametrize("nodes", NODES)
def test_replication_that_takes_longer_than_a_step_skips_steps_and_costs_a_message_more_at_most(nodes: int) -> None:
    course = running(nodes)
    turns: list[list[Effect]] = []
    under_way: list[tuple[int, Replicate]] = []
    for step in range(4, 12):
        turns += [course.taken(node, step) for node in course.members]
        if step % 2:
            turns += [course.deliver(node, replicated(request, of=nodes)) for node, request in under_way]
        asked = course.requests(Replicate, [effect for turn in turns for effect in turn])
        under_way = asked[-nodes:]
    assert max(messages(turns, nodes)) <= 8 + 4


@pytest.mark.parametrize("nodes", NODES)
def test_a_step_that_all_nodes_skip_is_one_message_to_each_node(nodes: int) -> None:
    course = running(nodes)
    assert messages([course.skips(node, 4) for node in course.members], nodes) == [1] * nodes


def test_the_work_for_a_shard_that_is_taken_or_replicated_does_not_depend_on_the_number_of_nodes() -> None:
    taken, fetched = [], []
    for nodes in NODES:
        course = running(nodes)
        counts = []
        for node in course.members:
            with Operations() as operations:
                effects = course.taken(node, 4)
            counts.append(operations.count)
        taken.append((statistics.median(counts), max(counts[:-1])))
        counts = []
        for node, request in course.requests(Replicate, effects):
            news = replicated(request, of=nodes)
            with Operations() as operations:
                course.deliver(node, news)
            counts.append(operations.count)
        fetched.append((statistics.median(counts), max(counts[:-1])))
    assert taken[0] == taken[1] and fetched[0] == fetched[1]


def test_the_work_for_a_skipped_or_refused_step_and_for_trouble_does_not_depend_on_the_number_of_nodes() -> None:
    found = []
    for nodes in NODES:
        course = running(nodes)
        course.skips(0, 4)
        course.stale(0, 5)
        counts = []
        for node in course.members[20:]:
            with Operations() as operations:
                course.skips(node, 4)
                course.stale(node, 5)
            counts.append(operations.count)
        found.append((min(counts), max(counts)))
    assert found[0] == found[1]


def test_what_a_complete_step_costs_grows_no_faster_than_the_number_of_nodes() -> None:
    cost = []
    for nodes in NODES:
        course = running(nodes)
        for node in course.members[:-1]:
            course.taken(node, 4)
        with Operations() as operations:
            course.taken(course.members[-1], 4)
        cost.append(operations.count / nodes)
    assert cost[1] <= 1.1 * cost[0]


def test_what_is_remembered_does_not_grow_with_the_number_of_steps() -> None:
    course = running(8)
    for step in range(4, 400):
        for node in course.members:
            course.taken(node, step) if (step * 7 + node) % 50 else course.skips(node, step)
    assert len(course.core._catalog.snapshots) <= 3
    assert sum(map(len, course.core._catalog._held.values())) <= 3 * 8 * 2
    assert sum(map(len, course.core._left_out._reported.values())) <= 8 * 64
    assert len(course.core._transfers._failures) == len(course.core._faults._crowds) == 0
