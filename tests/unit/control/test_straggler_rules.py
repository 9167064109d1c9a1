"""Who is slower than the others, from how long, and whether somebody is told."""

from collections.abc import Sequence

import pytest
from control_play import beat

from resilient.control.liveness import WARM_STEPS
from resilient.control.stragglers import WINDOWS, Episode, Rules, Stragglers
from resilient.protocol.messages import Heartbeat

RULES = Rules(factor=1.5, window_steps=10)
STEP_S = 0.125


class Group:
    """Ranks that are told of in every step; the clock and their own times go on by what each step takes."""

    def __init__(self, place_ranks: int = 4, longer_ranks: int = 0) -> None:
        self.stragglers, self.places = Stragglers(RULES), (place_ranks, longer_ranks)
        self.restart()

    def restart(self) -> None:
        self.stragglers.begin(*self.places)
        self.step, self.t = 100, 0.0
        self.own: dict[int, float] = {}

    def steps(self, count: int, own_s: Sequence[float], step_s: float = STEP_S) -> list[Episode]:
        """So many steps in which each rank spends so much of its own."""
        found: list[Episode] = []
        for _ in range(count):
            self.step, self.t = self.step + 1, self.t + step_s
            for rank, seconds in enumerate(own_s):
                self.own[rank] = self.own.get(rank, 0.0) + seconds
                self.stragglers.on_heartbeat(rank, beat(self.step, self.t, own_s=self.own[rank]))
                found += self.stragglers.judge()
        return found

    def windows(self, count: int, own_s: Sequence[float], step_s: float = STEP_S) -> list[Episode]:
        return self.steps(count * RULES.window_steps, own_s, step_s)


def warm(place_ranks: int = 4, ranks: int = 4, longer_ranks: int = 0) -> Group:
    """Past the first steps, which are not measured."""
    group = Group(place_ranks, longer_ranks)
    assert not group.steps(WARM_STEPS + 1, [0.05] * ranks)
    return group


ALIKE = [0.05, 0.05, 0.05, 0.05]
SLOW = [0.05, 0.05, 0.08, 0.05]


def test_a_straggler_is_told_once_when_it_has_been_slow_for_long_enough():
    group = warm()
    assert not group.windows(WINDOWS - 1, SLOW)
    (found,) = group.windows(5, SLOW)
    assert (found.rank, found.over, found.number) == (2, False, 1)
    assert found.factor == pytest.approx(1.6) and found.usual_s == pytest.approx(0.05)
    fault = found.fault("g1-straggler-1", node=1)
    assert (fault.kind, fault.ranks, fault.nodes) == ("straggler", (2,), (1,))
    assert "rank 2 on node 1 needs 1.60 times as long" in fault.detail and "last 10 steps" in fault.detail
    assert fault.evidence == "own time of a step: rank 0 50.0 ms, rank 1 50.0 ms, rank 2 80.0 ms, rank 3 50.0 ms"


def test_the_end_of_an_episode_is_told_and_the_next_one_has_another_number():
    group = warm()
    (began,) = group.windows(3, SLOW)
    (over,) = group.windows(4, ALIKE)
    (again,) = group.windows(3, SLOW)
    assert [(each.rank, each.over, each.number) for each in (began, over, again)] == [(2, False, 1), (2, True, 1), (2, False, 2)]


@pytest.mark.parametrize(
    ("own_s", "step_s"),
    [
        (ALIKE, STEP_S),
        ([0.05, 0.05, 0.07, 0.05], STEP_S),
        ([0.001, 0.001, 0.004, 0.001], STEP_S),
        ([0.01, 0.08, 0.08, 0.08], STEP_S),
        ([0.001, 0.001, 0.009, 0.001], 0.01),
        ([0.0, 0.0, 0.0, 0.0], STEP_S),
    ],
    ids=["alike", "below the factor", "nobody waits for it", "one is quicker", "tiny steps", "nothing is measured"],
)
def test_who_is_no_straggler(own_s: Sequence[float], step_s: float):
    assert not warm().windows(6, own_s, step_s)


def test_all_ranks_of_a_slow_node_are_named():
    assert [each.rank for each in warm().windows(3, [0.05, 0.05, 0.08, 0.08])] == [2, 3]


def test_one_slow_window_among_others_is_none():
    group = warm()
    for _ in range(5):
        assert not group.windows(1, SLOW) and not group.windows(1, ALIKE)


def test_between_slow_and_well_an_episode_goes_on():
    group = warm()
    assert len(group.windows(3, SLOW)) == 1
    assert not group.windows(6, [0.05, 0.05, 0.07, 0.05])  # neither found anew nor over


def test_of_two_ranks_the_slower_one_is_named():
    assert [each.rank for each in warm(ranks=2).windows(3, [0.1, 0.05], step_s=0.12)] == [0]


def test_the_stages_of_a_pipeline_are_not_compared_with_each_other():
    assert not warm(place_ranks=2).windows(4, [0.02, 0.02, 0.06, 0.06])
    assert [each.rank for each in warm(place_ranks=2).windows(4, [0.02, 0.02, 0.06, 0.1])] == [3]


def test_replicas_that_have_a_micro_batch_more_are_not_compared_with_those_that_have_fewer():
    uneven = [0.08, 0.08, 0.04, 0.04]  # two micro batches, and one
    assert not warm(longer_ranks=2).windows(4, uneven)
    assert [each.rank for each in warm().windows(3, uneven)] == [0, 1]
    assert [each.rank for each in warm(longer_ranks=2).windows(3, [0.08, 0.08, 0.04, 0.07])] == [3]
    stages = warm(place_ranks=3, ranks=6, longer_ranks=1)
    assert not stages.windows(4, [0.08, 0.04, 0.04, 0.1, 0.05, 0.05])
    assert [each.rank for each in stages.windows(3, [0.08, 0.04, 0.08, 0.1, 0.05, 0.05])] == [2]


def test_a_rank_alone_in_its_stage_is_compared_with_its_own_past_as_the_others_changed():
    group = warm(place_ranks=1, ranks=3)
    assert not group.windows(3, [0.02, 0.06, 0.04])
    assert not group.windows(3, [0.04, 0.12, 0.08])  # longer sequences: all need twice as long
    (found,) = group.windows(3, [0.04, 0.12, 0.16], step_s=0.2)
    assert (found.rank, found.usual_s) == (2, pytest.approx(0.08))


def test_a_window_is_no_shorter_than_a_second():
    group = warm()
    quick = [0.01, 0.01, 0.05, 0.01]
    assert not group.windows(WINDOWS, quick, step_s=0.05)  # half a second each
    assert len(group.windows(2 * WINDOWS, quick, step_s=0.05)) == 1


def test_the_first_steps_are_not_measured():
    group = Group()
    assert not group.steps(WARM_STEPS + 1, [0.05, 0.05, 9.0, 0.05])
    assert not group.windows(WINDOWS, ALIKE)


def test_a_new_generation_starts_from_nothing():
    group = warm()
    assert not group.windows(WINDOWS - 1, SLOW)
    group.restart()
    assert not group.steps(WARM_STEPS + 1, ALIKE)
    assert not group.windows(WINDOWS - 1, SLOW)
    assert len(group.windows(1, SLOW)) == 1


@pytest.mark.parametrize("heartbeat", [beat(5, 1.0), beat(-1, own_s=1.0)])
def test_a_rank_of_which_nothing_is_known_is_not_judged(heartbeat: Heartbeat):
    group = Group()
    group.stragglers.on_heartbeat(0, heartbeat)
    assert not group.stragglers.judge()
