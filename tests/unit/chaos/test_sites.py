"""Sites: injectors go to hosts of the campaign's own allocation, and to no others."""

import socket

import pytest

from chaos.orchestration.sites import Here, InJob
from resilient.exits import EnvironmentUnusable
from resilient.slurm.allocation import Allocation


def test_outside_of_a_job_there_is_this_host_alone():
    assert Here().reach(socket.gethostname()) == []
    with pytest.raises(EnvironmentUnusable, match="the campaign runs on elsewhere") as error:
        Here().reach("elsewhere")
    assert error.value.code == 69


def test_in_a_job_its_nodes_are_reached_by_steps_of_it_and_no_others():
    site = InJob(Allocation("77", ("a1", "a2"), (4, 4), 0))
    assert site.reach("a1") == []
    step = site.reach("a2")
    assert step[:5] == ["srun", "--jobid", "77", "--overlap", "--nodelist"]
    assert "a2" in step
    with pytest.raises(EnvironmentUnusable, match="a3 is no node of job 77, which has a1, a2"):
        site.reach("a3")
    assert set(site.hosts()) == {"a1", "a2"}
