"""The control core against all that nodes, workers, the driver's shell and the network do to it."""

import pytest
from control_machine import JobMachine
from mutation import SEED, run


def test_whatever_happens_the_invariants_of_a_job_hold() -> None:
    run(JobMachine, 60, seed=SEED)


@pytest.mark.soak
def test_whatever_happens_for_long_the_invariants_of_a_job_hold() -> None:
    run(JobMachine, 1000)
