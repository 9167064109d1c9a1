"""A chain from outside: commands as a person types them, and what its file has on record."""

import json
import os
import subprocess
import sys
from pathlib import Path

from resilient.slurm import chain

ROOT = Path(__file__).parents[3]


def command(*words: str) -> "subprocess.Popen[str]":
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "resilient", *words], env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def records(run_dir: Path) -> list[str]:
    return [json.loads(line)["what"] for line in (run_dir / chain.FILE).read_text().splitlines()]
