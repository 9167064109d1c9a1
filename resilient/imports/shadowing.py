"""Modules of a program that have the name of one of our packages, such as `checkpoint.py`: who imports decides which it is.

Python has one module of each name, the first that `sys.path` finds: a program's `checkpoint.py` would be taken for ours by the
runtime, or ours for it by the program. Here what belongs to this project gets this project's packages, and everything else gets
what `sys.path` has first. Nothing is changed where nothing is shadowed. Another copy of this project, as a checkout in the working
directory is, is no program's: all use the packages beside this file.

What finds modules by their names alone, as pickle does, finds the program's, and ours where the program has none.
"""

import builtins
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

_ROOT = os.path.realpath(__file__).rsplit(os.sep, 3)[0]  # every command imports this, and does without pathlib
NAMES = ("checkpoint", "chaos", "trainer")
"""Packages of ours that a program may have modules of the same name as; `resilient` itself is the runtime's alone."""
_OURS = tuple(f"{_ROOT}/{name}/" for name in (*NAMES, "resilient"))
_LOADS_OURS = "importlib.metadata"  # entry points that were installed: our own are the only ones of these names


class _TwoViews(MetaPathFinder):
    """Two sets of modules for the same names: those of the program, and ours.

    An import sees one of them in `sys.modules`. Between imports both are there, for what looks modules up by name, as pickle,
    `inspect` and `typing` do: of a name that both have, the program's where it is one of `names`, and below it ours.

    Attributes:
        names: that are taken twice, with what the program has there; None if that is nothing that can be imported.
        ours: names of which `sys.path` has another copy first.
    """

    def __init__(self) -> None:
        self.names: dict[str, ModuleSpec | None] = {}
        self.ours: set[str] = set()
        self._sides: dict[bool, dict[str, ModuleType]] = {True: {}, False: {}}  # True: the program's
        self._view: bool | None = None  # which of them is in `sys.modules`; None: both
        self._between: dict[str, ModuleType] = {}  # what was put there when that began
        self._program = threading.RLock()  # for the whole of an import by the program
        self._lock = threading.RLock()  # of `sys.modules`; not while a module of the program is executed
        self._mine = threading.local()  # `depth`: how often this thread has the lock for an import
        self._import = builtins.__import__
        self._import_module = importlib.import_module

    def _install(self) -> None:
        """From now on, in this process and in those that are forked from it."""
        builtins.__import__ = self.import_
        importlib.import_module = self.import_module
        for module in list(sys.modules.values()):  # which may have taken it from there before
            names = object.__getattribute__(module, "__dict__") if isinstance(module, ModuleType) else {}  # none is loaded by it
            if names.get("import_module") is self._import_module:
                names["import_module"] = self.import_module
        os.register_at_fork(before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._forked)

    def add(self, name: str, spec: ModuleSpec | None) -> None:
        """Also for this name; what was imported under it before is whose it is."""
        if not self.names:
            self._install()
        with self._lock:
            before = self._view
            self._show(None)
            self.names[name] = spec
            self._give_up_module_locks()
            self._show(before)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Ours, for us; for everything else what the other finders find."""
        name = fullname.partition(".")[0]
        if fullname in self.ours:
            return PathFinder.find_spec(fullname, [_ROOT])
        if name not in self.names:
            return None
        theirs = self.names[name]
        if self._view is False or theirs is None:
            return PathFinder.find_spec(fullname, [_ROOT]) if path is None else None
        if fullname == name and theirs.origin is None:  # a directory without `__init__.py`, which the other finders pass over
            return theirs
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            self._execute_unlocked(spec.loader)
        return spec

    def import_(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """What an `import` statement calls; see `builtins.__import__`."""
        full = name if not level else _absolute(name, globals, level)
        top = full.partition(".")[0]
        if top not in self.names:
            return self._import(name, globals, locals, fromlist or (), level)
        program = not _is_ours(globals) and (level > 0 or self._has(name))
        module = self._imported(full, program=program)
        if module is not None and not fromlist:
            module = self._imported(top, program=program)
        if module is not None and _has_all(module, fromlist or ()):
            return module
        with self._as_seen_by(program=program):
            return self._import(name, globals, locals, fromlist or (), level)

    def import_module(self, name: str, package: str | None = None) -> ModuleType:
        """In the place of `importlib.import_module`; whoever calls it imports."""
        top = (package or "" if name.startswith(".") else name).partition(".")[0]
        if top not in self.names:
            return self._import_module(name, package)
        caller = sys._getframe(1).f_globals
        program = not _is_ours(caller) and caller.get("__name__") != _LOADS_OURS and (name.startswith(".") or self._has(name))
        if (module := self._imported(name, program=program)) is not None:
            return module
        with self._as_seen_by(program=program):
            return self._import_module(name, package)

    def for_program(self, name: str) -> ModuleType:
        """Import what a program finds under a name."""
        with self._as_seen_by(program=True) if name.partition(".")[0] in self.names else nullcontext():
            return self._import_module(name)

    def find_for_program(self, name: str) -> ModuleSpec | None:
        """See `importlib.util.find_spec`, which is told of a module that is imported what that one is."""
        with self._as_seen_by(program=True) if name.partition(".")[0] in self.names else nullcontext():
            return importlib.util.find_spec(name)

    def _has(self, name: str) -> bool:
        """Whether the program has a module of this name; pickle asks for ours in the name of whoever calls it."""
        if name in self._sides[True]:
            return True
        top, *below = name.split(".")
        spec: ModuleSpec | None = self.names[top]
        for each in below:
            top = f"{top}.{each}"
            spec = spec and PathFinder.find_spec(top, spec.submodule_search_locations or ())
        return spec is not None

    def _imported(self, name: str, *, program: bool) -> ModuleType | None:
        """A module that is whole, without a lock: a function may import it in every step, and a thread while others import."""
        module = self._sides[program].get(name)
        if module is None or _is_being_imported(module):
            return None
        return module if not program or sys.modules.get(name) is module else None  # which a program may have taken out

    @contextmanager
    def _as_seen_by(self, *, program: bool) -> Iterator[None]:
        """Meanwhile `sys.modules` has these modules and not the others; an import may lead to one of the other side."""
        whole: AbstractContextManager[object] = self._program if program else nullcontext()
        with whole, self._lock:
            before = self._view
            self._show(program)
            self._mine.depth = self._depth() + 1
            try:
                yield
            finally:
                self._mine.depth -= 1
                self._show(before)

    def _execute_unlocked(self, loader: SourceFileLoader) -> None:
        """A module of the program may train while it is imported, and threads of the runtime import meanwhile."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            depth, view = self._depth(), self._view
            if not depth:
                execute(module)
                return
            self._show(None)
            self._give_up_module_locks()
            self._mine.depth = 0
            for _ in range(depth):
                self._lock.release()
            try:
                execute(module)
            finally:
                for _ in range(depth):
                    self._lock.acquire()
                self._mine.depth = depth
                self._show(view)

        loader.exec_module = exec_module  # type: ignore[method-assign]

    def _give_up_module_locks(self) -> None:
        """Python's own are of names, of whichever side: whoever imports ours of one would wait with our lock for this thread, which
        waits for our lock. Other threads of the program wait for `_program`."""
        locks = getattr(vars(importlib)["_bootstrap"], "_module_locks", {})
        for name, lock in list(locks.items()):
            if name.partition(".")[0] in self.names and getattr(lock(), "owner", None) == threading.get_ident():
                locks.pop(name, None)

    def _show(self, view: bool | None) -> None:
        """What is imported by a side becomes its own. Nothing that stays is missing meanwhile: other threads look things up."""
        if view is self._view:
            return
        shown = {each: module for each, module in list(sys.modules.items()) if each.partition(".")[0] in self.names}
        if self._view is not None:
            self._sides[self._view] = shown
        else:
            self._sort(shown)
        self._view = view
        if view is None:
            self._between = self._both()
        new = self._between if view is None else self._sides[view]
        sys.modules.update(new)
        for each in shown:
            if each not in new:
                sys.modules.pop(each, None)

    def _sort(self, shown: Mapping[str, ModuleType]) -> None:
        """What was changed while both were there: a program may have taken modules out, or put some in."""
        for name in {*self._between, *shown}:
            old, new = self._between.get(name), shown.get(name)
            if new is old:
                continue
            for side in self._sides.values():
                if name in side and side[name] is old:
                    del side[name]
            if new is not None:
                self._sides[not _is_ours(getattr(new, "__dict__", None))][name] = new

    def _both(self) -> dict[str, ModuleType]:
        program = self._sides[True]
        first = {name: module for name, module in program.items() if name in self.names or _is_being_imported(module)}
        return {**program, **self._sides[False], **first}

    def _depth(self) -> int:
        depth: int = getattr(self._mine, "depth", 0)
        return depth

    def _forked(self) -> None:
        """By the only thread that there is now."""
        self._program = threading.RLock()
        self._lock.release()


