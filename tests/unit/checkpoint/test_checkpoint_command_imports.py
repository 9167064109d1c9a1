"""The commands import no more than they need, so that help and listings are there at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import checkpoint


@pytest.mark.parametrize("command", ["ls", "verify", "diff", "export", "prune"])
def test_help_imports_nothing_heavy(command: str) -> None:
    script = (
        "import sys; from checkpoint.cli import app\n"
        "try: app()\n"
        "except SystemExit: print([name for name in ('torch', 'zarr', 'numpy') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(checkpoint.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", script, command, "--help"], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.endswith("[]\n")
    assert "Usage" in done.stdout


def test_ls_imports_neither_torch_nor_numpy(campaign: Path) -> None:
    script = (
        "import sys; from checkpoint.cli import app\n"
        "try: app()\n"
        "except SystemExit: print([name for name in ('torch', 'zarr', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, "ls", str(campaign)], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
