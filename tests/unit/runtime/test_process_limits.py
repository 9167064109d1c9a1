"""How many processes and threads a user may still start."""

import os
import resource
from pathlib import Path

import pytest
from stranger import UID, needs_root

from resilient.health import machine
from resilient.health.machine import Limits


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
