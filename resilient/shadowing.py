"""Modules of a program that have the name of one of our packages, such as `checkpoint.py`: who imports decides which it is.

Python has one module of each name, the first that `sys.path` finds: a program's `checkpoint.py` would be taken for ours by the
runtime, or ours for it by the program. Here what belongs to this project gets this project's packages, and everything else gets
what `sys.path` has first. Nothing is changed where nothing is shadowed.

Another copy of this project, as a checkout in the working directory is, is no program's: all use the packages beside this file.

`sys.modules` has ours, but for the duration of an import by the program: that is what pickle finds, which knows names alone.
"""

import builtins
import importlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # noqa: PTH120 - by every command, which does without pathlib
NAMES = ("checkpoint", "chaos", "trainer")
"""Packages of ours that a program may have modules of the same name as; `resilient` itself is the runtime's alone."""
_OURS = tuple(f"{_ROOT}/{name}/" for name in (*NAMES, "resilient"))
_LOADS_OURS = "importlib.metadata"  # entry points that were installed: our own are the only ones of these names


class _TwoViews(MetaPathFinder):
    """Two sets of modules for the same names, of which `sys.modules` has one at a time.

    Attributes:
        names: that are taken twice, with what the program has there.
        ours: names of which `sys.path` has another copy first.
    """

    def __init__(self) -> None:
        self.names: dict[str, ModuleSpec] = {}
        self.ours: set[str] = set()
        self._lock = threading.RLock()
        self._hidden: dict[str, ModuleType] = {}
        self._of_program = False
        self._depth = 0
        self._import = builtins.__import__
        self._import_module = importlib.import_module

    def add(self, name: str, spec: ModuleSpec) -> None:
        """Also for this name; what was imported under it before is whose it is."""
        if not self.names:  # in this process and in those that are forked from it
            builtins.__import__ = self.import_
            importlib.import_module = self.import_module
            os.register_at_fork(after_in_child=self._forked)
        with self._lock:
            found = sys.modules.get(name)
            theirs = found is not None and not _is_ours(vars(found))
            if theirs and not self._of_program and any(map(_is_being_imported, _below(name))):
                self._exchange()  # by a program whose module imports us: it stays in sight until it is whole
            self.names[name] = spec
            if theirs != self._of_program:
                self._hidden.update((each, sys.modules.pop(each)) for each in _below(name))

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Ours, for us; for a program nothing, so that the other finders are asked."""
        if path is not None or (fullname not in self.ours and (fullname not in self.names or self._of_program)):
            return None
        return PathFinder.find_spec(fullname, [_ROOT])

    def import_(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """What an `import` statement calls; see `builtins.__import__`."""
        if self._top(name, globals, level) not in self.names:
            return self._import(name, globals, locals, fromlist or (), level)
        with self._as_seen_by(program=not _is_ours(globals) and (level > 0 or self._has(name))):
            return self._import(name, globals, locals, fromlist or (), level)

    def import_module(self, name: str, package: str | None = None) -> ModuleType:
        """In the place of `importlib.import_module`; whoever calls it imports."""
        top = (package or "" if name.startswith(".") else name).partition(".")[0]
        if top not in self.names:
            return self._import_module(name, package)
        caller = sys._getframe(1).f_globals
        program = not _is_ours(caller) and caller.get("__name__") != _LOADS_OURS and (name.startswith(".") or self._has(name))
        with self._as_seen_by(program=program):
            return self._import_module(name, package)

    def for_program(self, name: str) -> ModuleType:
        """Import what a program finds under a name."""
        with self._as_seen_by(program=True):
            return self._import_module(name)

    def _has(self, name: str) -> bool:
        """Whether the program has a module of this name; pickle asks for ours in the name of whoever calls it."""
        top, *below = name.split(".")
        spec: ModuleSpec | None = self.names[top]
        for each in below:
            top = f"{top}.{each}"
            spec = spec and PathFinder.find_spec(top, spec.submodule_search_locations or ())
        return spec is not None

    @contextmanager
    def _as_seen_by(self, *, program: bool) -> Iterator[None]:
        """Meanwhile `sys.modules` has these modules and not the others; an import may lead to one of the other side."""
        with self._lock:
            before = self._of_program
            self._depth += 1
            if before != program:
                self._exchange()
            try:
                yield
            finally:
                if self._of_program != before:
                    self._exchange()
                self._depth -= 1
                if self._of_program and not self._depth and not any(map(_is_being_imported, self._shown())):
                    self._exchange()

    def _exchange(self) -> None:
        shown = {each: sys.modules.pop(each) for each in self._shown()}
        sys.modules.update(self._hidden)
        self._hidden, self._of_program = shown, not self._of_program

    def _shown(self) -> list[str]:
        return [each for name in self.names for each in _below(name)]

    def _top(self, name: str, importer: Mapping[str, object] | None, level: int) -> str:
        if level:
            name = str((importer or {}).get("__package__") or "")
        return name.partition(".")[0]

    def _forked(self) -> None:
        """Another thread may have held the lock."""
        self._lock, self._depth = threading.RLock(), 0


_views: _TwoViews | None = None


def look() -> None:
    """See what `sys.path` has before our packages under their names: to be called when it has changed."""
    global _views
    for name in NAMES:
        if _views is not None and name in (*_views.names, *_views.ours):
            continue
        spec = PathFinder.find_spec(name)
        if spec is None or spec.origin is None or _of_ours(spec.origin):  # a directory without `__init__.py` gives way to a package
            continue
        if _views is None:
            _views = _TwoViews()
            sys.meta_path.insert(0, _views)
        if is_checkout(os.path.dirname(os.path.dirname(spec.origin))):  # noqa: PTH120
            _views.ours.add(name)
        else:
            _views.add(name, spec)


def import_for_program(name: str) -> ModuleType:
    """Import a module as the program would that `sys.path` has first; raises what that raises."""
    return importlib.import_module(name) if _views is None else _views.for_program(name)


def environment() -> dict[str, str]:
    """Of a process that runs a module of our packages as a program, and nothing of a user's: it finds ours first."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))}


def _below(name: str) -> list[str]:
    return [each for each in list(sys.modules) if each == name or each.startswith(f"{name}.")]


def _is_being_imported(name: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def _is_ours(importer: Mapping[str, Any] | None) -> bool:
    """Whether a module, by its names, is one of this project."""
    file = (importer or {}).get("__file__")
    return isinstance(file, str) and _of_ours(file)


def is_checkout(directory: str) -> bool:
    """Whether it is one of this project, of whatever version."""
    import tomllib  # seldom wanted

    try:
        with open(f"{directory}/pyproject.toml", "rb") as text:  # noqa: PTH123 - see `_ROOT`
            project = tomllib.load(text).get("project")
    except (OSError, ValueError):
        return False
    return isinstance(project, dict) and project.get("name") == "resilient"


@cache
def _of_ours(file: str) -> bool:
    return os.path.realpath(file).startswith(_OURS)
