"""Who may read what a campaign makes, and whose files a campaign obeys.

A run directory is this user's alone (0700, files 0600), or with `run_dir_mode: group` its group may read it (0750, 0640). The
driver gives the directory its mode; agents on other nodes go by that mode, so that they need not be told.

Owns modes, and the list of a run directory's control files.
"""

import logging
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from checkpoint.ownership import first_not_obeyed
from resilient import ledger
from resilient.exits import EnvironmentUnusable

log = logging.getLogger(__name__)

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

_FILES = (
    r"(events|metrics|chain|evaluations)\.jsonl.*|driver\.log.*|(model|config)\.yaml|attention\.json|diagnosis\.md|report\.html"
)
_DIRECTORIES = "logs|incidents|profile|tensorboard|sinks|checkpoints|data"
_GOES_ON = re.compile("|".join((*map(re.escape, CONTROL), _FILES, _DIRECTORIES)))  # in a run directory; the rest is the user's own

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


def close_to_others(run_dir: Path, mode: Mode, elsewhere: Sequence[Path] = ()) -> None:
    """Give a run directory that is there, and this user's, its mode. Raises OSError.

    Where that opens a private one to its group, so is what a campaign goes on with. What lies deeper stays as it is: there may be
    hundreds of thousands of files.

    Args:
        elsewhere: what is not in the run directory, such as the durable tier.
    """
    found = run_dir.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o777 == MODES[mode]:
        return
    if mode == "group" and not found.st_mode & stat.S_IRGRP:  # before the directory, so that what is cut short is done again
        places = [path for path in run_dir.iterdir() if _GOES_ON.fullmatch(path.name)]
        opened = [_open_to_group(path) for path in (*places, *elsewhere)]
        if any(opened):
            log.warning("logs, checkpoints and data that are there stay closed to the group: chmod -R g+rX %s opens them", run_dir)
    run_dir.chmod(stat.S_IMODE(found.st_mode) & 0o7000 | MODES[mode])  # setgid gives files the group of a project


def _open_to_group(path: Path) -> bool:
    """Let the group do what this user may, but for writing; whether that changes anything.

    A link, what is another user's and what cannot be changed stays as it is.
    """
    with suppress(OSError):
        found = path.lstat()
        mode = stat.S_IMODE(found.st_mode)
        opened = mode | (mode & (stat.S_IRUSR | stat.S_IXUSR)) >> 3
        if opened != mode and found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode):
            path.chmod(opened)
            return True
    return False


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
