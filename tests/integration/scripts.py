"""Training scripts of others, without a supervisor: what their losses are then."""

import os
import re
import subprocess
import sys
from pathlib import Path

from campaigns import ROOT

PACED = Path(__file__).with_name("paced_script.py")


def torchrun(ranks: int, *words: str) -> dict[int, str]:
    """The losses of a script by step, as torchrun has them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), *words]
    return said(command)


def said(command: list[str]) -> dict[int, str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {int(step): loss for step, loss in re.findall(r"step (\d+) loss (\S+)", done.stdout)}
