"""Ends that are asked for, of a process that takes its time."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from leases import write_lease

from chaos.faults.sigterm import Sigterm
from chaos.injectors.context import InjectionContext, Target
from chaos.injectors.guard import Guard
from resilient.config import load

SLOW = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"


@pytest.fixture
def driver(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """One that is at its drain for long."""
    process = subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    write_lease(tmp_path, process.pid)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(("wanted", "state"), [(True, "asked to end"), (False, "killed")])
def test_a_driver_is_killed_at_the_end_of_its_grace_but_not_at_that_of_the_experiment(
    tmp_path: Path, driver: "subprocess.Popen[bytes]", wanted: bool, state: str
):
    path = tmp_path / "config.yaml"
    path.write_text(f"run_dir: {tmp_path}\ncluster: {{device: cpu, procs_per_node: 1}}\nchaos: {{allow: true}}\n")
    with Guard() as guard:
        context = InjectionContext(tmp_path, load(path, []), Target(), guard, over=lambda seconds: wanted)
        found = Sigterm(grace_s=1.0).inject(context)
    assert found == {"pid": driver.pid, "state": state}
    assert driver.poll() == (None if wanted else -9)
