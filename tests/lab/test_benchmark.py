"""The benchmark of lost nodes goes on running as what it measures changes; its figures are not looked at here."""

import subprocess
import sys

import pytest
from campaigns import ROOT

PARTS = ["crashes", "driver-crashes", "flaps", "drains", "drains-spare"]
COUNTS = ["--crashes", "1", "--driver-crashes", "1", "--flaps", "1", "--drains", "1"]
SAYS = ["to the next step on three", "in the job's next start", "throughput with three", "declared lost: 0", "until it is free"]


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_hosts_that_are_lost_cut_off_and_drained_are_measured():
    command = [sys.executable, "benchmarks/lost_nodes.py", "--part", *PARTS, *COUNTS]
    ran = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=1400.0)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not [words for words in SAYS if words not in ran.stdout], ran.stdout
