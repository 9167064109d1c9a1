"""Whose a file is, and who else may change it.

Owns the question whether a file may be obeyed: one that says what is run, written or removed must be the caller's own or root's,
and nobody else may be able to write to it. Changes nothing.
"""

import grp
import os
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path


def user_name(uid: int) -> str:
    """A user for a message."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def group_name(gid: int) -> str:
    """A group for a message."""
    try:
        return f"{grp.getgrgid(gid).gr_name} (gid {gid})"
    except KeyError:
        return f"gid {gid}"


def others_may_write(found: os.stat_result) -> bool:
    """Whether somebody else than the owner may. A group that is the caller's alone (its name is his) does not count."""
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not (found.st_uid == os.geteuid() and _is_own_group(found.st_gid))


def _is_own_group(gid: int) -> bool:
    try:
        me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == me.pw_gid and group.gr_name == me.pw_name and set(group.gr_mem) <= {me.pw_name}


def why_not_obeyed(path: Path, *, group: bool = False) -> str | None:
    """Why a file or directory is not to be obeyed; None where it may be, or is not there.

    Args:
        group: whether the members of a group that the caller belongs to are trusted.

    Raises OSError.
    """
    try:
        own, found = path.lstat(), path.stat()
    except FileNotFoundError:
        return None
    for each in (own, found):
        ours = group and each.st_gid in {os.getegid(), *os.getgroups()}
        if each.st_uid not in (os.geteuid(), 0) and not ours:
            return f"{path} belongs to {user_name(each.st_uid)}, and not to {user_name(os.geteuid())} or root"
    if found.st_mode & stat.S_IWOTH:
        return f"{path} may be written by everybody (mode {stat.S_IMODE(found.st_mode):04o}); chmod o-w it"
    if others_may_write(found) and not (group and found.st_gid in {os.getegid(), *os.getgroups()}):
        return f"{path} may be written by group {group_name(found.st_gid)} (mode {stat.S_IMODE(found.st_mode):04o}); chmod g-w it"
    return None


def first_not_obeyed(paths: Iterable[Path], *, group: bool = False) -> str | None:
    """The first of `why_not_obeyed`."""
    return next((why for path in paths if (why := why_not_obeyed(path, group=group)) is not None), None)
