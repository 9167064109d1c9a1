"""The clock that does not jump."""

import os
import subprocess
import sys
import time

import pytest

from resilient import clock


def test_it_is_unix_time_and_a_clock_that_is_set_does_not_move_it(monkeypatch: pytest.MonkeyPatch):
    assert clock.now() == pytest.approx(time.time(), abs=5.0)
    before, true = clock.now(), time.time
    monkeypatch.setattr(time, "time", lambda: true() + 3600.0)
    assert before <= clock.now() < before + 60.0
    assert clock.here(time.time() + 10.0) == pytest.approx(clock.now() + 10.0, abs=5.0)


def asked(environ: dict[str, str]) -> float:
    """How far the clock of a process with these variables is ahead of this one's."""
    code = "import time; from resilient import clock; print(clock.now() - time.monotonic())"
    told = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environ}, capture_output=True, text=True, check=True)
    return float(told.stdout) - (clock.now() - time.monotonic())


def test_processes_that_are_started_here_go_by_it_and_those_elsewhere_by_one_of_their_own():
    (name, value), *_ = clock.environment().items()
    boot, zero = value.split()
    assert asked({name: value}) == pytest.approx(0.0, abs=0.01)
    assert asked({name: f"{boot} {float(zero) + 100.0!r}"}) == pytest.approx(100.0, abs=0.01)
    assert abs(asked({name: f"another-boot {float(zero) + 100.0!r}"})) < 5.0
