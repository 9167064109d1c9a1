"""Who takes part: courses of joining, leaving and returning nodes, without a process."""

import random

import pytest

from resilient.control.membership import BACK_S, JOIN_S, LAUNCH_ATTEMPTS, LONGEST_PAUSE_S, READY_S, Membership
from resilient.control.shares import Rules, whole_nodes

REJOIN_S = 20.0


class Nodes:
    """Four nodes that compute, unless said otherwise, and a clock that the test moves."""

    def __init__(self, sizes: tuple[int, ...] = (4,), spares: int = 0) -> None:
        self.now = 1000.0
        self.all = Membership(whole_nodes(sizes, 2), spares, REJOIN_S)
        self.all.begin(self.now)
        self.launched = self.all.launches(self.now)

    def join(self, *nodes: int) -> None:
        for node in nodes:
            self.all.hello(node, f"n{node}", f"10.0.0.{node}", self.now)
            self.all.is_ready(node, 5000 + node)

    def lose(self, *nodes: int) -> None:
        for node in nodes:
            self.all.lost(node, "gone", self.now)

    def start(self) -> tuple[int, ...]:
        members = self.choose()
        assert members is not None
        self.all.start(members)
        return members

    def choose(self) -> tuple[int, ...] | None:
        return self.all.choose(self.now)

    def again(self, *nodes: int) -> None:
        """These nodes have ended their workers and wait for the next generation."""
        for node in nodes:
            self.all.is_ready(node, 6000 + node)


def running(sizes: tuple[int, ...] = (4,), spares: int = 0) -> Nodes:
    nodes = Nodes(sizes, spares)
    nodes.join(*range(4 + spares))
    assert nodes.start() == (0, 1, 2, 3)
    return nodes


def test_all_nodes_are_started_and_the_first_generation_waits_for_those_that_compute():
    nodes = Nodes(spares=1)
    assert nodes.launched == [0, 1, 2, 3, 4]
    nodes.join(0, 1, 3, 4)
    assert nodes.choose() is None  # the spare does not push itself forward
    nodes.join(2)
    assert nodes.choose() == (0, 1, 2, 3)


def test_a_spare_takes_the_rank_of_the_node_that_is_gone_and_the_others_keep_theirs():
    nodes = running(spares=1)
    nodes.lose(1)
    nodes.again(0, 2)
    assert nodes.choose() is None  # node 3 is ending its workers
    nodes.again(3)
    assert nodes.start() == (0, 4, 2, 3)
    assert nodes.all.assignment.ranks(4) == range(2, 4)
    assert not nodes.all.assignment.ranks(1)


def test_a_node_that_has_returned_is_the_next_spare():
    nodes = running(spares=1)
    nodes.lose(1)
    nodes.again(0, 2, 3)
    nodes.start()
    nodes.join(1)
    assert nodes.all.spare() == 1
    assert not nodes.all.can_grow()
    nodes.lose(4)
    nodes.again(0, 2, 3)
    assert nodes.start() == (0, 1, 2, 3)


def test_a_returning_node_that_is_slower_than_the_spare_is_not_waited_for():
    nodes = running(spares=1)
    nodes.lose(1)
    nodes.all.hello(1, "n1", "10.0.0.1", nodes.now)
    nodes.again(0, 2, 3)
    assert nodes.choose() == (0, 4, 2, 3)


def test_without_a_spare_the_node_is_waited_for_and_then_fewer_go_on():
    nodes = running(sizes=(1, 2, 4))
    nodes.lose(1)
    nodes.again(0, 2, 3)
    nodes.now += REJOIN_S - 0.1
    assert nodes.choose() is None
    nodes.now += 0.2
    assert nodes.start() == (0, 2)  # three are not among the sizes
    assert nodes.all.spare() == 3


def test_a_node_that_is_back_in_time_has_its_rank_again():
    nodes = running(sizes=(2, 4))
    nodes.lose(1)
    nodes.again(0, 2, 3)
    nodes.now += REJOIN_S - 0.1
    nodes.join(1)
    assert nodes.choose() == (0, 1, 2, 3)


def test_a_node_that_has_said_hello_in_time_gets_time_to_be_ready():
    nodes = running(sizes=(2, 4))
    nodes.lose(1)
    nodes.again(0, 2, 3)
    nodes.now += REJOIN_S - 0.1
    nodes.all.hello(1, "n1", "10.0.0.1", nodes.now)
    nodes.now += READY_S - 0.1
    assert nodes.choose() is None
    nodes.now += 0.2
    assert nodes.choose() == (0, 2)


