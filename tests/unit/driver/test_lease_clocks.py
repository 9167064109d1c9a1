"""Whether a driver on another machine is there, where clocks do not agree: real files, and a process that renews the lease."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from checkpoint.run_lease import LEASE, LEASE_S, LOCK, PATIENCE_S, Owner, holder, lives
from resilient.config import dump, load
from resilient.exits import EnvironmentUnusable
from resilient.halt import halt
from resilient.ledger import EVENTS
from resilient.sinks.command import send
from resilient.status import overview

OTHER = Owner("n7", 4711, "", "another machine", "t")
SKEW_S = 2 * LEASE_S

# The driver on the other machine: it renews the lease every second with the time of a clock that is so far ahead.
RENEWING = """
import os, sys, time
while True:
    now = time.time() + float(sys.argv[2])
    os.utime(sys.argv[1], (now, now))
    time.sleep(1)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a campaign with a sink, whose driver is on another machine."""
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run_dir: {tmp_path}\ncluster: {{device: cpu}}\nlogging: {{sinks: {{webhook: {{url: 'http://127.0.0.1:9/'}}}}}}\n"
    )
    path.write_text(dump(load(path, [])))
    for name in (EVENTS, LOCK):
        (tmp_path / name).touch()
    (tmp_path / LEASE).write_text(json.dumps(asdict(OTHER)))
    return tmp_path


@contextmanager
def renewed(run_dir: Path, ahead_s: float) -> Iterator[None]:
    path = run_dir / LEASE
    begun_ns = path.stat().st_mtime_ns
    process = subprocess.Popen([sys.executable, "-c", RENEWING, str(path), str(ahead_s)])
    try:
        while path.stat().st_mtime_ns == begun_ns:
            time.sleep(0.01)
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def host_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Have this host's clock be so far ahead of that of the file system."""
    now = time.time

    def ahead(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: now() + seconds)

    return ahead


@pytest.mark.parametrize(
    ("age_s", "renewed_meanwhile", "watched_s", "verdict"),
    [
        (0.0, False, 0.0, True),
        (LEASE_S, False, 0.0, None),
        (LEASE_S, True, 1.0, True),
        (LEASE_S, False, PATIENCE_S, False),
    ],
)
def test_an_old_lease_is_that_of_a_driver_that_is_gone_once_it_was_watched(age_s, renewed_meanwhile, watched_s, verdict):
    assert lives(age_s, renewed=renewed_meanwhile, watched_s=watched_s, patience_s=PATIENCE_S) is verdict


@pytest.mark.parametrize("seconds", [SKEW_S, -SKEW_S])
def test_the_clock_of_this_host_says_nothing_of_a_driver_on_another_one(run_dir: Path, host_clock, seconds: float):
    host_clock(seconds)
    assert holder(run_dir) == OTHER
    old = time.time() - seconds - 1.5 * LEASE_S  # by the file system's clock
    os.utime(run_dir / LEASE, (old, old))
    assert holder(run_dir) is None


def test_no_command_takes_a_run_for_dead_by_a_clock_that_is_ahead(run_dir: Path):
    """The file system has the times of its clients, whose clocks do not agree."""
    with renewed(run_dir, -SKEW_S):
        with pytest.raises(EnvironmentUnusable, match="in use by pid 4711 on n7"):
            halt(run_dir)
        with pytest.raises(EnvironmentUnusable, match="runs, and feeds the sinks itself"):
            send(run_dir)
    assert halt(run_dir) == f"nothing runs in {run_dir}"


def test_a_look_at_a_campaign_waits_for_no_lease(run_dir: Path):
    old = time.time() - SKEW_S
    os.utime(run_dir / LEASE, (old, old))
    began_t = time.monotonic()
    assert overview(run_dir).state != "running"
    assert time.monotonic() - began_t < PATIENCE_S


def test_a_run_that_ended_when_this_machine_was_started_anew_is_not_waited_for(run_dir: Path):
    """The lease of the earlier boot is that of another machine, but of this one's name and clock."""
    old = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) - LEASE_S
    (run_dir / LEASE).write_text(json.dumps(asdict(replace(OTHER, host=socket.gethostname()))))
    os.utime(run_dir / LEASE, (old, old))
    began_t = time.monotonic()
    assert halt(run_dir) == f"nothing runs in {run_dir}"
    assert time.monotonic() - began_t < PATIENCE_S
    (run_dir / LEASE).write_text(json.dumps(asdict(OTHER)))
    os.utime(run_dir / LEASE, (old, old))
    began_t = time.monotonic()
    assert halt(run_dir) == f"nothing runs in {run_dir}"
    assert time.monotonic() - began_t >= PATIENCE_S


def test_without_permission_to_write_the_clock_of_this_host_counts(run_dir: Path, host_clock):
    (run_dir / LOCK).unlink()  # root may always touch what is there
    assert holder(run_dir) == OTHER
    host_clock(SKEW_S)
    assert holder(run_dir) is None
    with renewed(run_dir, 0.0):
        assert holder(run_dir, PATIENCE_S) == OTHER