_views: _TwoViews | None = None


def look() -> None:
    """See what `sys.path` has before our packages under their names: to be called when it has changed."""
    global _views
    for name in NAMES:
        spec = _first(name)
        if spec is None or (spec.origin is not None and _of_ours(spec.origin)):
            continue
        if _views is None:
            _views = _TwoViews()
            sys.meta_path.insert(0, _views)
        if _is_package(spec) and is_checkout(os.path.dirname(os.path.dirname(str(spec.origin)))):  # noqa: PTH120 - as above
            _views.ours.add(name)
        else:
            _views.ours.discard(name)
            _views.add(name, spec if _has_code(spec) else None)


def _first(name: str) -> ModuleSpec | None:
    """What `sys.path` has first under a name: also a directory of modules without `__init__.py`, which for Python gives way to a
    package that was installed, and then no program would find what is in it."""
    for each in sys.path:
        spec = PathFinder.find_spec(name, [each])
        if spec is not None and _has_code(spec):
            return spec
    return PathFinder.find_spec(name)  # a directory of something else: it hides ours where that is installed as editable


def _is_package(spec: ModuleSpec) -> bool:
    """With an `__init__.py`, as all of ours are."""
    return spec.origin is not None and spec.submodule_search_locations is not None


def _has_code(spec: ModuleSpec) -> bool:
    """Whether it is a module, or a directory with some in it itself: below it there may be thousands of checkpoints."""
    if spec.origin is not None:
        return True
    try:
        return any(each.endswith(".py") for place in spec.submodule_search_locations or () for each in os.listdir(place))  # noqa: PTH208 - as above
    except OSError:
        return False


