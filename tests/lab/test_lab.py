"""The lab by itself: hosts that are apart, break one at a time, and leave nothing behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from campaigns import ROOT, wait_for
from lab_jobs import on

from chaos.lab.host import namespaces
from chaos.lab.lab import Lab
from chaos.lab.shape import LOGIN, Shape
from resilient.exits import EnvironmentUnusable


def command(lab: Lab, *words: str) -> subprocess.CompletedProcess[str]:
    """What `resilient lab` does with these words."""
    line = [sys.executable, "-m", "resilient", "lab", "--name", lab.paths.name, *words]
    return subprocess.run(line, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


def carrier_changes(lab: Lab, host: str) -> int:
    return int(on(lab, host, "cat", "/sys/class/net/eth0/carrier_changes"))


def links() -> str:
    """Names of the devices of this machine itself."""
    return "\n".join(sorted(path.name for path in Path("/sys/class/net").iterdir()))


def test_hosts_have_names_addresses_and_disks_of_their_own(bare: Lab):
    for host in ("n1", "n2"):
        assert on(bare, host, "hostname").strip() == host
        on(bare, host, "sh", "-c", f"echo {host} | tee /dev/shm/mine > /mnt/nvme/mine")
    assert on(bare, "n1", "cat", "/dev/shm/mine", "/mnt/nvme/mine").split() == ["n1", "n1"]
    assert on(bare, "n2", "getent", "hosts", "n1").split() == ["10.88.0.11", "n1"]
    assert not Path("/dev/shm/mine").exists()
    assert not Path("/mnt/nvme/mine").exists()


def test_a_second_up_says_that_all_is_there_and_another_shape_is_refused(bare: Lab):
    first = bare.host("n1").init()
    again = command(bare, "up", "--hosts", "2")
    assert (again.returncode, again.stdout) == (0, "The lab is up already: 2 hosts.\n")
    assert bare.host("n1").init() == first
    other = command(bare, "up", "--hosts", "3")
    assert other.returncode == 69
    assert "another shape" in other.stderr


def test_a_command_runs_on_its_host_and_its_status_is_passed_on(bare: Lab):
    told = command(bare, "exec", "n2", "--", "sh", "-c", "hostname; exit 7")
    assert (told.returncode, told.stdout) == (7, "n2\n")
    assert command(bare, "exec", "--", "hostname").stdout == f"{LOGIN}\n"
    assert command(bare, "exec", "n9").returncode != 0


def test_a_link_that_flaps_loses_its_carrier_and_gets_it_back(bare: Lab):
    before = carrier_changes(bare, "n1")
    assert command(bare, "flap", "n1", "0.2").returncode == 0
    wait_for(lambda: on(bare, "n1", "cat", "/sys/class/net/eth0/carrier") == "1\n", "the carrier")
    assert carrier_changes(bare, "n1") == before + 2
    assert carrier_changes(bare, "n2") == before


def test_a_link_comes_back_although_the_command_was_killed(bare: Lab):
    line = [sys.executable, "-m", "resilient", "lab", "--name", bare.paths.name, "flap", "n1", "1"]
    flapping = subprocess.Popen(line, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True)
    wait_for(lambda: not bare.host("n1").link_is_up(), "the link to go down")
    os.killpg(flapping.pid, signal.SIGKILL)
    flapping.wait()
    wait_for(bare.host("n1").link_is_up, "the link to come back")


def test_an_orphan_that_ends_leaves_no_zombie(bare: Lab):
    pid = on(bare, "n1", "sh", "-c", "sleep 0.2 > /dev/null & echo $!").strip()
    wait_for(lambda: not on(bare, "n1", "sh", "-c", f"test ! -d /proc/{pid} || cat /proc/{pid}/stat"), "the orphan to go")


def test_a_host_that_crashes_takes_its_processes_and_disks_along_and_boots_empty(bare: Lab):
    on(bare, "n1", "sh", "-c", "echo kept > /mnt/nvme/kept; echo kept > /dev/shm/kept")
    sleeper = subprocess.Popen(bare.command(["sleep", "1000"], host="n1"))
    wait_for(lambda: len(bare.host("n1").processes()) > 3, "the process")
    assert command(bare, "crash", "n1").returncode == 0
    assert sleeper.wait(200) != 0
    states = {each.name: (each.state, each.link) for each in bare.status()}
    assert states == {"n1": ("crashed", "down"), "n2": ("up", "up")}
    with pytest.raises(EnvironmentUnusable, match="not up"):
        bare.command(["true"], host="n1")
    assert command(bare, "boot", "n1").returncode == 0
    assert on(bare, "n1", "sh", "-c", "ls /mnt/nvme /dev/shm") == "/dev/shm:\n\n/mnt/nvme:\n"
    assert command(bare, "boot", "n1").returncode == 69


def test_nobody_hears_a_word_of_the_end_of_a_host_that_crashes(bare: Lab):
    listen = "import socket; s = socket.create_server(('', 7000)); print(flush=True); s.accept()[0].recv(1)"
    connect = "import socket; s = socket.create_connection(('n1', 7000)); print(flush=True); s.recv(1)"
    with subprocess.Popen(bare.command([sys.executable, "-c", listen], host="n1"), stdout=subprocess.PIPE) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline()
        with subprocess.Popen(bare.command([sys.executable, "-c", connect], host="n2"), stdout=subprocess.PIPE) as connected:
            assert connected.stdout is not None
            assert connected.stdout.readline()
            bare.crash("n1")
            listener.wait()
            assert "ESTAB" in on(bare, "n2", "ss", "--tcp", "--numeric")
            assert connected.poll() is None
            bare.crash("n2")
    for host in ("n1", "n2"):
        bare.boot(host)  # although the sockets of its past may still be there


def test_nothing_is_left_of_a_lab_whose_start_was_killed(own_lab: Lab):
    before = links()
    line = [sys.executable, "-m", "resilient", "lab", "--name", own_lab.paths.name, "up", "--hosts", "30"]
    starting = subprocess.Popen(line, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
    last = own_lab.paths.namespace("n3")
    wait_for(lambda: last in namespaces(), "some hosts")
    starting.kill()
    starting.wait()
    assert links() == before
    own_lab.up(Shape(hosts=1))
    assert [each.name for each in own_lab.status()] == ["n1"]
    assert len([name for name in namespaces() if own_lab.paths.host_of(name)]) == 2
    processes = [pid for name in (LOGIN, "n1") for pid in own_lab.host(name).processes()]
    assert command(own_lab, "down").stdout == "The lab is down.\n"
    assert command(own_lab, "down").stdout == "There was no lab.\n"
    assert not [name for name in namespaces() if own_lab.paths.host_of(name)]
    assert not own_lab.paths.directory.exists()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), "the end of its processes")
    assert links() == before


def test_slurm_runs_on_all_hosts_and_takes_back_one_that_crashed(impatient: Lab):
    def states() -> list[str]:
        return [host["slurm"] for host in json.loads(command(impatient, "status", "--json").stdout)["hosts"]]

    wait_for(lambda: states() == ["idle"] * 4, "all hosts")
    assert sorted(on(impatient, LOGIN, "srun", "--nodes=4", "hostname").split()) == ["n1", "n2", "n3", "n4"]
    impatient.crash("n3")
    wait_for(lambda: states()[2] in ("down", "down*"), "Slurm to notice")
    impatient.boot("n3")
    wait_for(lambda: states() == ["idle"] * 4, "its return")
    assert on(impatient, LOGIN, "srun", "--nodelist=n3", "hostname").strip() == "n3"


def test_a_job_ends_at_the_limit_of_its_partition_and_one_that_is_urgent_goes_first(lab: Lab, tmp_path: Path):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\nexec sleep 1000\n")

    def submitted(*options: str) -> str:
        return on(
            lab, LOGIN, "sbatch", "--parsable", "--nodes=4", "--exclusive", f"--chdir={tmp_path}", *options, str(script)
        ).strip()

    def told(job: str, what: str) -> str:
        return on(lab, LOGIN, "squeue", "--noheader", f"--job={job}", f"--format={what}").strip()

    limited = submitted("--partition=limited")
    wait_for(lambda: told(limited, "%T") == "RUNNING", "the job to run")
    assert told(limited, "%l") == "1:00"
    urgent = submitted("--partition=urgent")
    wait_for(lambda: told(urgent, "%T") == "RUNNING", "the other to make room")
    assert told(limited, "%T") == "PENDING"  # requeued
