"""Experiments on hosts of the lab: to their verdict, and killed on the way."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from campaigns import wait_for
from lab_jobs import CODE, RUNNING, on

import experiments
from chaos.lab.host import namespaces
from chaos.lab.lab import Lab
from chaos.verdict import machine

pytestmark = [pytest.mark.timeout(1500), pytest.mark.soak]


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Any]:
    yield from experiments.commands(tmp_path)


def test_links_that_fail_end_well(chaos: Any):
    assert chaos.run("links") == 0, chaos.printed + chaos.said()
    assert chaos.verdict()["ok"]
    assert not chaos.all_of_it()


def test_a_command_that_is_killed_at_any_moment_leaves_no_host_and_no_rule(chaos: Any, rounds: int):
    before = machine.inspect([chaos.directory])
    for number in range(rounds):
        chaos.out = chaos.directory / f"out{number}"
        chaos.start("links", "--seed", str(number))
        moment_s = random.Random(number).uniform(0.5, 40.0)
        with pytest.raises(subprocess.TimeoutExpired):
            chaos.process.wait(moment_s)
        labs = [name for name in namespaces() if f"chaos{chaos.process.pid}" in name]
        chaos.process.kill()
        chaos.process.wait()
        wait_for(lambda: not chaos.all_of_it(), f"left after {moment_s:.2f} s (round {number}): {chaos.all_of_it()}", 90.0)
        assert labs or moment_s < 10
        assert not [name for name in namespaces() if name in labs]
        assert not machine.changes(before, machine.inspect([chaos.directory]))


def test_an_experiment_within_a_job_breaks_both_of_its_hosts(lab: Lab, tmp_path: Path):
    config = {
        "entrypoint": "toys:count",
        "cluster": {"nodes": 2, "procs_per_node": 1, "device": "cpu", "threads_per_proc": 1},
        "train": {"steps": 1_000_000},
        "checkpoint": {"every_steps": 5},
    }
    faults = [
        {"fault": "worker_kill", "target": {"rank": 1}, "at": {"step": 30}},
        {"fault": "worker_stop", "target": {"rank": 1}, "with": {"seconds": 60}},
        {"fault": "worker_kill", "target": {"rank": 0}},
        {"fault": "agent_kill", "target": {"node": 1}},
        {"fault": "driver_kill"},
        {"fault": "sigterm"},
    ]
    campaign = {"config": config, "until": "faults"}
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(yaml.safe_dump({"name": "both", "steady_steps": 5, "campaign": campaign, "faults": faults}))
    within_a_job(lab, tmp_path, str(experiment))


def test_the_experiment_for_the_two_nodes_of_a_job_ends_well(lab: Lab, tmp_path: Path):
    within_a_job(lab, tmp_path, "two-nodes")


def within_a_job(lab: Lab, tmp_path: Path, experiment: str) -> None:
    """Run an experiment in a job of two hosts, both of which it is to break; it has to end well."""
    out, printed = tmp_path / "out", tmp_path / "printed"
    script = tmp_path / "job.sh"
    command = f"exec {sys.executable} -m chaos run {experiment} --out {out}"
    script.write_text(f"#!/bin/sh\nexport PYTHONPATH={CODE}\n{command}\n")
    options = ["--parsable", "--nodes=2", "--exclusive", "--no-kill", f"--output={printed}"]
    job = on(lab, "ctl", "sbatch", *options, str(script)).strip()

    def state() -> dict[str, str]:
        told = lab.controller.ask("scontrol", "--oneliner", "show", "job", job) or ""
        return dict(word.split("=", 1) for word in told.split() if "=" in word)

    wait_for(lambda: state().get("JobState", "PENDING") not in RUNNING, f"the end of the job: {printed}", 900.0)
    assert state()["ExitCode"] == "0:0", printed.read_text()
    told = json.loads((out / "verdict.json").read_text())
    assert told["ok"]
    assert {each["target"]["host"] for each in told["injections"]} == {"n1", "n2"}
