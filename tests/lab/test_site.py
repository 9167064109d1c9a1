"""What sites and their jobs differ in, on a real Slurm: containers, jobs of several components, jobs that give nodes back."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from campaigns import ROOT, Campaign, same, wait_for
from lab_jobs import LabJob

Jobs = Callable[..., LabJob]

PATIENCE_S = 400.0


def generations(run: LabJob) -> list[list[str]]:
    return [event["nodes"] for event in run.events("generation_started")]


@pytest.mark.soak
def test_agents_in_containers_compute_the_same(job: Jobs, reference: Campaign, tmp_path: Path):
    calls, programs, image = tmp_path / "calls", tmp_path / "bin", tmp_path / "image.sif"
    calls.mkdir()
    programs.mkdir()
    image.touch()
    (programs / "singularity").write_text(f"#!{sys.executable}\n{(ROOT / 'tests/fake_apptainer.py').read_text()}")
    (programs / "singularity").chmod(0o755)
    nvme = {"name": "nvme", "path": "/mnt/nvme/mine/too", "every_steps": 5}  # made on each host before it can be bound
    run = job(
        checkpoint={"every_steps": 10, "tiers": [nvme, {"name": "durable", "path": "${run_dir}/checkpoints"}]},
        slurm={"container": {"image": str(image), "python": sys.executable}},
    )
    run.script = f"export PATH={programs}:$PATH CONTAINER_CALLS={calls}\nexec $RUN"
    run.start()
    assert run.wait(PATIENCE_S) == 0, run.output + run.logs()
    same(run, reference)
    found = [json.loads(path.read_text()) for path in calls.glob("*.json")]
    assert [call["command"][call["command"].index("-m") + 1] for call in found] == ["resilient.agent"] * 3
    assert all("/mnt/nvme/mine/too" in call["--bind"] for call in found)


@pytest.mark.soak
def test_all_components_of_a_heterogeneous_job_compute_together(job: Jobs, reference: Campaign):
    run = job(cluster={"nodes": "auto"}, slurm={"cpu_bind": "none"})
    run.config["cluster"]["nodes"] = 1  # of the first component
    run.options = [":", "--nodes=2", "--exclusive", "--no-kill"]
    run.start()
    wait_for(lambda: "test is done" in (run.directory / "output").read_text(), f"the end\n{run.logs()}", PATIENCE_S)
    assert [sorted(each) for each in generations(run)] == [["n1", "n2", "n3"]]
    same(run, reference)


@pytest.mark.soak
def test_a_job_that_has_given_a_node_back_goes_on_with_the_others(job: Jobs):
    run = job(steps=20)
    run.script = "scontrol update JobId=$SLURM_JOB_ID NumNodes=2 && exec $RUN"
    run.start()
    assert run.wait(PATIENCE_S) == 0, run.output + run.logs()
    assert "the job has lost n3" in run.output
    assert generations(run) == [["n1", "n2"]]
