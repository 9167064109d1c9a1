"""The packing of old logs and incidents, so that a run directory keeps few files however long the campaign is.

The newest folders stay as they are, up to a number of folders and of files; older ones are packed into an archive for each hundred
generations, `g0001-g0100.tar.zst`. A folder is deleted only once its archive is on the disk, so that a packer that is killed at any
moment loses nothing: the next one finds either the folder or the archive, or both, and goes on.
"""

import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from resilient.logs import archive
from resilient.logs.paths import DIRECTORY
from resilient.recovery.faults import INCIDENTS

IN_AN_ARCHIVE = 100  # generations

_FOLDER = re.compile(r"g(\d+)(?:-.*?(\d+))?")  # of a generation, or an incident in one
_GONE = ".packed"


@dataclass(frozen=True)
class Rule:
    """What stays as it is: the newest folders, at most so many with at most so many files together, and one at the least."""

    folders: int
    files: int


LOGS = Rule(folders=20, files=20_000)
EVIDENCE = Rule(folders=200, files=2_000)


def pack(run_dir: Path) -> None:
    """Pack what is old in a run directory. One process may do so at a time.

    Raises:
        OSError: something cannot be read or written.
        DamagedArchive: what should be an archive is none; nothing is added to it.
    """
    for name, rule in ((DIRECTORY, LOGS), (INCIDENTS, EVIDENCE)):
        if (run_dir / name).is_dir():
            pack_folders(run_dir / name, rule)


def pack_folders(directory: Path, rule: Rule) -> None:
    """Pack the old folders of a directory; errors as for `pack`."""
    for left in directory.glob(f"g*{_GONE}"):
        shutil.rmtree(left)
    for left in directory.glob("g*.tar.zst.new"):
        left.unlink()
    by_archive: dict[Path, list[Path]] = defaultdict(list)
    for folder in old(folders(directory), rule):
        by_archive[archive_of(directory, generation_of(folder))].append(folder)
    for path, found in sorted(by_archive.items()):
        packed = {each.name: each.files for each in archive.contents(path)}
        new = [folder for folder in found if packed.get(folder.name) != sizes(folder)]
        if new:
            archive.add(path, new)
            packed = {each.name: each.files for each in archive.contents(path)}
        for folder in found:
            if packed[folder.name] != sizes(folder):
                continue  # somebody who was late has written meanwhile; it is packed again
            gone = folder.with_name(folder.name + _GONE)
            folder.rename(gone)  # at once: what is left of it is no folder any more
            shutil.rmtree(gone)


def old(newest_last: Sequence[Path], rule: Rule) -> list[Path]:
    """The folders that are to be packed."""
    files = 0
    for kept, folder in enumerate(reversed(newest_last)):
        files += sum(not path.is_dir() for path in folder.rglob("*"))
        if kept >= rule.folders or (files > rule.files and kept):
            return list(newest_last[: len(newest_last) - kept])
    return []


def folders(directory: Path) -> list[Path]:
    """Those of generations, or of incidents, oldest first."""
    found = [path for path in directory.glob("g*") if _FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_age)


def _age(folder: Path) -> tuple[int, int, str]:
    match = _FOLDER.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0), folder.name


def generation_of(folder: Path) -> int:
    """The generation that a folder is of."""
    return _age(folder)[0]


def archive_of(directory: Path, generation: int) -> Path:
    """The archive in which a generation is, or will be."""
    first = max(generation - 1, 0) // IN_AN_ARCHIVE * IN_AN_ARCHIVE + 1
    return directory / f"g{first:04}-g{first + IN_AN_ARCHIVE - 1:04}.tar.zst"


def sizes(folder: Path) -> dict[str, int]:
    """Size in bytes of each file of a folder, by path below it."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): path.stat().st_size for path in found}
