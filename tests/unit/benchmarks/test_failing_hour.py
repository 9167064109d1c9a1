"""An hour in which nodes fail, in virtual time: stretches that can be added up by hand."""

import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# Not to be left on the path: benchmarks/trainer.py would be the package `trainer`.
sys.path.insert(0, str(ROOT / "benchmarks"))
try:
    from failing_hour import Failures, goodput, moments
finally:
    sys.path.remove(str(ROOT / "benchmarks"))

UNEVEN, EVEN, NOBODY = {4: 1.0, 3: 0.75, 2: 0.5}, {4: 1.0, 2: 0.5}, {4: 1.0}


@pytest.mark.parametrize(
    ("rates", "failed", "pause_s", "done_s"),
    [
        (UNEVEN, [], 60, 3600),
        (UNEVEN, [1000], 0, 3000 + 0.75 * 600),
        (EVEN, [1000], 0, 3000 + 0.5 * 600),
        (NOBODY, [1000], 0, 3000),
        (UNEVEN, [1000], 60, 3000 - 60 + 0.75 * 540),  # at the loss and at the return all start again
        (NOBODY, [1000], 60, 3000 - 60),
        (UNEVEN, [1000, 1300], 0, 1000 + 0.75 * 300 + 0.5 * 300 + 0.75 * 300 + 1700),
        (EVEN, [1000, 1300], 0, 1000 + 0.5 * 900 + 1700),
        (UNEVEN, [1000, 1030], 60, 1000 + 0.5 * (1600 - 1090) + 3600 - 1690),  # what meets is one pause, here and at the end
        (UNEVEN, [3300], 0, 3300 + 0.75 * 300),  # it is not back before the end
    ],
)
def test_what_is_done_is_the_sum_of_its_stretches(rates: dict[int, float], failed: list[float], pause_s: float, done_s: float):
    failures = Failures(every_s=1200, back_s=600, pause_s=pause_s)
    assert goodput(4, rates, failed, failures, 3600) == pytest.approx(done_s / 3600)


def test_failures_come_as_often_as_asked_for():
    chance = random.Random(0)
    counts = [len(moments(Failures(1200, 600, 15), 3600, chance)) for _ in range(2000)]
    assert 2.8 < sum(counts) / len(counts) < 3.2
