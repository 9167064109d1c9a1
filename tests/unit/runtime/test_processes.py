"""Lifelines, the run directory's lock, and the quickness of the command line: with real processes."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import os, sys, time
from resilient.lifeline import die_with_parent
die_with_parent(int(sys.argv[1]))
print("tied", flush=True)
time.sleep(600)
''', str(__import__("os").getpid())], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_process_on_a_lifeline_dies_with_its_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not gone(child)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while not gone(child):
        assert time.monotonic() < deadline


def test_a_process_whose_parent_is_gone_already_dies_at_once():
    code = "from resilient.lifeline import die_with_parent; die_with_parent(1 << 22)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize("heavy", ["torch", "numpy", "pydantic", "zarr", "tokenizers", "tensorboard"])
def test_help_imports_nothing_heavy(heavy: str):
    code = f"""
import sys
sys.argv = ["resilient", "--help"]
from resilient.cli import main
try:
    main()
except SystemExit:
    pass
sys.exit({heavy!r} in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_the_driver_imports_no_torch():
    code = "import sys, resilient.driver.driver; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
