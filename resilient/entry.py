"""The entry point: `module:function`, or a script with its arguments, as the config names it.

Owns what the two have in common. A function is called with the config; a script runs as under `python script.py ARGS`, with the
environment that torchrun would give it.
"""

import ast
import importlib
import logging
import runpy
import shlex
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """What every rank runs: a function of a module, or where `script` is given, that with `args`."""

    module: str = ""
    function: str = ""
    script: Path | None = None
    args: tuple[str, ...] = ()

    @property
    def is_script(self) -> bool:
        """Whether it is run as a program is, and knows no config."""
        return self.script is not None


def parse(text: str) -> Entry:
    """The entry point that a config names; its form has been checked (`resilient.config`)."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quotation that does not end
        words = [""]
    if words[0].endswith(".py"):
        return Entry(script=Path(words[0]), args=tuple(words[1:]))
    module, _, function = text.partition(":")
    return Entry(module, function)


def find(entry: Entry, *, trace: TextIO | None = None) -> tuple[Any, str | None]:
    """The module of a function, imported, and what is wrong with the entry point, if something is. A script is only read.

    Args:
        trace: gets the traceback of an import that fails.
    """
    if entry.script is not None:
        try:
            ast.parse(entry.script.read_bytes(), str(entry.script))
        except OSError as error:
            return None, f"{entry.script} cannot be read: {error.strerror}"
        except (SyntaxError, ValueError) as error:
            return None, f"{entry.script} is not Python: {error}"
        return None, None
    try:
        module = importlib.import_module(entry.module)
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything while it is imported
        if trace is not None:
            traceback.print_exc(file=trace)
        return None, f"cannot be imported: {type(error).__name__}: {error}"
    if not callable(getattr(module, entry.function, None)):
        return module, f"module {entry.module} has no function {entry.function!r}"
    return module, None


def ahead(entry: Entry) -> list[str]:
    """The modules to import before the ranks are forked: that of the function, or what a script imports at its top level."""
    if entry.script is None:
        return [entry.module]
    try:
        body = ast.parse(entry.script.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []  # the ranks will say so
    names: list[str] = []
    for each in body:
        if isinstance(each, ast.Import):
            names += [alias.name for alias in each.names]
        elif isinstance(each, ast.ImportFrom) and each.module is not None and not each.level:
            names.append(each.module)
    return list(dict.fromkeys(names))


def warm_up(entry: Entry, config: object, rank: int, world_size: int) -> None:
    """Call the module's `warm_up(config, rank, world_size)`, if it has one, in a process that will be a rank and is none yet.

    What fails there is left out; the rank does it itself.
    """
    try:
        module = importlib.import_module(entry.module)
        getattr(module, "warm_up", lambda *_: None)(config, rank, world_size)
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything
        log.warning("%s cannot be warmed up: %s: %s", entry.module, type(error).__name__, error)


def run(entry: Entry, config: Callable[[], object]) -> None:
    """Run it in this process, which is a rank; `config` reads the config for a function."""
    if entry.script is None:
        getattr(importlib.import_module(entry.module), entry.function)(config())
        return
    sys.argv = [str(entry.script), *entry.args]
    sys.path.insert(0, str(entry.script.resolve().parent))
    runpy.run_path(str(entry.script), run_name="__main__")
