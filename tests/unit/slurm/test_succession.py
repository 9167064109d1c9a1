"""A chain on Slurm's commands, real processes whose queue is a file: what follows its first job, and what ends it."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from chains import ROOT, command, records

from resilient.config import Config, ConfigError, load
from resilient.driver.command import run_command
from resilient.driver.driver_log import DriverLog
from resilient.driver.lease import RunLease
from resilient.exits import EnvironmentUnusable, Exit
from resilient.halt import halt
from resilient.ledger import Ledger
from resilient.run_words import Told
from resilient.slurm import chain, queue, succession
from resilient.slurm.badnodes import remember
from resilient.slurm.script import CHAIN_VARIABLE
from resilient.slurm.succession import Succession
from resilient.status import inspect


def begins(slurm, monkeypatch: pytest.MonkeyPatch, job_id: str, name: str, hosts: str = "n1") -> None:
    """A job of a chain runs from now on, and this process in it."""
    for key, value in {"JOB_NAME": name, "JOB_ID": job_id, "JOB_NODELIST": hosts, "JOB_CPUS_PER_NODE": "2"}.items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    slurm.becomes(job_id, state="RUNNING", end="2099-01-01T00:00:00", nodes="n1")


def test_a_slurm_that_is_deaf_for_a_while_is_asked_again(going: Succession, slurm):
    slurm.deaf(2)
    assert asyncio.run(going.ensure("100", 50)) == ""
    (_, successor) = slurm.jobs()
    assert successor["dependency"] == "afterany:100,singleton"


def test_a_job_that_ends_asks_a_silent_slurm_for_so_long_and_not_at_all_once_the_chain_is_stopped(going: Succession, slurm, config):
    slurm.deaf(99)
    with pytest.raises(EnvironmentUnusable, match="Unable to contact"):
        asyncio.run(going.ensure("100", 50, 0.0))
    with (config.run_dir / chain.FILE).open("a") as file:
        file.write('{"t": 1, "what": "stopped"}\n')
    assert asyncio.run(going.ensure("100", 50, succession.LAST_S)) == "the chain is over"
    assert (slurm.directory / "deaf").read_text() == "98"


def test_a_driver_that_starts_again_after_a_crash_submits_no_second_successor(going: Succession, slurm, config: Config):
    asyncio.run(going.ensure("100", 50))
    (config.run_dir / chain.FILE).write_text(
        '{"what": "begun", "name": "x"}\n'
    )  # it crashed before it could write down what it did
    assert going.started("100", 0) is None
    asyncio.run(going.ensure("100", 50))
    assert [job["id"] for job in slurm.jobs()] == ["100", "101"]


@pytest.mark.parametrize(
    ("code", "left"), [(Exit.OK, 0), (Exit.GAVE_UP, 0), (Exit.CONFIG, 0), (Exit.STOPPED, 1), (Exit.UNUSABLE, 1)]
)
def test_a_successor_is_left_where_it_is_needed_and_nowhere_else(going: Succession, slurm, code, left):
    asyncio.run(going.ensure("100", 50))
    assert len(slurm.jobs("PENDING")) == 1
    asyncio.run(going.ended("100", code))
    assert len(slurm.jobs("PENDING")) == left


def test_a_job_that_could_not_be_cancelled_finds_the_chain_over(going: Succession, slurm, monkeypatch):
    asyncio.run(going.ensure("100", 50))
    monkeypatch.setattr(succession, "END_PATIENCE_S", 0.01)
    slurm.deaf(99)
    asyncio.run(going.ended("100", Exit.GAVE_UP))
    slurm.deaf(0)
    assert going.started("101", 40) is Exit.GAVE_UP
    assert going.chain.jobs == ("100",)


def test_the_last_job_that_is_allowed_has_no_successor(going: Succession, slurm):
    assert "slurm.max_jobs is 1" in asyncio.run(going.ensure("100", 1))
    assert len(slurm.jobs("PENDING")) == 0


def test_a_stop_ends_the_chain_first_and_tells_the_driver_then(going: Succession, slurm, config: Config):
    asyncio.run(going.ensure("100", 50))
    stop = command("stop", str(config.run_dir))
    told, _ = stop.communicate()
    assert (stop.returncode, told) == (0, "the chain is over: nothing waits, and job 100 stops at its next step\n")
    running, waiting = slurm.jobs()
    assert (running["state"], running["signals"], waiting["state"]) == ("RUNNING", ["TERM"], "CANCELLED")
    assert records(config.run_dir)[-2:] == ["stopped", "cancelled"]
    assert "the chain is over" in asyncio.run(going.ensure("100", 50))  # a driver that was about to submit does not
    assert len(slurm.jobs()) == 2


def test_a_stop_that_slurm_does_not_answer_says_that_the_job_runs_on(
    going: Succession, slurm, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(succession, "PERSON_PATIENCE_S", 0.01)
    slurm.deaf(99)
    told = "Unable to contact slurm controller .*; the chain ends with its next job, but what runs was not told: call again"
    with pytest.raises(EnvironmentUnusable, match=told):
        halt(config.run_dir)
    owner = {"host": "n7", "pid": 4711, "job": "100", "machine": "another", "token": "x"}
    (config.run_dir / ".lease").write_text(json.dumps(owner))
    with pytest.raises(EnvironmentUnusable, match=r"but pid 4711 on n7 \(job 100\) runs on: call again"):
        halt(config.run_dir)
    slurm.deaf(0)
    (tmp_path / "bin/scancel").write_text("#!/bin/sh\necho 'scancel: error: Access denied' >&2; exit 1\n")
    with pytest.raises(EnvironmentUnusable, match="Access denied; the chain is over, but job 100 runs on: call again"):
        halt(config.run_dir)


def test_a_chain_of_which_no_job_has_run_yet_is_stopped(config: Config, slurm):
    chained = Succession.of(config)
    asyncio.run(chained.begin(f"#!/bin/bash\n#SBATCH --job-name={chained.name}\n"))
    told, _ = (stop := command("stop", str(config.run_dir))).communicate()
    assert (stop.returncode, told) == (0, "the chain is over: nothing waits, and nothing runs\n")
    assert [job["state"] for job in slurm.jobs()] == ["CANCELLED"]


def test_a_stop_reaches_a_run_without_slurm(tmp_path: Path):
    """The run is a process that holds the lease and ends by the signal."""
    code = "import sys, signal; from pathlib import Path; from resilient.driver.lease import RunLease\n"
    code += "mine = RunLease(Path(sys.argv[1])); print(1, flush=True); signal.pause()"
    environ = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"} | {"PYTHONPATH": str(ROOT)}
    run = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environ, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stdout.readline() == "1\n"
    told, _ = (stop := command("stop", str(tmp_path))).communicate()
    assert (stop.returncode, f"pid {run.pid} on " in told) == (0, True)
    assert run.wait(timeout=120) == -signal.SIGTERM
    run.stdout.close()
    (tmp_path / "events.jsonl").touch()
    told, _ = command("stop", str(tmp_path)).communicate()
    assert told == f"nothing runs in {tmp_path}\n"


def test_a_run_on_another_machine_that_is_no_job_is_not_reached_and_named(tmp_path: Path):
    owner = {"host": "n7", "pid": 4711, "job": "", "machine": "another", "token": "x"}
    (tmp_path / ".lease").write_text(json.dumps(owner))
    told, _ = (stop := command("stop", str(tmp_path))).communicate()
    assert stop.returncode == Exit.UNUSABLE
    assert "pid 4711 on n7" in told


def test_the_status_shows_the_chain_before_its_first_job_has_begun_and_after(going: Succession, slurm, config: Config):
    asyncio.run(going.ensure("100", 50))
    found = inspect(config.run_dir)
    assert [(job["job"], job["state"], job["step"]) for job in found.jobs] == [("100", "running", 0), ("101", "waiting", None)]
    assert found.jobs[1]["reason"] == "Dependency"
    asyncio.run(going.ended("100", Exit.STOPPED))
    slurm.set([{**job, "state": "CANCELLED"} for job in slurm.jobs()])
    found = inspect(config.run_dir)
    assert [(job["job"], job["state"]) for job in found.jobs] == [("100", "ended by 75"), ("101", "gone before it began")]
    slurm.deaf(99)
    assert [job["state"] for job in inspect(config.run_dir).jobs] == ["ended by 75", "waiting"]


def test_a_job_belongs_to_the_chain_by_its_name(config: Config):
    name = Succession.of(config).name
    assert Succession.of_job(config, {"SLURM_JOB_NAME": "interactive"}) is None
    found = Succession.of_job(config, {"SLURM_JOB_NAME": name})
    assert found is not None and found.name == name


def test_slurm_is_asked_for_the_end_of_a_job_and_whether_it_is_to_make_room(going: Succession, slurm):
    job = asyncio.run(queue.job("100"))
    assert job is not None and job.end_t is not None and job.runs and not job.preempted
    slurm.becomes("100", preempt="2026-11-21T13:59:00")
    job = asyncio.run(queue.job("100"))
    assert job is not None and job.preempted
    assert asyncio.run(queue.job("999")) is None
    assert asyncio.run(queue.kill_wait()) == 42


def test_jobs_are_submitted_without_the_nodes_that_are_bad_and_one_that_waits_is_told(config: Config, slurm, going: Succession):
    remember(config.run_dir, {"n2": "gone", "n7": "slow"}, now=time.time(), for_s=60.0)
    assert asyncio.run(going.ensure("100", 50)) == ""
    (waits,) = slurm.jobs("PENDING")
    assert waits["exclude"] == "n2,n7"
    remember(config.run_dir, {"n3": "gone"}, now=time.time(), for_s=60.0)
    asyncio.run(going.avoid_bad_nodes())
    assert [job["exclude"] for job in slurm.jobs()] == ["", "n2,n7,n3"]


def test_a_job_that_cannot_be_had_without_the_bad_nodes_is_submitted_with_them(config: Config, slurm, going: Succession):
    (slurm.directory / "few").touch()
    remember(config.run_dir, {"n2": "gone"}, now=time.time(), for_s=60.0)
    assert asyncio.run(going.ensure("100", 50)) == ""
    assert [job["exclude"] for job in slurm.jobs("PENDING")] == [""]


def test_a_job_that_waits_is_not_told_to_do_without_nodes_where_it_could_not_begin(
    config: Config, slurm, going: Succession, caplog: pytest.LogCaptureFixture
):
    asyncio.run(going.ensure("100", 50))
    (slurm.directory / "few").touch()
    remember(config.run_dir, {"n2": "gone"}, now=time.time(), for_s=60.0)
    asyncio.run(going.avoid_bad_nodes())
    (waits,) = slurm.jobs("PENDING")
    assert (waits["exclude"], waits.get("reason", "Dependency")) == ("", "Dependency")
    assert "the next job may get a node that is to be avoided" in caplog.text


def test_what_the_job_script_itself_excludes_stays_excluded_beside_the_bad_nodes(config: Config, slurm):
    found = Succession.of(config)
    asyncio.run(found.begin(f"#!/bin/bash\n#SBATCH --job-name={found.name}\n#SBATCH --exclude=n13\n#SBATCH -x n[20-21]\n"))
    slurm.becomes("100", state="RUNNING", end="2099-01-01T00:00:00")
    remember(config.run_dir, {"n7": "slow"}, now=time.time(), for_s=60.0)
    assert asyncio.run(found.ensure("100", 50)) == ""
    (waits,) = slurm.jobs("PENDING")
    assert waits["exclude"] == "n13,n[20-21],n7"
    remember(config.run_dir, {"n3": "gone"}, now=time.time(), for_s=60.0)
    asyncio.run(found.avoid_bad_nodes())
    assert slurm.jobs("PENDING")[0]["exclude"] == "n13,n[20-21],n7,n3"


def test_the_first_job_alone_waits_for_what_the_job_script_depends_on(config: Config, slurm):
    found = Succession.of(config)
    asyncio.run(found.begin(f"#!/bin/bash\n#SBATCH --job-name={found.name}\n#SBATCH --dependency=afterok:28,after:29\n"))
    slurm.becomes("100", state="RUNNING", end="2099-01-01T00:00:00")
    assert asyncio.run(found.ensure("100", 50)) == ""
    assert [job["dependency"] for job in slurm.jobs()] == ["afterok:28,after:29,singleton", "afterany:100,singleton"]


def test_a_run_directory_that_is_away_for_a_while_breaks_no_chain(config: Config, slurm, going: Succession, monkeypatch):
    opened, tries = os.open, []

    def away(path, *args, **named):
        if Path(path).name == succession.LOCK and len(tries) < 2:
            tries.append(path)
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return opened(path, *args, **named)

    monkeypatch.setattr(succession.os, "open", away)
    assert asyncio.run(going.ensure("100", 50)) == ""
    assert len(tries) == 2 and len(slurm.jobs("PENDING")) == 1


def test_a_chain_goes_on_behind_a_job_whose_node_has_no_durable_tier(
    path: Path, slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
):
    """As where a file system is not mounted on one batch host."""
    tiers = [{"name": "durable", "path": str(tmp_path / "scratch/run")}]
    path.write_text(yaml.safe_dump({"name": "gpt", "run_dir": str(tmp_path / "run"), "checkpoint": {"tiers": tiers}}))
    found = Succession.of(load(path, []))
    asyncio.run(found.begin(f"#!/bin/bash\n#SBATCH --job-name={found.name}\n"))
    with Ledger(tmp_path / "run") as lines:
        lines.event("run_started", {"name": "gpt", "target_step": 300}, generation=1)
        lines.event("committed", {"step": 20, "tier": "durable", "bytes": 40, "files": 1}, generation=1)
    begins(slurm, monkeypatch, "100", found.name)
    assert run_command(Told(path, ()), None, DriverLog()) is Exit.UNUSABLE
    assert "goes on from step 20, and nothing of it is in" in capfd.readouterr().err
    assert [job["state"] for job in slurm.jobs()] == ["RUNNING", "PENDING"]
    assert records(tmp_path / "run") == ["begun", "submitted", "started", "submitted", "ended"]
    assert found.chain.steps == (20,)


def test_a_chain_goes_on_behind_a_job_that_loses_too_many_nodes_while_it_starts_until_three_have_come_to_nothing(
    going: Succession, path: Path, slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
):
    path.write_text(f"{path.read_text()}cluster: {{nodes: 2, min_nodes: 2, procs_per_node: 1, device: cpu}}\n")
    asyncio.run(going.ensure("100", 50))
    told = []
    for number in range(101, 106):
        slurm.becomes(str(number - 1), state="COMPLETED")
        begins(slurm, monkeypatch, str(number), going.name, "n1,n2" if number == 101 else "n1")
        assert run_command(Told(path, ()), None, DriverLog()) is Exit.UNUSABLE
        said = capfd.readouterr()
        told.append(said.out)
        assert "the job has 1 nodes (n1), and cluster." in said.err
        if not slurm.jobs("PENDING"):
            break
    assert told[:-1] == [f"Job {number} goes on from here.\n" for number in range(102, 102 + chain.STUCK - 1)]
    assert told[-1] == "No job waits behind this one: `resilient submit` goes on from here.\n"
    assert records(tmp_path / "run")[3:7] == ["submitted", "started", "submitted", "ended"]
    assert going.chain.over is None


def test_no_job_follows_one_that_cannot_start_beyond_the_last_that_is_allowed_or_after_a_stop(
    going: Succession, path: Path, slurm, monkeypatch: pytest.MonkeyPatch, capfd
):
    path.write_text(f"{path.read_text()}cluster: {{nodes: 2}}\n")
    begins(slurm, monkeypatch, "100", going.name)
    assert run_command(Told(path, ("slurm.max_jobs=1",)), None, DriverLog()) is Exit.UNUSABLE
    assert "No job waits behind this one" in capfd.readouterr().out
    asyncio.run(going.stop())
    assert run_command(Told(path, ()), None, DriverLog()) is Exit.UNUSABLE
    assert len(slurm.jobs()) == 1


def test_a_chain_goes_on_behind_a_job_that_finds_another_driver_at_work(
    going: Succession, path: Path, slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
):
    """As that of a job which Slurm has given up while its processes live, or one that somebody has started by hand."""
    begins(slurm, monkeypatch, "100", going.name)
    monkeypatch.setattr("resilient.driver.lease.LOCK_WAIT_S", 0.0)
    other = RunLease(tmp_path / "run")
    try:
        assert run_command(Told(path, ()), None, DriverLog()) is Exit.UNUSABLE
    finally:
        other.close()
    assert [job["state"] for job in slurm.jobs()] == ["RUNNING", "PENDING"]
    assert records(tmp_path / "run")[-3:] == ["started", "submitted", "ended"]
    told = capfd.readouterr()
    assert "is in use by" in told.err
    assert told.out.endswith("\nJob 101 goes on from here.\n")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda config, run_dir: config.write_text(f"{config.read_text()}no_key: 1\n"),
        lambda config, run_dir: (run_dir / "config.yaml").write_text("mine: 1\n"),
        lambda config, run_dir: config.write_text("name: [gpt\n"),
        lambda config, run_dir: config.unlink(),
    ],
    ids=["a key that is none", "a file of somebody's own", "no YAML", "no file"],
)
def test_a_job_whose_config_is_wrong_ends_the_chain_and_says_so(
    going: Succession, path: Path, slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd, spoil
):
    asyncio.run(going.ensure("100", 50))
    job = {"JOB_NAME": going.name, "JOB_ID": "101", "JOB_NODELIST": "n1", "JOB_CPUS_PER_NODE": "2"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv(CHAIN_VARIABLE, str(tmp_path / "run"))
    slurm.becomes("100", state="COMPLETED")
    slurm.becomes("101", state="RUNNING")
    asyncio.run(going.ensure("101", 50))
    spoil(path, tmp_path / "run")
    assert run_command(Told(path, ()), None, DriverLog()) is Exit.CONFIG
    told = capfd.readouterr()
    assert (told.err.count("\n"), told.out) == (1, "No job waits behind this one.\n")
    assert records(tmp_path / "run")[-2:] == ["ended", "cancelled"]
    assert [job["state"] for job in slurm.jobs()] == ["COMPLETED", "RUNNING", "CANCELLED"]
    assert going.chain.over is Exit.CONFIG
    assert inspect(tmp_path / "run").jobs[1]["state"] == "ended by 78"
    assert CHAIN_VARIABLE not in os.environ  # whatever a job starts is not the job


def test_a_job_that_finds_the_target_reached_ends_the_chain(
    going: Succession, path: Path, slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
):
    """As after a job that was killed behind its last checkpoint."""
    asyncio.run(going.ensure("100", 50))
    job = {"JOB_NAME": going.name, "JOB_ID": "101", "JOB_NODELIST": "n1", "JOB_CPUS_PER_NODE": "2"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    slurm.becomes("100", state="NODE_FAIL")
    slurm.becomes("101", state="RUNNING")
    asyncio.run(going.ensure("101", 50))
    monkeypatch.setattr("resilient.driver.command.already_reached", lambda _: 300)
    assert run_command(Told(path, ()), None, DriverLog()) is Exit.OK
    assert "gpt has reached its target: step 300 of" in capfd.readouterr().out
    assert records(tmp_path / "run")[-3:] == ["started", "ended", "cancelled"]
    assert [job["state"] for job in slurm.jobs()] == ["NODE_FAIL", "RUNNING", "CANCELLED"]
    found = inspect(tmp_path / "run")
    assert (going.chain.over, found.jobs[1]["state"], found.jobs[1]["step"]) == (Exit.OK, "ended by 0", 300)


@pytest.mark.parametrize("settings", [("no_key=1",), ("no setting",)])
def test_a_wrong_config_of_a_job_of_its_own_ends_no_chain(
    going: Succession, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
):
    for name, value in {"JOB_NAME": "interactive", "JOB_ID": "7", "JOB_NODELIST": "n1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv(CHAIN_VARIABLE, str(tmp_path / "run"))
    with pytest.raises(ConfigError):
        run_command(Told(path, settings), None, DriverLog())
    assert going.chain.over is None
