"""The mark of a directory: a file that tells whether its file system is mounted, and whether it is the directory that was meant."""

import errno
from pathlib import Path


def must_be_there(root: Path, mark: str, text: str) -> None:
    """Raises FileNotFoundError where the mark is missing, or is that of another directory: nothing may be written there.

    Args:
        mark: name of the file.
        text: that it holds; one that a crash of its file system has left empty says nothing.
    """
    try:
        found = (root / mark).read_text(errors="replace").strip("\0 \n")
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(errno.ENOENT, f"{mark} is not there any more: is the file system mounted?", str(root)) from None
    if found not in ("", text):
        why = f"{mark} is not the campaign's: a link or a mount leads to another directory now"
        raise FileNotFoundError(errno.ENOENT, why, str(root))
