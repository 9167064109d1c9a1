"""Benchmarks go on running as what they measure changes; what they find is not looked at here."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_checkpoints_can_be_measured(tmp_path: Path):
    small = ["--mib", "48", "--rounds", "1", "--dir", str(tmp_path), "--part", "disk", "stall", "reshard"]
    command = [sys.executable, "benchmarks/checkpoint.py", *small]
    ran = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=240.0)
    assert ran.returncode == 0, ran.stderr
    for contestant in ("raw O_DIRECT write", "DCP save", "snapshot + flush", "restore", "stops training", "bytes read"):
        assert contestant in ran.stdout
    assert not list(tmp_path.iterdir())
