"""A pytest of its own, with the plugins that count costs, choose slices and run again what failed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(directory: Path, tests: str, *options: str) -> tuple[int, str]:
    """Exit status and output of a pytest of its own. A `conftest.py` that is there already is kept, behind the plugins."""
    (directory / "test_it.py").write_text(tests)
    conftest = directory / "conftest.py"
    own = conftest.read_text() if conftest.exists() else ""
    conftest.write_text('pytest_plugins = ["costs", "soak", "confirming"]\n' + own)
    words = ["-p", "no:cacheprovider", "--rootdir", str(directory), "-W", "ignore", *options, str(directory)]
    command = [sys.executable, "-m", "pytest", *words]
    environ = {"PYTHONPATH": str(ROOT / "tests"), "PATH": "/usr/bin:/bin", "HOME": str(directory)}
    # Of those that are installed one is needed; zarr's alone takes longer to import than these tests to run.
    environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    done = subprocess.run(command, check=False, cwd=directory, env=environ, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr
