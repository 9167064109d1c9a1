"""What tests do to a mounted file system."""

import subprocess
import time
from pathlib import Path

PATIENCE_S = 30.0


def make_read_only(path: Path) -> None:
    """For all that is opened from now on: by a bind mount over it, which `umount` takes away again.

    The kernel refuses it while a file there is open for writing; who writes a line and closes the file leaves room between.
    """
    subprocess.run(["mount", "--bind", path, path], check=True)
    deadline = time.monotonic() + PATIENCE_S
    while (
        done := subprocess.run(["mount", "-o", "remount,bind,ro", path], capture_output=True, text=True, check=False)
    ).returncode != 0:
        if time.monotonic() > deadline:
            raise AssertionError(f"{path} could not be made read-only for {PATIENCE_S:.0f} s: {done.stderr}")
        time.sleep(0.01)
