"""Modules of a program that it does not get, since another one of the same name is imported already in the process that ranks are
forked from: a `resource.py` beside the script, say, which it would find under plain Python.

Owns finding them, by reading the program and its own modules, and the message. Names of our own packages are `shadowing`'s.
"""

import ast
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import FrozenImporter
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from resilient.imports import shadowing
from resilient.imports.ahead import MOST, Source, sources

log = logging.getLogger(__name__)


class Hidden(NamedTuple):
    """A module of a program. Attributes: path: its file; importer, line: where the program asks for it; taken: what it gets."""

    path: Path
    importer: Path
    line: int
    taken: str


def tell(begin: Sequence[Source], directory: str) -> None:
    """Say which modules of a program are hidden, if it imports some that are; in one message.

    Args:
        begin: what is run: the packages of a program, and the program itself.
        directory: in which the program's modules are found first.
    """
    taken = taken_names(directory, sys.modules)
    if not taken or not (found := hidden(begin, directory, taken)):
        return
    log.warning(
        "the script does not get modules of its own, for others of the same names are imported in every rank before it begins: %s. "
        "Call yours something else",
        "; ".join(f"{each.path} (imported in {each.importer}:{each.line}, which gets {each.taken})" for each in found),
    )


def taken_names(directory: str, modules: Mapping[str, ModuleType]) -> dict[str, str]:
    """Names of modules in a directory under which another module is imported, and the file of that one.

    What is built into the interpreter no program can have another one of.
    """
    found = {}
    for name in _names(directory):
        file = getattr(modules.get(name), "__file__", None)
        if not isinstance(file, str) or name in shadowing.NAMES or FrozenImporter.find_spec(name) is not None:
            continue
        if not any(os.path.realpath(file) == os.path.realpath(each.path) for each in sources(name, directory)):
            found[name] = file
    return found


def _names(directory: str) -> Iterator[str]:
    """Of the modules and packages that lie in it."""
    with suppress(OSError), os.scandir(directory) as entries:
        for each in entries:
            if each.name.endswith(".py"):
                yield each.name.removesuffix(".py")
            elif each.name.isidentifier() and sources(each.name, directory):
                yield each.name


def hidden(begin: Sequence[Source], directory: str, taken: Mapping[str, str]) -> list[Hidden]:
    """The first import of each of these names in the program, or in modules of its own that it imports."""
    found: dict[str, Hidden] = {}
    waiting = [each.path for each in begin]
    seen = set(waiting)
    while waiting and len(seen) <= MOST:
        importer = waiting.pop(0)
        for module, line in _imports(importer):
            top = module.partition(".")[0]
            if top in taken:
                path = sources(top, directory)[0].path
                found.setdefault(top, Hidden(path, importer, line, taken[top]))
                continue
            new = [each.path for each in sources(module, directory) if each.path not in seen]
            seen.update(new)
            waiting += new
    return list(found.values())


def _imports(path: Path) -> Iterable[tuple[str, int]]:
    """The modules that a file names in `import` statements, wherever they stand, and perhaps names that are none; their lines."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # the rank will say so
        return
    for each in ast.walk(tree):
        if isinstance(each, ast.Import):
            yield from ((alias.name, each.lineno) for alias in each.names)
        elif isinstance(each, ast.ImportFrom) and each.module and not each.level:
            yield from ((f"{each.module}.{alias.name}", each.lineno) for alias in each.names)