def test_a_node_that_cannot_be_started_is_not_waited_for():
    nodes = running(sizes=(3, 4))
    nodes.lose(1)
    nodes.again(0, 2, 3)
    for _ in range(LAUNCH_ATTEMPTS):
        assert nodes.choose() is None
        nodes.lose(1)
    assert nodes.choose() == (0, 2, 3)


def test_a_node_that_cannot_be_started_is_tried_again_with_growing_pauses():
    nodes = running(sizes=(3, 4))
    nodes.lose(1)
    assert nodes.all.launches(nodes.now) == [1]
    pauses = []
    for _ in range(12):
        nodes.lose(1)
        start = nodes.now
        while not nodes.all.launches(nodes.now):
            nodes.now += 0.25
        pauses.append(nodes.now - start)
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_a_shrunken_run_can_grow_as_soon_as_a_larger_size_can_be_had():
    nodes = running(sizes=(1, 2, 4))
    nodes.lose(1, 3)
    nodes.again(0, 2)
    nodes.now += REJOIN_S + 1
    assert nodes.start() == (0, 2)
    nodes.join(3)
    assert not nodes.all.can_grow()
    nodes.join(1)
    assert nodes.all.can_grow()
    nodes.again(0, 2)
    assert nodes.start() == (0, 2, 1, 3)


def test_a_spare_whose_first_start_hangs_holds_nobody_up_for_long():
    nodes = Nodes(sizes=(3, 4), spares=1)
    nodes.join(0, 1, 2, 3)
    nodes.start()
    nodes.lose(1)
    nodes.again(0, 2, 3)
    nodes.now += REJOIN_S + 1
    assert nodes.choose() == (0, 2, 3)


def test_a_node_that_is_not_fit_is_left_out_but_may_tell_first_what_it_holds():
    nodes = Nodes(spares=1)
    nodes.join(0, 2, 3, 4)
    nodes.all.hello(1, "n1", "10.0.0.1", nodes.now)
    nodes.all.refused(1, "matmul gives wrong answers")
    assert nodes.choose() is None
    nodes.all.is_ready(1, 5001)
    assert nodes.start() == (0, 4, 2, 3)
    nodes.lose(4)
    nodes.again(0, 2, 3)
    nodes.now += REJOIN_S + 1
    assert nodes.choose() is None  # it does not come in by the back door


def test_it_is_hopeless_when_too_few_can_ever_come_and_the_reasons_are_told():
    nodes = Nodes(sizes=(3, 4))
    nodes.join(0, 1)
    for _ in range(LAUNCH_ATTEMPTS):
        nodes.lose(2)
    assert nodes.all.hopeless(nodes.now) is None
    nodes.all.refused(3, "the disk of node 3 is full")
    why = nodes.all.hopeless(nodes.now)
    assert why is not None
    assert (
        why == "the disk of node 3 is full; the agent of node 2 does not start (gone); a generation takes 3 nodes, and there are 2"
    )


def test_nodes_that_never_come_are_given_up_in_the_end():
    nodes = Nodes()
    nodes.join(0, 1, 2)
    assert nodes.all.hopeless(nodes.now + JOIN_S - 1) is None
    assert nodes.all.hopeless(nodes.now + JOIN_S) is not None


def test_nodes_that_may_come_back_are_waited_for_where_nothing_goes_without_them():
    nodes = Nodes(sizes=(1, 2), spares=0)
    nodes.join(0, 1)
    nodes.start()
    nodes.lose(0)
    nodes.lose(1)
    assert nodes.all.hopeless(nodes.now + REJOIN_S + 1) is None
    assert nodes.all.hopeless(nodes.now + BACK_S) is not None
    nodes.now += BACK_S - 1
    nodes.join(1)
    assert nodes.start() == (1,)


@pytest.mark.parametrize("seed", range(40))
def test_at_random_members_are_ready_distinct_of_a_size_that_may_be_and_ranks_stay_where_they_can(seed):
    chance = random.Random(seed)
    sizes, spares = tuple(sorted(chance.sample(range(1, 6), chance.randrange(1, 4)))), chance.randrange(3)
    nodes = Nodes(sizes, spares)
    slots = max(sizes) + spares
    nodes.join(*range(slots))
    before = nodes.start()
    for _ in range(60):
        nodes.now += chance.expovariate(0.1)
        nodes.all.launches(nodes.now)
        node = chance.randrange(slots)
        if nodes.all.nodes[node].joined and chance.random() < 0.6:
            nodes.lose(node)
        elif not nodes.all.nodes[node].joined:
            nodes.join(node)
        nodes.again(*(each for each in before if nodes.all.nodes[each].joined))
        chosen = nodes.choose()
        ready = [each for each in range(slots) if nodes.all.nodes[each].ready]
        if chosen is None:
            assert len(ready) < max(sizes)
            continue
        assert len(chosen) in sizes
        assert set(chosen) <= set(ready)
        assert len(set(chosen)) == len(chosen)
        if len(chosen) == len(before):
            stayed = [each for each in before if each in ready]
            assert len(chosen) < max(sizes) or all(chosen.index(each) == before.index(each) for each in stayed)
        before = nodes.start()


