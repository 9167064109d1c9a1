"""Fixtures of labs and jobs; what they are made of is in `lab_jobs`. Where there can be no lab, its tests are skipped."""

import sys
from pathlib import Path

import pytest

# What campaigns are watched with is that of the tests beside these.
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from campaigns import dataset
from lab_jobs import bare, impatient, job, keeping, kept, lab, own_lab, patient, reference

from chaos.lab.needs import missing

__all__ = ["bare", "dataset", "impatient", "job", "keeping", "kept", "lab", "own_lab", "patient", "reference"]


COST_LIMIT_S = 120.0  # the daemons of four hosts included


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = missing(slurm=True)
    skip = pytest.mark.skip(reason=f"NOT TESTED HERE: hosts with a real Slurm need {'; and '.join(absent)}")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cost_limit_s(COST_LIMIT_S))
            if absent:
                item.add_marker(skip)
