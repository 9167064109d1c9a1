"""The entry point: `module:function`, or a script or a module (`-m`) with its arguments, as the config names it.

Owns what they have in common. A function is called with the config; a script runs as under `python script.py ARGS`, a module as
under `python -m module ARGS`, with the environment that torchrun would give it.
"""

import builtins
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from resilient.config.errors import ConfigError, Problem
from resilient.imports import hidden, shadowing
from resilient.imports.ahead import Source, hides, of_module, of_program

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """What every rank runs: a function of a module, or where `script` is given, that with `args`, or where `function` is empty, the
    module itself as a program."""

    module: str = ""
    function: str = ""
    script: Path | None = None
    args: tuple[str, ...] = ()

    @property
    def is_script(self) -> bool:
        """Whether it is run as a program is, and knows no config."""
        return self.script is not None or not self.function

    @property
    def directory(self) -> str:
        """What Python puts first on `sys.path` for a program."""
        return str(self.script.resolve().parent) if self.script is not None else str(Path.cwd())

    def source(self) -> Path | None:
        """The file of a program; None if there is none."""
        if self.script is not None or self.function:
            return self.script
        if files := of_module(self.module, self.directory):
            return files[-1].path
        try:
            found = _spec(self.module)  # which imports its packages
        except Exception:  # noqa: BLE001 - they may raise anything
            return None
        return Path(found.origin) if found is not None and found.origin is not None else None


def _spec(module: str) -> ModuleSpec | None:
    """Of a module that is run as a program, or of a package's `__main__`. Raises ImportError, ValueError."""
    found = shadowing.find_for_program(module)
    if found is not None and found.submodule_search_locations is not None:
        found = shadowing.find_for_program(f"{module}.__main__")
    return found


def parse(text: str) -> Entry:
    """The entry point that a config names; its form has been checked (`resilient.config`)."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quotation that does not end
        words = [""]
    if words[0].endswith(".py"):
        return Entry(script=Path(words[0]), args=tuple(words[1:]))
    if words[0] == "-m":
        return Entry(module=words[1], args=tuple(words[2:]))
    module, _, function = text.partition(":")
    return Entry(module, function)


def find(entry: Entry, *, trace: TextIO | None = None) -> tuple[Any, str | None]:
    """The module of a function, imported, and what is wrong with the entry point, if something is. A script is only read.

    Args:
        trace: gets the traceback of an import that fails.
    """
    if entry.is_script:
        source = entry.source()
        if source is None:
            return None, f"there is no module {entry.module} that can be run"
        try:
            compile(source.read_bytes(), str(source), "exec", dont_inherit=True)  # finds what `ast.parse` lets pass
        except OSError as error:
            return None, f"{source} cannot be read: {error.strerror}"
        except (SyntaxError, ValueError) as error:
            return None, f"{source} is not Python: {error}"
        return None, None
    try:
        module = shadowing.import_for_program(entry.module)
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything while it is imported
        if trace is not None:
            traceback.print_exc(file=trace)
        return None, f"cannot be imported: {type(error).__name__}: {error}"
    if not callable(getattr(module, entry.function, None)):
        return module, f"module {entry.module} has no function {entry.function!r}"
    return module, None


def ahead(entry: Entry) -> list[str]:
    """What to import before the ranks are forked: the function's module, or what a program imports of installed packages.

    `module:name` is a name that is taken from a module: one that loads its parts when they are first asked for has them then. A
    program's own modules are read and not imported, for they may look at `sys.argv` or at the rank while they are.
    """
    if not entry.is_script:
        return [entry.module]
    try:
        return of_program(_read_first(entry), entry.directory)
    except Exception as error:  # noqa: BLE001 - without it a start takes longer, and that is all
        log.warning("what %s imports cannot be read ahead: %s: %s", entry.script or entry.module, type(error).__name__, error)
        return []


def _read_first(entry: Entry) -> list[Source]:
    """The files that a program begins with."""
    return [Source(entry.script)] if entry.script is not None else of_module(entry.module, entry.directory)


def must_hide_nothing(directory: str) -> None:
    """Raises ConfigError where a program's directory has a module that hides the runtime, whose name ranks know it by."""
    if (path := hides(directory)) is not None:
        why = f"{path} has the name of the runtime, which is imported already in every rank: call it something else"
        raise ConfigError([Problem("entrypoint", None, why)])


def warm_up(entry: Entry, config: object, rank: int, world_size: int) -> None:
    """Call the module's `warm_up(config, rank, world_size)`, if it has one, in a process that will be a rank and is none yet.

    What fails there is left out; the rank does it itself.
    """
    try:
        module = shadowing.import_for_program(entry.module)
        getattr(module, "warm_up", lambda *_: None)(config, rank, world_size)
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything
        log.warning("%s cannot be warmed up: %s: %s", entry.module, type(error).__name__, error)


def run(entry: Entry, config: Callable[[], object]) -> None:
    """Run it in this process, which is a rank; `config` reads the config for a function."""
    if not entry.is_script:
        getattr(shadowing.import_for_program(entry.module), entry.function)(config())
        return
    find_modules(entry)
    if os.environ.get("RANK", "0") == "0":
        hidden.tell(_read_first(entry), entry.directory)
    # Not by runpy, which takes the module away again: threads and `atexit` may still need it.
    program = ModuleType("__main__")
    program.__dict__["__builtins__"] = builtins
    if entry.script is not None:
        file = str(entry.script.absolute())
        sys.argv, code = [str(entry.script), *entry.args], compile(entry.script.read_bytes(), file, "exec")
    else:
        spec = _spec(entry.module)
        if spec is None or not isinstance(spec.loader, InspectLoader) or (found := spec.loader.get_code(spec.name)) is None:
            raise ImportError(f"there is no module {entry.module} that can be run", name=entry.module)
        file, code = str(spec.origin), found
        program.__spec__, program.__loader__, program.__package__ = spec, spec.loader, spec.parent
        sys.argv = [file, *entry.args]
    program.__file__ = file
    sys.modules["__main__"] = program
    exec(code, program.__dict__)


def find_modules(entry: Entry) -> None:
    """Have modules found where Python finds them for this program: beside a script, or in the working directory."""
    if sys.path[:1] == [entry.directory]:
        return
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", str(Path.cwd())):  # with -P it is one of PYTHONPATH, and stays
        sys.path[0] = entry.directory
    else:
        sys.path.insert(0, entry.directory)
    shadowing.look()
