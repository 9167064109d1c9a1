"""How micro batches are dealt out: each to one replica, evenly, in passes that the replicas can run together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.config.dealing import Dealing

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
DEALINGS = st.builds(Dealing, st.integers(1, 40), st.integers(1, 6), st.sampled_from(SCHEDULES), st.integers(1, 3))


@given(DEALINGS, st.integers(1, 200))
def test_every_micro_batch_has_one_replica_and_replicas_differ_by_one_at_most(dealing: Dealing, count: int):
    own = [dealing.own(count, replica) for replica in range(dealing.dp)]
    assert sorted(number for numbers in own for number in numbers) == list(range(count))
    sizes = [len(each) for each in own]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == dealing.most(count)
    assert sizes.count(max(sizes)) == dealing.fuller(count)


@given(DEALINGS, st.integers(1, 200))
def test_a_replica_has_passes_for_its_micro_batches_and_no_more_empty_ones_than_are_asked_for(dealing: Dealing, count: int):
    for replica in range(dealing.dp):
        own, passes = len(dealing.own(count, replica)), dealing.passes(count, replica)
        assert passes >= max(1, own)
        if dealing.alike:
            assert passes == dealing.passes(count, 0)
        elif dealing.pp == 1:
            assert passes == max(1, own)
        if dealing.pp == 1:
            continue
        if dealing.schedule in ("gpipe", "1f1b"):
            assert passes >= dealing.pp  # PyTorch refuses fewer
            assert passes == max(dealing.pp, own if dealing.zero_stage < 3 else dealing.most(count))
        else:
            assert passes % max(1, passes // dealing.pp) == 0  # PyTorch's rounds
            assert passes < dealing.most(count) + dealing.pp


@given(DEALINGS, st.integers(1, 40))
def test_where_the_replicas_divide_the_batch_nothing_is_empty(dealing: Dealing, share: int):
    count = share * dealing.dp
    fits = dealing.pp == 1 or (share >= dealing.pp if dealing.schedule in ("gpipe", "1f1b") else share % dealing.pp == 0)
    assert dealing.fuller(count) == dealing.dp
    assert dealing.longer(count) == 0
    assert not fits or {dealing.passes(count, replica) for replica in range(dealing.dp)} == {share}


@pytest.mark.parametrize(
    ("pp", "schedule", "zero_stage", "passes", "longer"),
    [
        (1, "1f1b", 1, [4, 3, 3], 1),
        (1, "1f1b", 2, [4, 4, 4], 0),
        (1, "1f1b", 3, [4, 4, 4], 0),
        (2, "1f1b", 1, [4, 3, 3], 1),
        (2, "gpipe", 2, [4, 3, 3], 1),
        (2, "gpipe", 3, [4, 4, 4], 0),
        (4, "1f1b", 1, [4, 4, 4], 0),
        (2, "interleaved_1f1b", 1, [4, 4, 4], 0),
        (3, "zero_bubble", 1, [4, 4, 4], 0),
        (2, "zero_bubble", 2, [4, 4, 4], 0),
    ],
)
def test_ten_micro_batches_of_three_replicas(pp: int, schedule: str, zero_stage: int, passes: list[int], longer: int):
    dealing = Dealing(3, pp, schedule, zero_stage)
    assert [dealing.passes(10, replica) for replica in range(3)] == passes
    assert dealing.longer(10) == longer


def test_pipelines_whose_batches_grow_run_as_many_passes_on_all_replicas():
    assert [Dealing(3, 2, "1f1b", 1, ramped=True).passes(10, replica) for replica in range(3)] == [4, 4, 4]
    assert [Dealing(3, 1, "1f1b", 1, ramped=True).passes(10, replica) for replica in range(3)] == [4, 3, 3]


def test_rounds_are_filled_up():
    assert Dealing(2, 2, "interleaved_1f1b", 1).passes(10, 1) == 6  # 5 would be rounds of 2 and a half
    assert Dealing(4, 2, "interleaved_1f1b", 1).passes(4, 3) == 1  # a round may be shorter than the pipeline
