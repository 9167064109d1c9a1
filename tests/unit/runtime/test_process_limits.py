"""How many processes and threads a user may still start, and how many files a process may have open."""

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from stranger import UID, needs_root

from resilient.health import machine
from resilient.health.machine import Limits

ROOT = Path(__file__).parents[3]


def as_a_user_who_may_have(processes: int) -> Limits:
    """What such a user is told of limits, in a process of his."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
            os.setgroups([])
            os.setresgid(UID, UID, UID)
            os.setresuid(UID, UID, UID)
            found = machine.limits_of(cgroups=Path("/nowhere"))
            os.write(writes, f"{found.processes} {found.processes_by}".encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as told:
        left, by = told.read().decode().split(" ", 1)
    os.waitpid(pid, 0)
    assert by == "ulimit -u"
    return Limits(None, int(left), None, None, None, "ulimit -u")


@needs_root
def test_a_users_limit_of_processes_counts_without_those_that_he_has() -> None:
    assert machine.limits_of(cgroups=Path("/nowhere")).processes is None, "root may start any number"
    limits = as_a_user_who_may_have(25)
    assert limits.processes is not None and limits.processes < 25


def test_threads_count_as_processes(tmp_path: Path) -> None:
    for pid, threads in ((7, 3), (8, 1)):
        for thread in range(threads):
            (tmp_path / f"{pid}/task/{thread}").mkdir(parents=True)
    (tmp_path / "sys").mkdir()
    assert machine._tasks(os.getuid(), tmp_path) == 4
    assert machine._tasks(os.getuid() + 1, tmp_path) == 0


@pytest.mark.parametrize(
    ("left", "running", "verdict"),
    [(17, False, "fail"), (18, False, "warn"), (5, True, "fail"), (6, True, "warn"), (192, False, "ok"), (None, False, "ok")],
)
def test_fewer_processes_than_ranks_alone_take_fail_and_the_limit_is_named(left: int | None, running: bool, verdict: str) -> None:
    limits = Limits(None, left, None, None, None, "ulimit -u")
    found = {each.check: each for each in machine.judge_limits(limits, ranks=2, world=2, rdma=False, running=running)}
    assert found["processes"].verdict == verdict
    assert verdict == "ok" or "raise ulimit -u" in found["processes"].text
    assert (machine.too_few_processes(limits, 2, running=running) is not None) == (verdict == "fail")


@pytest.mark.parametrize(("files", "enough"), [(None, True), (264, True), (263, False)])
def test_fewer_files_than_ranks_need_are_too_few(files: int | None, enough: bool) -> None:
    assert (machine.too_few_files(Limits(files, None, None, None), 2) is None) is enough


@pytest.mark.parametrize("files", [16, 64])
def test_a_run_that_may_have_too_few_files_open_ends_before_it_begins_and_says_so_once(tmp_path: Path, files: int) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"name": "x", "run_dir": str(tmp_path / "run"), "cluster": {"procs_per_node": 1}}))
    run = subprocess.run(
        ["prlimit", f"--nofile={files}", sys.executable, "-m", "resilient", "run", str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    why = f"a process may have {files} files open, and 1 rank needs 260; raise it (ulimit -n, LimitNOFILE)"
    assert (run.returncode, run.stdout) == (69, f"resilient: {socket.gethostname()}: {why}\n")
    assert not (tmp_path / "run").exists()
