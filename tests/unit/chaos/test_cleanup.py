"""The cleanup guard: what carries its mark ends, what undoes is waited for, and what a run has left in RAM is removed."""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from chaos.orchestration import cleanup as of_cleanup
from chaos.orchestration.cleanup import CleanupGuard, sweep
from resilient.agent.memory import region_directory


def started(script: str, environ: dict[str, str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, env={**os.environ, **environ}, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_at_its_end_campaigns_are_killed_and_injectors_end_by_themselves(tmp_path: Path):
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    undoing = f"import time, pathlib; print(flush=True); time.sleep(1); pathlib.Path({str(tmp_path / 'undone')!r}).touch()"
    regions = region_directory(tmp_path / "run", 0)
    with CleanupGuard() as cleanup:
        cleanup.run(tmp_path / "run")
        regions.mkdir()
        campaign, injector, other = started(deaf, cleanup.campaign()), started(undoing, cleanup.injector()), started(deaf, {})
    assert campaign.wait() == -9
    assert (tmp_path / "undone").exists()
    assert injector.wait() == 0
    assert other.poll() is None
    other.kill()
    other.wait()
    assert not regions.exists()


def test_the_same_happens_when_its_owner_is_killed(tmp_path: Path):
    owner = (
        "import os, subprocess, sys, time; from chaos.orchestration.cleanup import CleanupGuard; cleanup = CleanupGuard();"
        "child = subprocess.Popen(['sleep', '600'], env={**os.environ, **cleanup.campaign()}, start_new_session=True,"
        " stdout=subprocess.DEVNULL); print(child.pid, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    fd = os.pidfd_open(pid)
    process.kill()
    process.wait()
    assert select.select([fd], [], [], 60.0)[0], "the campaign of a killed command is still there"
    os.close(fd)


def test_an_undo_that_hangs_ends_no_experiment_late_and_keeps_no_other_from_being_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(of_cleanup, "UNDO_S", 1.0)
    kill = of_cleanup._kill

    def killed(processes: list[psutil.Process]) -> None:
        kill(processes)
        if processes:  # what hung: the guard, which goes on now, has the time that it has otherwise
            monkeypatch.setattr(of_cleanup, "UNDO_S", 60.0)

    monkeypatch.setattr(of_cleanup, "_kill", killed)
    with CleanupGuard() as cleanup:
        owner = (
            "import time; from chaos.injectors.guard import Guard; guard = Guard();"
            f"guard.add(['touch', {str(tmp_path / 'undone')!r}]); guard.add(['sleep', '600']); print(flush=True)"
        )
        injector = started(owner, cleanup.injector())
        left = started("import time; print(flush=True); time.sleep(600)", cleanup.injector())  # as a host that was booted again
        assert injector.wait() == 0
        deadline = time.monotonic() + 120.0
        while not any("600" in each.cmdline() for each in of_cleanup.tagged(of_cleanup.INJECTOR, cleanup.tag)):
            assert time.monotonic() < deadline, "its guard does not come to what hangs"
            time.sleep(0.01)
        sweep(cleanup.tag)
        assert (tmp_path / "undone").exists()
        assert left.wait() == -9
        assert not of_cleanup.tagged(of_cleanup.INJECTOR, cleanup.tag)
