"""Sites: injectors go to hosts of the campaign's own allocation, and to no others."""

import socket
from pathlib import Path

import pytest

from chaos import faults
from chaos.fault import Need
from chaos.orchestration.sites import Here, InJob, place
from chaos.planning import why_not
from chaos.verdict.gathering import inspect, left
from resilient.config import load
from resilient.exits import EnvironmentUnusable
from resilient.slurm.allocation import Allocation


def test_outside_of_a_job_there_is_this_host_alone():
    assert Here().reach(socket.gethostname()) == []
    with pytest.raises(EnvironmentUnusable, match="the campaign runs on elsewhere") as error:
        Here().reach("elsewhere")
    assert error.value.code == 69


def test_in_a_job_its_nodes_are_reached_by_steps_of_it_and_no_others():
    site = InJob(Allocation("77", ("a1", "a2"), (4, 4), 0), "a1")
    assert site.reach("a1") == []
    step = site.reach("a2")
    assert step[:5] == ["srun", "--jobid", "77", "--overlap", "--nodelist"]
    assert "a2" in step
    with pytest.raises(EnvironmentUnusable, match="a3 is no node of job 77, which has a1, a2"):
        site.reach("a3")
    assert set(site.hosts()) == {"a1", "a2"}


def test_checkpoints_are_damaged_where_all_nodes_are_on_one_machine():
    """What nodes hold that is newer must be lost too, and an injector does that on its own machine."""
    jobs = [InJob(Allocation("77", hosts, (4,) * len(hosts), 0), "a1") for hosts in (("a1",), ("a1", "a2"))]
    needs = [each.has | {Need.ROOT, Need.SLURM} for each in (Here(), *jobs)]
    possible = [{fault for fault in faults.names() if not why_not(fault, has)} for has in needs]
    assert possible[0] == possible[1]
    assert possible[1] - possible[2] == {"flipped_byte", "torn_write", "missing_chunk", "stale_latest"}


def test_in_the_shell_of_salloc_on_a_login_node_no_node_of_the_job_is_this_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name, value in (("SLURM_JOB_ID", "77"), ("SLURM_JOB_NODELIST", "a[1-2]"), ("SLURM_JOB_CPUS_PER_NODE", "4(x2)")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    (tmp_path / "config.yaml").write_text(f"run_dir: {tmp_path}\ncluster: {{launcher: slurm, device: cpu, procs_per_node: 1}}\n")
    config = load(tmp_path / "config.yaml", [])
    assert [place(config).reach(host)[:1] for host in ("a1", "a2", socket.gethostname())] == [["srun"], ["srun"], []]
    assert set(place(config).hosts()) == {"", "a1", "a2"}
    monkeypatch.setenv("SLURMD_NODENAME", "a2")
    assert [place(config).reach(host)[:1] for host in ("a1", "a2")] == [["srun"], []]


def test_a_host_that_is_lost_already_is_left_out_of_the_verdict_and_one_that_is_lost_later_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    lost = ["sh", "-c", "echo a2 is down >&2; exit 1"]
    before = inspect([tmp_path], {"": (), "a2": lost})
    assert set(before) == {""}
    assert [record.getMessage() for record in caplog.records] == [
        "a2 cannot be inspected, and is left out of the verdict: a2 is down"
    ]
    assert left(tmp_path, [tmp_path], before, {"": (), "a2": lost})["machine"] == []
    assert left(tmp_path, [tmp_path], {**before, "a2": {}}, {"a2": lost})["machine"] == ["a2: cannot be inspected: a2 is down"]
