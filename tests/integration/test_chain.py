"""A chain of jobs that reaches its target by itself: the real commands and drivers, under a scheduler in small.

The scheduler starts jobs whose dependencies are met, one of a name at a time, and ends them at their limit as Slurm does. The real
Slurm is for the lab.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from campaigns import Campaign, wait_for
from reported import agreed
from soak import soaked

KILL_WAIT_S = 42.0  # as the fake scontrol says
Counting = Callable[..., Campaign]


class Scheduler:
    """Runs what the fake sbatch has put into the queue."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ends: dict[str, float] = {}
        self.told: set[str] = set()  # to end
        self.codes: list[int] = []
        self.most = 0  # jobs that ran at once
        self.limits_s = [600.0]  # of one job after the other; the last holds for all that follow
        self.over = threading.Event()
        (state / "queue.json").write_text("[]")
        self.thread = threading.Thread(target=self.work)
        self.thread.start()

    def work(self) -> None:
        while not self.over.wait(0.05):
            with (self.state / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                queue = json.loads((self.state / "queue.json").read_text())
                for job in queue:
                    self.look(job, queue)
                (self.state / "queue.json").write_text(json.dumps(queue))
                self.most = max(self.most, sum(job["state"] == "RUNNING" for job in queue))

    def look(self, job: dict[str, Any], queue: list[dict[str, Any]]) -> None:
        now, process = time.time(), self.processes.get(job["id"])
        if process is None:
            if job["state"] == "PENDING" and self.may_start(job, queue):
                self.start(job, now)
            return
        if process.poll() is not None:
            if job["state"] != "COMPLETED":
                self.codes.append(process.returncode)
            job["state"] = "COMPLETED"
        elif job["state"] == "CANCELLED" or now > self.ends[job["id"]]:
            if job["id"] not in self.told:
                self.told.add(job["id"])
                process.terminate()
            if now > self.ends[job["id"]] + KILL_WAIT_S:
                process.kill()
        for name in job.pop("signals", []):
            process.send_signal(signal.Signals[f"SIG{name}"])

    def may_start(self, job: dict[str, Any], queue: list[dict[str, Any]]) -> bool:
        for dependency in job["dependency"].split(","):
            kind, _, after = dependency.partition(":")
            for other in queue:
                same = (
                    other["name"] == job["name"] and int(other["id"]) < int(job["id"])
                    if kind == "singleton"
                    else other["id"] == after
                )
                if same and other["state"] not in ("COMPLETED", "CANCELLED"):
                    return False
        return True

    def start(self, job: dict[str, Any], now: float) -> None:
        told = {
            "SLURM_JOB_ID": job["id"],
            "SLURM_JOB_NAME": job["name"],
            "SLURM_JOB_NODELIST": socket.gethostname(),
            "SLURM_JOB_CPUS_PER_NODE": "2",
        }
        out = (self.state / f"{job['id']}.out").open("w")
        with out:
            self.processes[job["id"]] = subprocess.Popen(
                ["bash", job["script"]], env={**os.environ, **told}, stdout=out, stderr=out, start_new_session=True
            )
        end = self.ends[job["id"]] = now + (self.limits_s.pop(0) if len(self.limits_s) > 1 else self.limits_s[0])
        job |= {"state": "RUNNING", "end": datetime.fromtimestamp(end).isoformat(timespec="seconds")}

    def jobs(self, *states: str) -> list[dict[str, Any]]:
        with (self.state / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return [job for job in json.loads((self.state / "queue.json").read_text()) if job["state"] in states]

    def output(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.state.glob("*.out")))

    def last_line(self, job: str) -> str:
        return (self.state / f"{job}.out").read_text().splitlines()[-1]

    def close(self) -> None:
        self.over.set()
        self.thread.join()
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    state, programs = tmp_path / "slurm", tmp_path / "bin"
    state.mkdir()
    programs.mkdir()
    fake = (Path(__file__).parents[1] / "fake_slurm.py").read_text()
    for name in ("sbatch", "srun", "squeue", "scancel", "scontrol"):
        (programs / name).write_text(f"#!{sys.executable}\n{fake}")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(state))
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{Path(__file__).parents[2]}")
    made = Scheduler(state)
    yield made
    made.close()


def command(*words: str) -> str:
    return subprocess.run([sys.executable, "-m", "resilient", *words], capture_output=True, text=True, check=True).stdout


