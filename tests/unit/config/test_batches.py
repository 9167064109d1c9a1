"""The global batch over the course of training, as a sum: what so many steps consume, and how many steps so many samples are."""

from hypothesis import given
from hypothesis import strategies as st

from resilient.config.batches import BatchSizes

RAMPS = st.builds(BatchSizes, st.integers(1, 60), st.integers(1, 70), st.integers(1, 30), st.integers(0, 500))


@given(ramp=RAMPS, count=st.integers(0, 200))
def test_what_steps_consume_is_the_sum_of_their_batches(ramp: BatchSizes, count: int):
    total = 0
    for _ in range(count):
        total += ramp.at(total)
    assert ramp.consumed(count) == total


@given(ramp=RAMPS, samples=st.integers(0, 2000))
def test_steps_are_as_many_as_whole_batches_fit(ramp: BatchSizes, samples: int):
    count = ramp.steps(samples)
    assert count == 1 or ramp.consumed(count) <= samples
    assert ramp.consumed(count + 1) > samples


def test_a_ramp_up_of_any_length_is_summed_at_once():
    ramp = BatchSizes(1536, 16, 16, 10**15)
    count = ramp.steps(10**16)
    assert ramp.consumed(count) <= 10**16 < ramp.consumed(count + 1)
