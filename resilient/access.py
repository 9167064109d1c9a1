"""Who may read what a campaign makes, and whose files a campaign obeys.

A run directory is this user's alone (0700, files 0600), or with `run_dir_mode: group` its group may read it (0750, 0640). The
driver gives the directory its mode; agents on other nodes go by that mode, so that they need not be told.

Owns modes, and the list of a run directory's control files.
"""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from checkpoint.ownership import first_not_obeyed
from resilient import ledger
from resilient.exits import EnvironmentUnusable

Mode = Literal["private", "group"]

MODES: dict[Mode, int] = {"private": 0o700, "group": 0o750}
CONTROL = (
    "config.yaml",
    "identity.json",
    "storage.json",
    "job.sh",
    "chain.jsonl",
    "bad_nodes.json",
    "evacuate.json",
    ".past",
    ".spill",
    ".lease",
    ".lock",
)
"""Files of a run directory that say what is run, written or removed."""

READ = (*CONTROL, ledger.EVENTS, ledger.METRICS)
"""Files of a run directory that commands open."""


def restrict(mode: Mode) -> None:
    """From now on this process and its children make files for those only who may read them."""
    os.umask(0o777 & ~MODES[mode])


def restrict_as(run_dir: Path) -> None:
    """The same, as the run directory's own mode has it; for this user alone where it cannot be read."""
    try:
        readable = run_dir.stat().st_mode & stat.S_IRGRP
    except OSError:
        readable = 0
    restrict("group" if readable else "private")


def close_to_others(run_dir: Path, mode: Mode) -> None:
    """Give a run directory that is there, and this user's, its mode. Raises OSError."""
    found = run_dir.stat()
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o777 != MODES[mode]:
        run_dir.chmod(MODES[mode])


def must_be_ours(config_file: Path | None, run_dir: Path, mode: Mode) -> None:
    """Raises EnvironmentUnusable where somebody else could have written the config or a control file of the run directory, or where
    a file of it is a pipe or a device, which would be waited for."""
    paths = [run_dir, *(run_dir / name for name in CONTROL)]
    if config_file is not None and str(config_file) != os.devnull:
        paths.insert(0, config_file)
    try:
        why = first_not_obeyed(paths, group=mode == "group")
        must_be_files(run_dir, READ)
    except OSError as error:
        raise EnvironmentUnusable(f"cannot read {error.filename}: {error.strerror}") from error
    if why is not None:
        raise EnvironmentUnusable(f"{why}. To trust the members of your groups, set `run_dir_mode: group`")


def must_be_files(directory: Path, names: Sequence[str]) -> None:
    """Raises EnvironmentUnusable where one of them is a pipe, a socket or a device, for who opens a pipe waits for its other end;
    OSError."""
    for path in (directory / name for name in names):
        try:
            found = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not (stat.S_ISREG(found) or stat.S_ISDIR(found)):
            raise EnvironmentUnusable(f"{path} is a pipe, a socket or a device, where a file is expected: move it away")
