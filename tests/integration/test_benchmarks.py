"""Benchmarks go on running as what they measure changes; what they find is not looked at here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_checkpoints_can_be_measured(tmp_path: Path):
    scratch, found = tmp_path / "scratch", tmp_path / "found.json"
    scratch.mkdir()
    small = ["--mib", "48", "--rounds", "1", "--dir", str(scratch), "--part", "disk", "stall", "reshard"]
    command = [sys.executable, "benchmarks/checkpoint.py", *small, "--json", str(found)]
    ran = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=240.0)
    assert ran.returncode == 0, ran.stderr
    for contestant in ("raw O_DIRECT write", "DCP save", "snapshot + flush", "restore", "stops training", "bytes read"):
        assert contestant in ran.stdout
    assert not list(scratch.iterdir())
    told = json.loads(found.read_text())
    names = {figure["name"] for figure in told["figures"] if figure["ratio"]}
    assert {"save/raw", "save/DCP save", "restore/DCP load", "snapshot + flush/raw", "stall"} <= names
    assert str(scratch) not in found.read_text()  # where things lie on this machine is nobody's business
