"""Jobs of a real Slurm that end before the campaign does, in every way in which jobs do: what is kept, and who goes on."""

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import injectors
import psutil
import pytest
from browser import looked_at
from campaigns import HELD, STEPS, Campaign, finished, same, wait_for
from lab_jobs import CODE, LabJob, begin_again, on
from reported import agreed
from soak import soaked

from chaos.lab.lab import Lab
from resilient.slurm.hosts import expand

NEVER = 1000  # a step that no run reaches
PATIENCE_S = 500.0
UNFINISHED = {"RUNNING", "PENDING", "SIGNALING", "COMPLETING", "CONFIGURING"}


class Chain(LabJob):
    """A campaign that `resilient submit` has run, in as many jobs as it takes."""

    def command(self, *words: str) -> str:
        """What `resilient` prints where jobs are submitted."""
        there = ["env", f"--chdir={self.directory}", f"PYTHONPATH={CODE}", "COLUMNS=200"]  # where its jobs work, too
        return on(self.lab, "ctl", *there, sys.executable, "-m", "resilient", *words)

    def submit(self) -> str:
        return self.command("submit", str(self.path))

    def excluded(self, job_id: str) -> str:
        """The hosts that a job is not to get."""
        told = self.lab.controller.ask("scontrol", "--oneliner", "show", "job", job_id) or ""
        return dict(word.split("=", 1) for word in told.split() if "=" in word).get("ExcNodeList", "")

    def queue(self) -> dict[str, str]:
        """State by id of all jobs that Slurm remembers."""
        told = self.lab.controller.ask("squeue", "--noheader", "--states=all", "--format=%i %T") or ""
        return dict(line.split() for line in told.splitlines())

    def running(self) -> list[str]:
        return [job for job, state in self.queue().items() if state == "RUNNING"]

    def waiting(self) -> list[str]:
        return [job for job, state in self.queue().items() if state == "PENDING"]

    def reach(self, step: int) -> None:
        wait_for(lambda: self.step() >= step, lambda: f"step {step}: {self.queue()}\n{self.told()}", PATIENCE_S)

    def unfinished(self) -> bool:
        """Whether anything of it is in the queue; where Slurm does not answer, it may be."""
        states = set(self.queue().values())
        return not states or bool(states & UNFINISHED)

    def wait_for_the_end(self, patience_s: float = PATIENCE_S) -> None:
        """Until nothing of it is in the queue."""
        wait_for(lambda: not self.unfinished(), lambda: f"the end of the chain: {self.queue()}\n{self.told()}", patience_s)

    def told(self) -> str:
        return "\n".join(path.read_text() for path in self.run_dir.glob("logs/job-*.out")) + self.logs()

    def codes(self) -> list[int]:
        return [event["exit_code"] for event in self.events("run_finished")]


def _config(dataset: Path, step_s: float, **changes: Any) -> dict[str, Any]:
    durable = {"name": "durable", "path": "${run_dir}/checkpoints", "keep_last": 4}
    return {
        "entrypoint": "paced:train",
        "args": {"step_s": step_s},
        "cluster": {"nodes": 2, "procs_per_node": 1, "threads_per_proc": 1, "device": "cpu"},
        "model": {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 64},
        "data": {"path": str(dataset)},
        "train": {"steps": STEPS, "global_batch_size": 8, "micro_batch_size": 2, "eval_interval": NEVER},
        "checkpoint": {"every_steps": NEVER, "tiers": [{"name": "ram", "path": "/dev/shm"}, durable]},
        **changes,
    }


@pytest.fixture
def jobs(patient: Lab, dataset: Path, tmp_path: Path) -> Callable[..., Any]:
    """A campaign on two hosts that takes `step_s` for a step, as a job or a chain of them."""

    def make(kind: type[LabJob], step_s: float, name: str = "job", **changes: Any) -> LabJob:
        (tmp_path / name).mkdir()
        return kind(patient, tmp_path / name, **_config(dataset, step_s, **changes))

    return make


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Campaign:
    """The same campaign on this machine alone, at a stretch."""
    return finished(tmp_path_factory, "long", STEPS, **_config(dataset, 0.0))


