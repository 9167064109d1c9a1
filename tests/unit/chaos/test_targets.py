"""Whom a fault finds: nobody who has ended, and who ends meanwhile is not hit, which is answered."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from leases import write_lease

from chaos.fault import CannotInject
from chaos.injectors.context import InjectionContext, Target
from chaos.injectors.guard import Guard
from chaos.injectors.injector import InjectionRequest
from chaos.primitives.processes import end, end_at_once
from resilient.agent.memory import region_directory
from resilient.config import dump, load
from resilient.heartbeat.agent_side import AgentRegion
from resilient.heartbeat.worker_side import WorkerRegion


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a campaign that allows faults, and runs nowhere."""
    path = tmp_path / "config.yaml"
    path.write_text(f"run_dir: {tmp_path}\ncluster: {{device: cpu, procs_per_node: 1}}\nchaos: {{allow: true}}\n")
    path.write_text(dump(load(path, [])))
    return tmp_path


@pytest.fixture
def ended() -> Iterator[int]:
    """Somebody whose status nobody has asked for yet."""
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


def test_who_has_ended_is_not_there_to_be_hit(run_dir: Path, ended: int):
    write_lease(run_dir, ended)
    with Guard() as guard, pytest.raises(CannotInject, match="no driver here"):
        InjectionContext(run_dir, load(run_dir / "config.yaml", []), Target(), guard).driver()
    with pytest.raises(CannotInject, match="has ended by itself"):
        end(psutil.Process(ended))
    assert end_at_once([psutil.Process(ended)]) == []


def test_a_driver_of_another_pid_namespace_is_not_the_process_of_its_number_here(run_dir: Path):
    write_lease(run_dir, os.getpid(), namespace=1)
    with Guard() as guard, pytest.raises(CannotInject, match="no driver here"):
        InjectionContext(run_dir, load(run_dir / "config.yaml", []), Target(), guard).driver()
    write_lease(run_dir, os.getpid())
    with Guard() as guard:
        assert InjectionContext(run_dir, load(run_dir / "config.yaml", []), Target(), guard).driver().pid == os.getpid()


def test_who_has_the_number_of_a_rank_that_its_killed_agent_has_left_is_not_hit(run_dir: Path):
    regions = region_directory(run_dir, 0)
    regions.mkdir(mode=0o700)
    page = AgentRegion(regions / "g1-rank0")
    WorkerRegion(regions / "g1-rank0").close()  # of this process, which no agent has started
    try:
        with Guard() as guard:
            context = InjectionContext(run_dir, load(run_dir / "config.yaml", []), Target(rank=0), guard)
            assert context.activities()[0].pid == os.getpid()
            with pytest.raises(CannotInject, match="rank 0 does not run here"):
                context.worker()
    finally:
        page.close()
        regions.rmdir()


def test_what_is_not_there_any_more_when_it_is_needed_is_answered(run_dir: Path):
    driver = subprocess.Popen(
        ["/bin/sleep", "600"], env={"SLURM_JOB_ID": "7", "PATH": str(run_dir)}
    )  # in which there is no scontrol
    write_lease(run_dir, driver.pid)
    line = InjectionRequest("1", "time_limit", run_dir, Target()).line()
    done = subprocess.run(
        [sys.executable, "-m", "chaos.injectors.injector"], input=line, capture_output=True, text=True, check=False
    )
    driver.kill()
    driver.wait()
    assert "scontrol" in done.stdout.splitlines()[-1]
    assert '"failed"' in done.stdout
    assert (done.returncode, done.stderr) == (1, "")
