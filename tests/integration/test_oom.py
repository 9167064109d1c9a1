"""A worker that the kernel kills for want of memory, and one that somebody kills: told apart, by real limits of a cgroup."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from campaigns import Campaign, wait_for

from resilient.agent.oom import controller

Counting = Callable[..., Campaign]

LIMIT = 512 << 20


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup with a small limit."""
    found = controller(Path("/proc/self/mountinfo").read_text())
    if found is None:
        pytest.skip("NOT TESTED HERE: the OOM killer needs memory cgroups")
    path = found.mount / f"resilient-test-{os.getpid()}"
    try:
        path.mkdir()
        (path / ("memory.max" if found.unified else "memory.limit_in_bytes")).write_text(str(LIMIT))
    except OSError as error:
        if path.exists():
            path.rmdir()
        pytest.skip(f"NOT TESTED HERE: the OOM killer needs a memory cgroup of its own, which cannot be made: {error}")
    yield path
    wait_for(lambda: not (path / "cgroup.procs").read_text(), f"{path} is still in use")
    path.rmdir()


def test_a_worker_that_the_oom_killer_ends_is_called_that(counting: Counting, cgroup: Path):
    run = counting("eat", steps=40, args={"cgroup": str(cgroup), "eat": True})
    assert run.run() == 0, run.output + run.logs()
    (fault,) = run.events("fault")
    assert (fault["kind"], fault["class"], fault["ranks"], fault["step"]) == ("exit", "deterministic", [1], 10), fault
    assert f"killed by the OOM killer (cgroup /{cgroup.name}, limit 512 MiB, used 5" in fault["detail"], fault
    assert "oom_kill" in fault["evidence"] or "Killed process" in fault["evidence"], fault
    assert len(run.events("recovered")) == 1


@pytest.mark.soak
def test_a_worker_that_somebody_kills_is_not_said_to_have_wanted_memory(counting: Counting, cgroup: Path):
    run = counting("eat", steps=10_000, args={"cgroup": str(cgroup), "eat": False}).start()
    run.reach(10)
    os.kill(run.workers()[1], signal.SIGKILL)
    wait_for(lambda: run.events("recovered"), f"a recovery\n{run.logs()}")
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output
    (fault,) = run.events("fault")
    assert (fault["kind"], fault["detail"], fault["class"]) == ("exit", "SIGKILL", None), fault
