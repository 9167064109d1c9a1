"""The `config.yaml` of a run directory, which is written anew at each start.

Owns the question whose a file of that name is. One that somebody else has written is never written over.
"""

import stat
from pathlib import Path

from checkpoint.naming import steps
from resilient import ledger
from resilient.config import ConfigError, Problem
from resilient.config.document import value_at
from resilient.config.source import WRITTEN
from resilient.identity import record

NAME = "config.yaml"


def must_not_be_foreign(run_dir: Path) -> None:
    """Raises ConfigError where a `config.yaml` is in the run directory that is not this runtime's; OSError if it cannot be read."""
    path = run_dir / NAME
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if _is_run_directory(run_dir) or (stat.S_ISREG(found.st_mode) and _was_written_for(run_dir, path)):
        return
    why = (
        f"{path} is not of a run directory, and would be replaced by the resolved config: "
        "name another run_dir, or move that file elsewhere"
    )
    raise ConfigError([Problem("run_dir", None, why)])


def _is_run_directory(run_dir: Path) -> bool:
    """Whether a campaign has left anything else: a supervisor its identity and a ledger, the trainer alone checkpoints."""
    begun = (run_dir / record.FILE).exists() or any(part.exists() for part in ledger.parts(run_dir / ledger.EVENTS))
    return begun or bool(steps(run_dir / "checkpoints"))


def _was_written_for(run_dir: Path, path: Path) -> bool:
    """Whether this runtime has written the file there: a copy of it names another directory, and may have been edited since."""
    with path.open("rb") as file:
        if not file.readline().startswith(WRITTEN.encode()):
            return False
    named = value_at(path, "run_dir")
    try:
        return isinstance(named, str) and run_dir.samefile(named)
    except OSError:
        return False  # of a directory that is not there any more