def test_a_chain_of_jobs_with_short_limits_reaches_its_target_and_leaves_no_job_behind(counting: Counting, scheduler: Scheduler):
    scheduler.limits_s = [40.0, 600.0]  # the first job takes many steps on a slow machine, too, and not all of them on a fast one
    run = counting(steps=300, every_steps=10_000, args={"step_s": 0.1}, slurm={"signal_lead_s": 12.0})
    assert "submitted as job 100" in command("submit", str(run.path))
    wait_for(lambda: not scheduler.jobs("RUNNING", "PENDING"), f"the end of the chain\n{scheduler.output()}", 400)
    codes = [event["exit_code"] for event in run.events("run_finished")]
    assert codes == scheduler.codes, scheduler.output()
    assert codes == [75, 0]
    assert scheduler.most == 1
    assert sorted(line["step"] for line in run.metrics()) == list(range(1, 301))  # not one lost, not one twice
    assert {event["signal"] for event in run.events("drain")} == {"time_limit"}
    kinds = [fault["kind"] for fault in run.events("fault")]
    assert set(kinds) == {"time_limit"}
    assert len(kinds) in (len(codes) - 1, len(codes))  # the last job, too, where it reached the target while it stopped
    assert len(scheduler.jobs("CANCELLED")) == 1  # the successor of the last one
    assert [scheduler.last_line(job) for job in ("100", "101")] == ["Job 101 goes on from here.", "No job waits behind this one."]
    assert "300 of 300" in command("status", str(run.run_dir))
    shown = agreed(run.run_dir, run.directory / "page.html")
    assert {"queued_s", "chain_goodput", "jobs.0.started_t", f"runs.{len(codes) - 1}.step"} <= set(shown)


@pytest.mark.soak
def test_a_chain_that_is_stopped_leaves_nothing_and_goes_on_when_it_is_submitted_again(counting: Counting, scheduler: Scheduler):
    run = counting(steps=100_000, every_steps=100_000, args={"step_s": 0.05}, slurm={"signal_lead_s": 12.0})
    command("submit", str(run.path))
    run.process = subprocess.Popen(["true"])
    wait_for(lambda: run.step() >= 5 and scheduler.jobs("PENDING"), f"a successor\n{scheduler.output()}")
    assert "the chain is over" in command("stop", str(run.run_dir))
    wait_for(lambda: not scheduler.jobs("RUNNING", "PENDING"), f"the end of the chain\n{scheduler.output()}")
    stopped_at = run.step()
    assert scheduler.codes == [75]
    assert scheduler.last_line("100") == "No job waits behind this one: `resilient submit` goes on from here."
    command("submit", str(run.path), f"train.steps={stopped_at + 100}")
    wait_for(lambda: not scheduler.jobs("RUNNING", "PENDING"), f"the end of the chain\n{scheduler.output()}")
    assert scheduler.codes[-1] == 0, scheduler.output()
    assert run.events("generation_started")[1]["resumed_step"] == stopped_at
    assert sorted(line["step"] for line in run.metrics()) == list(range(1, stopped_at + 101))


@pytest.mark.soak
@pytest.mark.parametrize("driver", [soaked(False), True], ids=["driver outside", "driver inside"])
def test_a_chain_runs_in_containers(
    counting: Counting, scheduler: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: bool
):
    stand_in = (Path(__file__).parents[1] / "fake_apptainer.py").read_text()
    (tmp_path / "bin/apptainer").write_text(f"#!{sys.executable}\n{stand_in}")
    (tmp_path / "bin/apptainer").chmod(0o755)
    (tmp_path / "image.sif").touch()
    (tmp_path / "calls").mkdir()
    monkeypatch.setenv("CONTAINER_CALLS", str(tmp_path / "calls"))
    box = {"image": str(tmp_path / "image.sif"), "python": sys.executable, "driver": driver}
    run = counting(steps=20, slurm={"container": box})
    command("submit", str(run.path))
    wait_for(lambda: not scheduler.jobs("RUNNING", "PENDING"), f"the end of the chain\n{scheduler.output()}")
    assert scheduler.codes == [0], scheduler.output()
    assert [line["step"] for line in run.metrics()] == list(range(1, 21))
    calls = [json.loads(path.read_text()) for path in (tmp_path / "calls").glob("*.json")]
    assert sorted(call["command"][call["command"].index("-m") + 1] for call in calls) == ["resilient"] * driver + [
        "resilient.agent"
    ]
    for call in calls:
        assert call["image"] == str(tmp_path / "image.sif")
        assert call["--env"] == ["PMIX_SECURITY_MODE=native"]
        assert any(run.run_dir.is_relative_to(bind) for bind in call["--bind"])