def import_for_program(name: str) -> ModuleType:
    """Import a module as the program would that `sys.path` has first; raises what that raises."""
    return importlib.import_module(name) if _views is None else _views.for_program(name)


def find_for_program(name: str) -> ModuleSpec | None:
    """What a program finds under a name, whose packages are imported; raises what that raises."""
    return importlib.util.find_spec(name) if _views is None else _views.find_for_program(name)


def running(module: str) -> tuple[str, ...]:
    """The command that runs a module of ours as a program: it looks for nothing in the working directory, unless we lie there."""
    try:
        lies_there = os.getcwd() == _ROOT  # noqa: PTH109 - as above
    except OSError:  # it was removed
        lies_there = False
    return (sys.executable, *(() if lies_there else ("-P",)), "-m", module)


def environment() -> dict[str, str]:
    """Of a process that runs a module of our packages as a program, and nothing of a user's: it finds ours first."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))}


def _absolute(name: str, importer: Mapping[str, object] | None, level: int) -> str:
    """Of a relative import."""
    package = str((importer or {}).get("__package__") or "")
    for _ in range(level - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{name}" if name else package


def _has_all(module: ModuleType, names: Sequence[str]) -> bool:
    """Whether nothing is left to import for `from module import names`."""
    return not hasattr(module, "__path__") or all(each != "*" and hasattr(module, each) for each in names)


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _is_ours(importer: Mapping[str, Any] | None) -> bool:
    """Whether a module, by its names, is one of this project."""
    file = (importer or {}).get("__file__")
    return isinstance(file, str) and _of_ours(file)


def is_checkout(directory: str) -> bool:
    """Whether it is one of this project, of whatever version."""
    import tomllib  # seldom wanted

    try:
        with open(f"{directory}/pyproject.toml", "rb") as text:  # noqa: PTH123 - as above
            project = tomllib.load(text).get("project")
    except (OSError, ValueError):
        return False
    return isinstance(project, dict) and project.get("name") == "resilient"


@cache
def _of_ours(file: str) -> bool:
    return os.path.realpath(file).startswith(_OURS)