def computed_once(run: Campaign) -> None:
    """Not one step was lost, and not one computed twice, from job to job."""
    assert [line["step"] for line in run.metrics()] == list(range(1, STEPS + 1))
    stops = {event["step"] for event in run.events("drain")} - {STEPS}  # the last job may be told to stop in its last step
    assert {event["resumed_step"] for event in run.events("generation_started")} == {0, *stops}


def exclusive(**slurm: Any) -> dict[str, Any]:
    return {"slurm": {"extra": ["--exclusive"], **slurm}}


@pytest.mark.soak
def test_a_job_that_is_cancelled_saves_its_state_and_the_next_one_goes_on(jobs: Callable[..., Any], long: Campaign):
    run = jobs(Chain, 0.5, **exclusive())
    run.submit()
    run.reach(5)
    (first,), (second,) = run.running(), wait_for(run.waiting, "a successor")
    on(run.lab, "ctl", "scancel", first)
    wait_for(lambda: second in run.running(), f"the next job\n{run.told()}", PATIENCE_S)
    run.wait_for_the_end()
    assert run.codes() == [75, 0], run.told()
    assert [event["signal"] for event in run.events("drain")] == ["SIGTERM"]
    computed_once(run)
    same(run, long)


@pytest.mark.soak
def test_a_job_that_is_requeued_saves_its_state_and_goes_on_itself(jobs: Callable[..., Any], long: Campaign):
    run = jobs(Chain, 0.5, **exclusive(requeue=True))
    run.submit()
    run.reach(5)
    (first,), (second,) = run.running(), wait_for(run.waiting, "a successor")
    on(run.lab, "ctl", "scontrol", "requeue", first)
    wait_for(lambda: first in run.waiting(), f"the job to be in the queue again\n{run.told()}", PATIENCE_S)
    begin_again(run.lab, first)
    run.wait_for_the_end()
    assert run.codes() == [75, 0], run.told()
    assert f"Job {first} goes back into the queue, and goes on from here." in run.told()
    assert run.queue()[second] == "CANCELLED"
    computed_once(run)
    same(run, long)


@pytest.mark.soak
def test_a_job_that_is_preempted_saves_its_state_and_the_next_one_goes_on(jobs: Callable[..., Any], long: Campaign, tmp_path: Path):
    run = jobs(Chain, 0.5, **exclusive())
    run.submit()
    run.reach(5)
    wait_for(run.waiting, "a successor")
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/sh\n")
    options = ["--partition=urgent", "--nodes=4", "--exclusive", f"--output={tmp_path / 'urgent.out'}"]
    on(run.lab, "ctl", "sbatch", *options, str(urgent))
    run.wait_for_the_end()
    assert run.codes() == [75, 0], run.told()
    assert [event["kind"] for event in run.events("fault")] == ["preempted"]
    computed_once(run)
    same(run, long)


@pytest.mark.soak
def test_a_job_of_its_own_that_is_preempted_is_put_back_and_goes_on(jobs: Callable[..., Any], long: Campaign, tmp_path: Path):
    run = jobs(LabJob, 0.5)
    run.start()
    wait_for(lambda: run.step() >= 5, f"five steps: {run.state()}\n{run.logs()}", PATIENCE_S)
    options = ["--partition=urgent", "--nodes=4", "--exclusive", f"--output={tmp_path / 'urgent.out'}", "--wrap=true"]
    on(run.lab, "ctl", "sbatch", *options)
    wait_for(lambda: run.state()["JobState"] == "PENDING", lambda: f"the job to be in the queue again: {run.state()}", PATIENCE_S)
    begin_again(run.lab, run.job_id)
    assert run.wait(PATIENCE_S) == 0, run.output + run.logs()
    assert run.state()["Restarts"] == "1"
    assert f"Job {run.job_id} goes back into the queue, and goes on from here." in run.output
    computed_once(run)
    same(run, long)


