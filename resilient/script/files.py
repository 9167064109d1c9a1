"""The checkpoint files that a training script writes by itself: torch.save, safetensors, torch.distributed.checkpoint, Lightning.

Owns the wrappers around these, and the list of files that were finished and not told yet. It decides nothing, and what a
wrapped function does, returns and raises stays as it is. Modules that the script has not imported are left alone; `wrap` may be
called again when it has.
"""

import contextlib
import functools
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilient import clock

Saving = Callable[[], AbstractContextManager[object]]
"""Makes the context in which a file is written."""


@dataclass(frozen=True)
class SavedFile:
    """A file or folder that was written; `stall_s`: what that took. `inode` finds it again after it was renamed."""

    path: Path
    size_bytes: int
    stall_s: float
    inode: int
    t: float = 0.0  # unix seconds, when it was finished


class ScriptFiles:
    """One per process. Wrapped functions may be called in any thread; `take` is for one.

    Args:
        saving: entered around each of them.
    """

    def __init__(self, saving: Saving) -> None:
        self._saving = saving
        self._saved: deque[SavedFile] = deque()  # its methods are atomic
        self._wrappers: dict[Callable[..., Any], Callable[..., Any]] = {}  # one of each function, whatever names it has

    def __bool__(self) -> bool:
        return bool(self._saved)

    def idle_s(self) -> float:
        """Since when none was finished, of those that were not taken."""
        return clock.now() - max((each.t for each in list(self._saved)), default=0.0)

    def take(self) -> list[SavedFile]:
        """What was finished since the last call."""
        found = []
        while self._saved:
            found.append(self._saved.popleft())
        return found

    def wrap(self) -> None:
        """Wrap the functions of those modules that are imported by now and were not wrapped before."""
        for module, owner, name, path_of in (
            ("torch.serialization", "", "save", _second),
            ("torch", "", "save", _second),
            ("safetensors.torch", "", "serialize_file", _second),
            ("lightning_fabric.plugins.io.torch_io", "TorchCheckpointIO", "save_checkpoint", _third),
            ("lightning.fabric.plugins.io.torch_io", "TorchCheckpointIO", "save_checkpoint", _third),
            ("torch.distributed.checkpoint.filesystem", "_FileSystemWriter", "finish", _folder),
            ("torch.distributed.checkpoint.filesystem", "_FileSystemWriter", "write_data", _nothing),
        ):
            home = sys.modules.get(module)
            home = getattr(home, owner, None) if owner else home
            before = getattr(home, name, None)
            if before is not None and not hasattr(before, "__resilient__"):
                if before not in self._wrappers:
                    self._wrappers[before] = wrapper = self._wrapped(before, path_of)
                    wrapper.__module__ = module  # where pickle finds it
                setattr(home, name, self._wrappers[before])

    def _wrapped(self, function: Callable[..., Any], path_of: "PathOf") -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began_t = clock.now()
            with self._saving():
                result = function(*args, **kwargs)
            path = path_of(args, kwargs)
            if path is not None:
                self._note(path, clock.now() - began_t)
            return result

        wrapper.__resilient__ = True  # type: ignore[attr-defined]
        return wrapper

    def _note(self, path: Path, stall_s: float) -> None:
        try:
            about = path.stat()
            size = sum(map(_size_bytes, path.iterdir())) if path.is_dir() else about.st_size
        except OSError:
            return  # it is gone already: nobody will go on from it
        self._saved.append(SavedFile(path.absolute(), size, stall_s, about.st_ino, clock.now()))


def _size_bytes(path: Path) -> int:
    """0 of what is gone: other ranks may write beside it, under names that do not stay."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


PathOf = Callable[[tuple[Any, ...], dict[str, Any]], Path | None]


def _second(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Path | None:
    """Where the second argument of save(what, file) or serialize_file(what, filename) leads; None for a file that is open."""
    where = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
    if isinstance(where, str | os.PathLike):
        return Path(os.fspath(where))
    name = getattr(where, "name", None)  # an open file of the disk has one
    return Path(name) if isinstance(name, str) else None


def _third(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Path | None:
    """Where save_checkpoint(self, what, path) leads: Lightning gives torch.save a buffer, and writes that."""
    where = args[2] if len(args) > 2 else kwargs.get("path")
    return Path(os.fspath(where)) if isinstance(where, str | os.PathLike) and "://" not in str(where) else None


def _folder(args: tuple[Any, ...], _: dict[str, Any]) -> Path | None:
    """Where a writer of torch.distributed.checkpoint has written."""
    path = getattr(args[0], "path", None)
    return Path(os.fspath(path)) if isinstance(path, str | os.PathLike) else None


def _nothing(*_: object) -> None:
    return None


def common_place(files: list[SavedFile]) -> Path:
    """What is told of files that were written one after the other: the only one, as it is named now, or their folder."""
    places = {_name_now(each) for each in files}
    if len(places) == 1:
        return places.pop()
    return Path(os.path.commonpath(places))


def _name_now(file: SavedFile) -> Path:
    """Scripts write under another name first, and rename the file, or the folder that it is in."""
    if file.path.exists():
        return file.path
    folder = file.path.parent
    with contextlib.suppress(OSError), os.scandir(folder if folder.exists() else folder.parent) as entries:
        for each in entries:
            if each.inode() == file.inode:
                return Path(each.path)
            inside = Path(each.path) / file.path.name
            with contextlib.suppress(OSError):  # it is none of a folder, or a checkpoint that is deleted just now
                if inside.stat().st_ino == file.inode:
                    return inside
    return folder
