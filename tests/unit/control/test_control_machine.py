"""The control core against all that nodes, workers, the driver's shell and the network do to it."""

from control_machine import JobMachine
from mutation import run


def test_whatever_happens_the_invariants_of_a_job_hold() -> None:
    run(JobMachine, 150)