def partial(spares: int = 0, least: int = 1) -> Nodes:
    """Four nodes of two ranks that compute, which go on with one as well."""
    nodes = Nodes(spares=spares)
    nodes.all = Membership(Rules(2, least, 1, tuple(range(1, 9))), spares, REJOIN_S)
    nodes.all.begin(nodes.now)
    nodes.all.launches(nodes.now)
    nodes.join(*range(4 + spares))
    assert nodes.start() == (0, 1, 2, 3) and nodes.all.assignment.world_size == 8
    return nodes


def test_a_node_goes_on_without_a_device_that_does_not_work_and_later_ranks_move_up():
    nodes = partial()
    assert nodes.all.leave_out(1, {0})
    assert nodes.all.computes_on_dead() == [1]
    nodes.again(0, 1, 2, 3)
    assert nodes.start() == (0, 1, 2, 3)
    assignment = nodes.all.assignment
    assert [assignment.ranks(node) for node in range(4)] == [range(2), range(2, 3), range(3, 5), range(5, 7)]
    assert (assignment.devices(0), assignment.devices(1), assignment.device_of(2)) == ((0, 1), (1,), 1)
    assert [assignment.node_rank_of(rank) for rank in range(7)] == [0, 0, 1, 2, 2, 3, 3]
    assert not nodes.all.computes_on_dead() and nodes.all.left_out() == {1: [0]} and not nodes.all.can_grow()


def test_a_spare_is_preferred_to_a_node_with_a_device_less_and_that_one_stands_by_for_those_that_are_lost():
    nodes = partial(spares=1)
    assert nodes.all.leave_out(1, {0})
    nodes.again(0, 1, 2, 3)
    assert nodes.start() == (0, 4, 2, 3) and nodes.all.assignment.world_size == 8
    assert nodes.all.spare() is None and not nodes.all.can_grow()
    nodes.lose(3)
    nodes.again(0, 4, 2)
    assert nodes.start() == (0, 4, 2, 1) and nodes.all.assignment.world_size == 7


def test_a_node_whose_agent_is_started_anew_has_all_its_devices():
    nodes = partial()
    assert nodes.all.leave_out(1, {0})
    nodes.lose(1)
    nodes.join(1)
    nodes.again(0, 2, 3)
    assert nodes.start() == (0, 1, 2, 3) and nodes.all.assignment.world_size == 8


def test_with_too_few_devices_left_nothing_is_left_out():
    nodes = partial(least=2)
    assert not nodes.all.leave_out(1, {0})
    assert nodes.all.left_out() == {} and not nodes.all.computes_on_dead()
    nodes = partial()
    assert nodes.all.leave_out(1, {0}) and not nodes.all.leave_out(1, {1})
    assert nodes.all.left_out() == {1: [0]}


@pytest.mark.parametrize("seed", range(30))
def test_whatever_dies_members_compute_on_devices_that_work_and_what_could_grow_does(seed: int):
    chance = random.Random(seed)
    nodes = partial(spares=2)
    for _ in range(20):
        node = chance.randrange(6)
        match chance.choice(["device", "device", "lost", "joined", "slow"]):
            case "device":
                nodes.all.leave_out(node, {chance.randrange(2)})
            case "lost":
                nodes.lose(node)
            case "joined" if not nodes.all.nodes[node].joined:
                nodes.join(node)
            case "slow":
                nodes.all.shun(node)
        nodes.now += 1000.0
        for turn in range(8):
            nodes.again(*[each for each in nodes.all.joined() if not nodes.all.nodes[each].unfit])
            members = nodes.choose()
            if members is None:
                break
            nodes.all.start(members)
            for member in members:
                used = nodes.all.assignment.devices(member)
                assert len(used) == len(nodes.all.assignment.ranks(member)) and not nodes.all.nodes[member].dead.intersection(used)
            assert sum(len(nodes.all.assignment.ranks(member)) for member in members) == nodes.all.assignment.world_size
            if not nodes.all.can_grow():
                break
            assert turn < 7, "it grows again and again"
