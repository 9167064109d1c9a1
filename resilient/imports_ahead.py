"""What a program imports of installed packages, found by reading it and its own modules; nothing of it is executed.

An installed package is imported once on a node, before its ranks are forked. The program's own modules are not: while they are
imported they may look at `sys.argv`, `RANK` or their process, which are those of a rank in the ranks alone.
"""

import ast
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MOST = 200  # files of the program that are read
_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


class Source(NamedTuple):
    """A file of the program. Attributes: package: that it belongs to; empty: none."""

    path: Path
    package: str = ""


def of_program(begin: Sequence[Source], directory: str) -> list[str]:
    """The modules to import, in the order in which they are met; `module:name` for a name that is taken from one.

    Args:
        begin: what is run.
        directory: in which the program's modules are found first.
    """
    found: dict[str, None] = {}
    left, seen = list(begin), {each.path for each in begin}
    while left and len(seen) <= MOST:
        for module, name in _imports(left.pop(0)):
            home = _home(module, directory)
            if home is not None:
                own = [*sources(module, home), *(sources(f"{module}.{name}", home) if name else ())]
                new = [each for each in dict.fromkeys(own) if each.path not in seen]
                seen.update(each.path for each in new)
                left += new
            elif _is_installed(module):
                found[f"{module}:{name}" if name else module] = None
    return list(found)


def sources(module: str, directory: str) -> list[Source]:
    """The files of a module below a directory, its packages first; none where it is not there."""
    names, at, found = module.split("."), Path(directory), list[Source]()
    for number, name in enumerate(names, 1):
        if (at / f"{name}.py").is_file():
            return [*found, Source(at / f"{name}.py", ".".join(names[: number - 1]))]
        at /= name
        if (at / "__init__.py").is_file():
            found.append(Source(at / "__init__.py", ".".join(names[:number])))
    return found


def _imports(source: Source) -> Iterator[tuple[str, str]]:
    """Module and name of each import at the top level of a file; the name is empty for the module itself."""
    try:
        body = ast.parse(source.path.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return  # the ranks will say so
    package = source.package.split(".")
    for each in body:
        if isinstance(each, ast.Import):
            yield from ((alias.name, "") for alias in each.names)
        elif isinstance(each, ast.ImportFrom):
            above = package[: len(package) + 1 - each.level] if each.level else []
            module = ".".join(filter(None, [*above, each.module]))
            if module:
                yield module, ""
                yield from ((module, alias.name) for alias in each.names if alias.name != "*")


def _home(module: str, directory: str) -> str | None:
    """The directory that holds a module of the program, top package and all; None for what is installed, or nowhere."""
    if sources(module, directory):
        return directory
    top = module.partition(".")[0]
    if top in sys.modules or _is_installed(module):
        return None
    return next((str(place.parent) for place in _places(top)), None)


def _is_installed(module: str) -> bool:
    """Whether a module belongs to the standard library or to a package that was installed, or is imported already."""
    top = module.partition(".")[0]
    return top in sys.modules or any(
        _INSTALLED.intersection(place.parts) or any(place.is_relative_to(each) for each in _STANDARD) for place in _places(top)
    )


def _places(top: str) -> list[Path]:
    """Where a top-level module lies: its file, or the directory of its package."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return []
    if spec is None:
        return []
    return [Path(place) for place in spec.submodule_search_locations or ([spec.origin] if spec.origin else [])]
