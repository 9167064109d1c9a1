"""A directory of files that nobody changes any more, a second time: by hard links, where the file system allows it, else by
clones that share blocks (Btrfs, XFS), else by copies.

What is deleted in one place stays in the other. Files of another user, and files that fewer may read than is wanted, are never
linked: the second directory is all the caller's own.
"""

import fcntl
import os
import shutil
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from checkpoint.fence import fsync_directory

_FICLONE = 0x40049409  # of linux/fs.h

How = Literal["linked", "cloned", "copied"]


@dataclass
class Duplicated:
    """How many files came about in which way."""

    files: Counter[How] = field(default_factory=Counter)

    def __str__(self) -> str:
        return ", ".join(f"{count:,} file{'s' * (count != 1)} {how}" for how, count in sorted(self.files.items()))


def tree(source: Path, target: Path, done: Duplicated, *, group: bool) -> None:
    """All files and directories of one directory in a new one. Links are not followed, and refused.

    Args:
        target: must not be there; its parent must.
        group: the group may read what is made.

    Raises OSError; what was made until then stays.
    """
    target.mkdir()
    with os.scandir(source) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                tree(path, target / entry.name, done, group=group)
            else:
                done.files[file(path, target / entry.name, group=group)] += 1
    fsync_directory(target)


def file(source: Path, target: Path, *, group: bool) -> How:
    """One file; arguments as for `tree`."""
    found = source.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{source} is no regular file")
    if found.st_uid == os.geteuid() and (not group or found.st_mode & stat.S_IRGRP):
        try:
            os.link(source, target, follow_symlinks=False)
        except FileNotFoundError:
            raise
        except OSError:  # another file system, one without links, or too many of them
            pass
        else:
            return "linked"
    return _copied(source, target)


def _copied(source: Path, target: Path) -> How:
    with source.open("rb") as old, target.open("xb") as new:
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
            how: How = "cloned"
        except OSError:  # no such thing here
            shutil.copyfileobj(old, new, 16 << 20)
            how = "copied"
        new.flush()
        os.fsync(new.fileno())
    return how
