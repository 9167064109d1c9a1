"""What was last told of each campaign, from one look to the next: a small file of the caller's own.

Owns that file. A look that is taken beside another one waits for it, so that a change is told once.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from resilient.exits import EnvironmentUnusable

FILE = "watch.json"


def default_path() -> Path:
    """Where it is unless somebody says so. Raises EnvironmentUnusable."""
    try:
        state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    except RuntimeError as error:
        raise EnvironmentUnusable(f"this user has no home directory ({error}): name a file with --memory") from None
    return Path(state) / "resilient" / FILE


class Memory:
    """The states by run directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.states: dict[str, str] = {}

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Read it, alone, and write what it has come to. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self._path.with_name(f"{self._path.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            before = self.states = self._read()
            self.states = dict(before)
            try:
                yield
            finally:  # what was told before an interrupt was told
                if self.states != before:
                    fresh = self._path.with_name(f"{self._path.name}.new")
                    fresh.write_text(json.dumps(self.states, indent=1) + "\n")
                    fresh.replace(self._path)
        finally:
            os.close(fd)

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return {key: value for key, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}
