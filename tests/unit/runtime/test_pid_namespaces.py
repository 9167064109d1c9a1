"""A driver in another PID namespace of this machine, as of a container: real namespaces, the real command."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from resilient.driver import lease
from resilient.driver.lease import RunLease, holder
from resilient.exits import Exit
from resilient.processes import DRIVER, driver_pid, local_pids

ROOT = Path(__file__).parents[3]
APART = ["unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
PATIENCE_S = 60.0

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: a PID namespace takes root; run the tests as root once")

# A driver in small, whose process id in its namespace is the one that is asked for; it ends by SIGTERM.
DRIVER_IN_SMALL = """
import os, signal, sys
from pathlib import Path
from resilient.driver.lease import RunLease
if len(sys.argv) > 2:
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(int(sys.argv[2]) - 1))
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
mine = RunLease(Path(sys.argv[1]))
print(os.getpid(), flush=True)
signal.pause()
"""


@contextmanager
def driver(run_dir: Path, *words: str, within: list[str]) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """The process that was started, and the driver's id where it runs."""
    process = subprocess.Popen(
        [*within, sys.executable, "-c", DRIVER_IN_SMALL, str(run_dir), *words],
        env=_environ(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def stop(run_dir: Path, *within: str) -> "subprocess.CompletedProcess[str]":
    command = [*within, sys.executable, "-m", "resilient", "stop", str(run_dir)]
    return subprocess.run(command, env=_environ(), capture_output=True, text=True, check=False)


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM")} | {"PYTHONPATH": str(ROOT)}


@needs_root
def test_a_driver_in_a_container_is_told_to_stop_and_no_process_of_the_same_number(tmp_path: Path):
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        with driver(tmp_path, str(bystander.pid), within=APART) as (process, pid):
            assert pid == bystander.pid, "the test is about a number that both namespaces have"
            seen = local_pids(tmp_path, None)
            done = stop(tmp_path)
            assert done.returncode == 0, done.stderr
            assert process.wait(PATIENCE_S) == 75
        assert bystander.poll() is None
        assert seen[DRIVER] not in (pid, process.pid)
    finally:
        bystander.kill()
        bystander.wait()


@needs_root
def test_a_driver_outside_of_the_container_in_which_it_is_to_be_stopped_is_not_reached_and_named(tmp_path: Path):
    with driver(tmp_path, within=[]) as (process, pid):
        done = stop(tmp_path, *APART)
        assert done.returncode == Exit.UNUSABLE
        assert f"is in use by pid {pid} on " in done.stderr
        assert "in another PID namespace, as of a container" in " ".join(done.stderr.split())
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 75


def test_a_lease_of_a_version_that_wrote_no_namespace_is_read_and_its_driver_taken_to_be_in_this_one(tmp_path: Path):
    with driver(tmp_path, within=[]) as (process, pid):
        fields = json.loads((tmp_path / lease.LEASE).read_text())
        assert fields.pop("pid_namespace") == Path("/proc/self/ns/pid").stat().st_ino
        (tmp_path / lease.LEASE).write_text(json.dumps(fields))
        owner = holder(tmp_path)
        assert owner is not None
        assert (owner.pid_namespace, driver_pid(owner)) == (0, pid)
        assert stop(tmp_path).returncode == 0
        assert process.wait(PATIENCE_S) == 75


def test_what_an_earlier_version_reads_of_a_lease_is_in_it(tmp_path: Path):
    """It passes over fields that it does not know."""
    mine = RunLease(tmp_path)
    fields = json.loads((tmp_path / lease.LEASE).read_text())
    assert fields == asdict(mine.owner)
    assert {"host", "pid", "job", "machine", "token"} <= fields.keys()
    mine.close()
