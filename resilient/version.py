"""The version, and the commit where the package is run from a checkout.

The commit is read from the files of `.git`, which takes no process; only whether tracked files were changed is asked of git. A
checkout is a directory that holds both this package and `.git`, and whose index has this file. So a repository that merely
surrounds an installation, or the current directory, is never taken for it.
"""

import os
import re
from importlib.metadata import version
from pathlib import Path

DIRTY_S = 5.0  # for git to look at all tracked files
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_HERE = Path(__file__)


def described() -> str:
    """For people: `0.1.0`; in a checkout `0.1.0 (838d41a)`, with tracked files that were changed `0.1.0 (838d41a+dirty)`."""
    found = commit()
    if found is None:
        return version("resilient")
    return f"{version('resilient')} ({found[:7]}{'+dirty' * dirty()})"


def commit(here: Path = _HERE) -> str | None:
    """The full hash of the commit that is checked out; None if this is no checkout, or none that can be read without git.

    Not read: refs in the `reftable` format, indexes that are split or of version 4.

    Args:
        here: a file of a package at the top of the checkout.
    """
    here = here.resolve()
    root = here.parents[1]
    try:
        own = _git_dir(root)
        if own is None or f"{here.relative_to(root)}\0".encode() not in (own / "index").read_bytes():
            return None
        return _head(own)
    except (OSError, UnicodeDecodeError):
        return None


def dirty(here: Path = _HERE) -> bool:
    """Whether git says that tracked files of the checkout were changed; False also where it cannot be asked."""
    import subprocess

    # A hook of another repository names that one in the environment.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(here.resolve().parents[1]), "status", "--porcelain", "--untracked-files=no"]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, check=True, timeout=DIRTY_S)
    except (OSError, subprocess.SubprocessError):
        return False
    return bool(done.stdout.strip())


def _git_dir(root: Path) -> Path | None:
    """Where git keeps what belongs to this working tree: `.git`, or what it points to in a linked worktree or a submodule."""
    found = root / ".git"
    if found.is_dir():
        return found
    if not found.is_file():
        return None
    return root / found.read_text().removeprefix("gitdir:").strip()


def _head(own: Path) -> str | None:
    """The commit that HEAD leads to; None where nothing was committed yet."""
    head = (own / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return _checked(head)
    ref = head.removeprefix("ref:").strip()
    shared = own / "commondir"  # in a linked worktree, branches are those of the main one
    common = own / shared.read_text().strip() if shared.is_file() else own
    if (common / ref).is_file():
        return _checked((common / ref).read_text().strip())
    packed = common / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((_checked(line.partition(" ")[0]) for line in lines if line.partition(" ")[2] == ref), None)


def _checked(text: str) -> str | None:
    return text if _COMMIT.fullmatch(text) else None