@pytest.mark.parametrize("signal", [[], soaked(["--signal=B:USR1@20"])], ids=["none asked for", "USR1"])
def test_a_job_stops_in_time_before_its_limit_whether_a_signal_is_asked_for_or_not(
    jobs: Callable[..., Any], long: Campaign, signal: list[str]
):
    run = jobs(LabJob, 1.5)
    run.options = ["--partition=limited", *signal]
    run.start()
    assert run.wait(PATIENCE_S) == 75, f"{run.state()}\n{run.output}{run.logs()}"
    assert [event["signal"] for event in run.events("drain")] == ["time_limit"]
    assert run.state()["JobState"] == "FAILED"  # by its exit code, and not for want of time
    run.options = []
    run.start("args.step_s=0.0")
    assert run.wait(PATIENCE_S) == 0, run.output + run.logs()
    computed_once(run)
    same(run, long)


@pytest.mark.soak
def test_a_job_whose_limit_is_cut_short_stops_in_time(jobs: Callable[..., Any], long: Campaign):
    run = jobs(LabJob, 1.5, chaos={"allow": True})
    run.start()
    wait_for(lambda: run.step() >= 2, f"two steps: {run.state()}\n{run.logs()}", PATIENCE_S)
    before = run.state()["TimeLimit"]
    shown = injectors.strike(run, "time_limit", within=run.lab.command([], host=run.hosts()[0]), in_s=1.0)
    assert run.wait(PATIENCE_S) == 75, f"{run.state()}\n{run.output}{run.logs()}"
    assert (shown["before"], shown["state"]) == (before, "ended")
    assert [event["signal"] for event in run.events("drain")] == ["time_limit"]
    assert run.state()["JobState"] == "FAILED"
    run.start("args.step_s=0.0")
    assert run.wait(PATIENCE_S) == 0, run.output + run.logs()
    computed_once(run)
    same(run, long)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_a_chain_of_jobs_with_a_limit_of_a_minute_reaches_its_target_by_itself(jobs: Callable[..., Any], long: Campaign):
    # At that pace no job comes further than that: four jobs.
    run = jobs(Chain, 3.4, **exclusive(partition="limited", time_min=1))
    run.submit()
    run.wait_for_the_end(1200.0)
    codes = run.codes()
    assert codes == [75] * (len(codes) - 1) + [0], run.told()
    assert len(codes) >= 4
    assert {event["signal"] for event in run.events("drain")} == {"time_limit"}
    computed_once(run)
    same(run, long)
    assert f"jobs.{len(codes) - 1}.step" in agreed(run.run_dir, run.directory / "page.html")
    looked_at(run.directory / "page.html", profile=run.directory / "browser")


@pytest.mark.soak
def test_a_controller_that_is_killed_and_started_again_in_mid_run_is_not_noticed(jobs: Callable[..., Any], long: Campaign):
    run = jobs(Chain, 1.0, **exclusive())
    run.submit()
    run.reach(3)
    (successor,) = wait_for(run.waiting, "a successor")
    run.lab.controller.kill_controller()
    run.reach(run.step() + 5)
    run.lab.controller.start_controller()
    run.wait_for_the_end()
    assert run.codes() == [0], run.told()
    assert run.queue()[successor] == "CANCELLED"
    assert not run.events("fault")
    computed_once(run)
    same(run, long)


@pytest.mark.soak
def test_two_that_submit_a_campaign_at_once_make_one_chain(jobs: Callable[..., Any], long: Campaign):
    run = jobs(Chain, 0.0, **exclusive())
    on(run.lab, "ctl", "scontrol", "update", "partition=lab", "state=down")  # so that nothing starts before both have come
    with ThreadPoolExecutor() as pool:
        told = sorted(each.result() for each in [pool.submit(run.submit) for _ in range(2)])
    (first,) = run.waiting()
    assert [f"submitted as job {first}" in each for each in told] == [False, True], told
    assert f"in the queue already: {first}" in told[0]
    on(run.lab, "ctl", "scontrol", "update", "partition=lab", "state=up")
    run.wait_for_the_end()
    assert sorted(run.queue().values()) == ["CANCELLED", "COMPLETED"]
    assert run.codes() == [0], run.told()
    same(run, long)


