"""Quotas of bytes and files, as the tools of file systems tell them: `lfs` of Lustre, `mmlsquota` of Spectrum Scale (GPFS).

`quotas` starts these tools where they are installed; a file system that hangs costs some seconds, and what does not answer is not
known. The parsers are pure.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from resilient.health.report import size

ASK_S = 5.0  # of one tool
KILL_S = 1.0
SITE = ("SCRATCH", "PROJECT")  # variables by which sites say where data belongs
_SCALE = "/usr/lpp/mmfs/bin"  # where its tools are, which are not always on the PATH
_LFS_TITLE = re.compile(r"^Disk quotas for (\w+) (\S+)", re.MULTILINE)
# What is over a limit is marked with an asterisk, and what is not certain stands in brackets.
_LFS_ROW = re.compile(r"\s\[?(\d+)\]?\*?\s+(\d+)\s+(\d+)\s+\S+\s+\[?(\d+)\]?\*?\s+(\d+)\s+(\d+)\s+\S+\s*$", re.MULTILINE)
_LFS_KINDS = {"usr": "user", "grp": "group", "prj": "project"}
_SCALE_KINDS = {"USR": "user", "GRP": "group", "FILESET": "fileset"}


@dataclass(frozen=True)
class Quota:
    """What somebody may still write.

    Attributes:
        owner: whose quota it is, as in `project 42`.
        left_bytes, left_files: until the lower one of its limits; None where there is no limit.
    """

    owner: str
    left_bytes: int | None
    left_files: int | None

    def __str__(self) -> str:
        parts = [size(self.left_bytes)] if self.left_bytes is not None else []
        parts += [f"{self.left_files:,} files"] if self.left_files is not None else []
        return f"the quota of {self.owner} leaves {' and '.join(parts)}"

    def without(self, held_bytes: int, held_files: int) -> "Quota":
        """What it would leave without these."""
        left_bytes = None if self.left_bytes is None else self.left_bytes + held_bytes
        return replace(self, left_bytes=left_bytes, left_files=None if self.left_files is None else self.left_files + held_files)

    def short(self, needed_bytes: int, needed_files: int) -> bool:
        """Whether so much does not fit."""
        return any(
            left is not None and left < needed
            for left, needed in ((self.left_bytes, needed_bytes), (self.left_files, needed_files))
        )


def parse_lfs(text: str) -> list[Quota]:
    """The quotas in the answer of `lfs quota`, in KiB as it is without `-h`; those without limits are none."""
    found = []
    titles = [*_LFS_TITLE.finditer(text)]
    ends = [*(title.start() for title in titles[1:]), len(text)]
    for title, end in zip(titles, ends, strict=False):
        row = _LFS_ROW.search(text, title.end(), end)
        if row is not None:
            used_kib, quota_kib, limit_kib, files, files_quota, files_limit = map(int, row.groups())
            owner = f"{_LFS_KINDS.get(title[1], title[1])} {title[2]}"
            found.append(Quota(owner, _left(used_kib, quota_kib, limit_kib, 1024), _left(files, files_quota, files_limit)))
    return [quota for quota in found if quota.left_bytes is not None or quota.left_files is not None]


def parse_lfs_project(text: str) -> str | None:
    """The project in the answer of `lfs project -d`; None if it is none."""
    found = re.match(r"\s*(\d+)\s", text)
    return found[1] if found is not None and found[1] != "0" else None


def parse_scale(text: str, fileset: str | None) -> list[Quota]:
    """The quotas in the answer of `mmlsquota -Y`, of which the first line names the fields; those without limits are none.

    Args:
        fileset: that is asked about; quotas of others are left out.
    """
    names: list[str] = []
    found = []
    for line in text.splitlines():
        words = line.split(":")
        if words[:3] == ["mmlsquota", "", "HEADER"]:
            names = words
            continue
        row = dict(zip(names, words, strict=False))
        try:
            bytes_left = _left_scale(row, "block", 1024)
            files_left = _left_scale(row, "files", 1)
        except (KeyError, ValueError):
            continue
        kind, inside = row.get("quotaType", ""), row.get("filesetname", "")
        if inside in ("", fileset) and (bytes_left is not None or files_left is not None):
            found.append(Quota(f"{_SCALE_KINDS.get(kind, kind)} {row.get('name', '')}".strip(), bytes_left, files_left))
    return found


def parse_fileset(text: str) -> str | None:
    """The fileset in the answer of `mmlsattr -L`."""
    found = re.search(r"^fileset name:\s+(\S+)", text, re.MULTILINE)
    return found[1] if found is not None else None


def quotas(path: Path) -> list[Quota]:
    """The quotas that hold at an existing path."""
    return list(dict.fromkeys([*_of_lustre(str(path)), *_of_scale(str(path))]))


def site_places(environ: Mapping[str, str]) -> dict[str, Path]:
    """The directories that the site's variables name, as far as they are there, by variable."""
    return {f"${name}": Path(environ[name]) for name in SITE if environ.get(name) and Path(environ[name]).is_dir()}


def _of_lustre(path: str) -> Iterator[Quota]:
    yield from parse_lfs(_ask("lfs", "quota", path))  # of the user and of the group
    project = parse_lfs_project(_ask("lfs", "project", "-d", path))
    if project is not None:
        yield from parse_lfs(_ask("lfs", "quota", "-p", project, path))


def _of_scale(path: str) -> Iterator[Quota]:
    if _tool("mmlsquota") is None:
        return
    mounts = {mount.mountpoint: mount.device for mount in psutil.disk_partitions(all=True)}
    under = next((each for each in (path, *map(str, Path(path).parents)) if each in mounts), None)
    if under is None:
        return
    device = Path(mounts[under]).name
    fileset = parse_fileset(_ask("mmlsattr", "-L", path))
    yield from parse_scale(_ask("mmlsquota", "-Y", device), fileset)
    if fileset is not None:
        yield from parse_scale(_ask("mmlsquota", "-Y", "-j", fileset, device), fileset)


def _tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SCALE}")


def _ask(name: str, *arguments: str) -> str:
    """What a tool prints; nothing if it fails, hangs, or is not there."""
    tool = _tool(name)
    if tool is None:
        return ""
    # Into a file, and as a group: what a site's wrapper has started may hold a pipe open, and hang when the wrapper is gone.
    with os.fdopen(os.memfd_create(name), "w+b") as output:
        try:
            process = subprocess.Popen(
                [tool, *arguments],
                env={**os.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
        except (OSError, ValueError):
            return ""
        try:
            if process.wait(ASK_S) != 0:
                return ""
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel is left there
                process.wait(KILL_S)
            return ""
        output.seek(0)
        return output.read().decode(errors="replace")


def _left_scale(row: Mapping[str, str], what: str, unit: int) -> int | None:
    used = int(row[f"{what}Usage"]) + int(row.get(f"{what}InDoubt") or 0)
    return _left(used, int(row[f"{what}Quota"]), int(row[f"{what}Limit"]), unit)


def _left(used: int, quota: int, limit: int, unit: int = 1) -> int | None:
    """Until the lower of two limits, of which 0 is none: beyond the soft one a time of grace runs, which a campaign outlasts."""
    limits = [each for each in (quota, limit) if each]
    return max(0, min(limits) - used) * unit if limits else None