@pytest.mark.soak
@pytest.mark.parametrize("requeue", [False, soaked(True)], ids=["its successor", "itself"])
def test_a_job_whose_batch_host_is_gone_is_followed_by(jobs: Callable[..., Any], long: Campaign, requeue: bool):
    run = jobs(
        Chain, 0.5, **exclusive(requeue=requeue), checkpoint={"every_steps": 5}, resilience={"fence_s": 10, "link_grace_s": 10}
    )
    run.submit()
    run.reach(8)
    (first,), (second,) = run.running(), wait_for(run.waiting, "a successor")
    run.lab.crash("n1")
    if requeue:
        wait_for(lambda: first in run.waiting(), f"the job to be in the queue again\n{run.told()}", PATIENCE_S)
        begin_again(run.lab, first)
    run.wait_for_the_end()
    assert run.codes() == [0], run.told()  # of the one that the host took along, nobody could tell any
    ended = {first: "COMPLETED", second: "CANCELLED"} if requeue else {first: "CANCELLED", second: "COMPLETED", "3": "CANCELLED"}
    assert run.queue() == ended
    again = run.events("generation_started")[-1]
    assert "n1" not in again["nodes"]
    assert again["resumed_step"] >= 5
    same(run, long)


@pytest.mark.soak
def test_a_job_whose_driver_slurm_kills_after_the_batch_host_was_away_begins_again(jobs: Callable[..., Any], long: Campaign):
    run = jobs(
        LabJob,
        0.5,
        args={"step_s": 0.5, "holds": STEPS - 5},
        checkpoint={"every_steps": 5},
        resilience={**HELD, "fence_s": 300, "link_grace_s": 10},
    )
    run.options = ["--requeue"]
    run.start()
    wait_for(lambda: run.step() >= 8, lambda: f"eight steps: {run.state()}\n{run.logs()}", PATIENCE_S)
    batch_host = run.hosts()[0]
    host = run.lab.host(batch_host)
    for pid in host.processes():
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).name() == "slurmd":
                psutil.Process(pid).kill()
    wait_for(lambda: batch_host not in expand(run.state()["NodeList"]), "Slurm to have lost the batch host", PATIENCE_S)
    run.lab.controller.start_node(host)
    wait_for(lambda: run.state()["JobState"] == "PENDING", lambda: f"the job to be in the queue again: {run.state()}", PATIENCE_S)
    run.go_on()
    begin_again(run.lab, run.job_id)
    assert run.wait(PATIENCE_S) == 0, run.output + run.logs()
    same(run, long)


def test_the_next_job_does_without_a_host_that_was_lost(jobs: Callable[..., Any]):
    run = jobs(
        Chain,
        0.5,
        **exclusive(),
        entrypoint="keeping:train",
        cluster={"nodes": 2, "min_nodes": 1, "procs_per_node": 1, "threads_per_proc": 1, "device": "cpu"},
        args={"step_s": 0.5, "holds": STEPS - 10},
        checkpoint={"every_steps": 2},
        resilience={**HELD, "link_grace_s": 10, "rejoin_s": 0},
    )
    run.submit()
    run.reach(5)
    (first,), (second,) = run.running(), wait_for(run.waiting, "a successor")
    run.lab.crash("n2")
    wait_for(lambda: run.excluded(second) == "n2", f"n2 to be left out\n{run.told()}", PATIENCE_S)
    run.lab.boot("n2")  # Slurm would give it to the next job again
    on(run.lab, "ctl", "scancel", first)
    run.go_on()
    run.wait_for_the_end()
    assert run.codes()[-1] == 0, run.told()
    began = run.events("run_started")[-1]["t"]
    members = [event["nodes"] for event in run.events("generation_started") if event["t"] > began]
    assert members and not any("n2" in each for each in members)
    (bad,) = json.loads((run.run_dir / "bad_nodes.json").read_text())
    assert (bad["host"], bad["until_t"] - bad["t"]) == ("n2", 24 * 3600)
    assert "without n2 until" in run.command("status", str(run.run_dir))
