"""What a program imports of installed packages, found by reading it and its own modules; nothing of it is executed.

An installed package is imported once on a node, before its ranks are forked. The program's own modules are not: while they are
imported they may look at `sys.argv`, `RANK` or their process, which are those of a rank in the ranks alone. What is imported after
something that may change the circumstances, as the environment, is left to the ranks, too (`resilient.imports.order`).
"""

import functools
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from resilient.imports.order import ImportOrder, Place, Unknown
from resilient.imports.shadowing import is_checkout

MOST = 200  # files of the program that are read
_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
_RUNTIME = Path(__file__).parents[1]
_OURS = (_RUNTIME, _RUNTIME.with_name("checkpoint"))


class Source(NamedTuple):
    """A file of the program. Attributes: package: that it belongs to; empty: none."""

    path: Path
    package: str = ""


def of_program(begin: Sequence[Source], directory: str) -> list[str]:
    """The modules to import, in the order in which the program does; `module:name` for a name that is taken from one.

    Args:
        begin: what is run: the packages of a program, and the program itself.
        directory: in which the program's modules are found first.
    """
    home = functools.cache(home_of)

    def place_of(module: str) -> Place:
        top = module.partition(".")[0]
        if home(top, directory) is not None:
            return Place.PROGRAM
        if top in sys.stdlib_module_names:
            return Place.STANDARD_LIBRARY
        return Place.INSTALLED if _is_known(top) else Place.NOWHERE

    def order(source: Source) -> ImportOrder:
        return ImportOrder(source.path, source.package, is_program=source is begin[-1], place_of=place_of)

    found: dict[str, None] = {}
    seen = {each.path for each in begin}
    running = [iter(order(each)) for each in reversed(begin)]  # each was imported by the one before
    try:
        while running:
            for module, name in running[-1]:
                own = home(module.partition(".")[0], directory)
                if own is None:
                    found[f"{module}:{name}" if name else module] = None
                elif files := [each for each in _executed(module, name, own) if each.path not in seen]:
                    seen.update(each.path for each in files)
                    running += [iter(order(each)) for each in reversed(files)]
                    break
            else:
                running.pop()
            if len(seen) > MOST:
                break
    except Unknown:
        pass  # it changes what is imported from there on, or may
    return list(found)


def _executed(module: str, name: str, directory: str) -> list[Source]:
    """The files that an import of a module, or of a name from it, executes. Raises Unknown where they are not Python's."""
    if name:
        return sources(f"{module}.{name}", directory)
    at = os.path.join(directory, *module.split("."))  # noqa: PTH118
    if not os.path.isdir(at) and not os.path.isfile(f"{at}.py"):  # noqa: PTH112, PTH113 (see `sources`)
        raise Unknown
    return sources(module, directory)


def hides(directory: str) -> Path | None:
    """What lies in a directory of a program under the name of the runtime, which ranks have imported; None if nothing does."""
    found = sources(_RUNTIME.name, directory)
    if not found or _is_ours(found[0].path) or is_checkout(directory):
        return None
    return found[0].path if found[0].path.name != "__init__.py" else found[0].path.parent


def _is_ours(path: Path) -> bool:
    """Whether it is the very package that ranks have imported, as where it lies on PYTHONPATH beside a script."""
    return path.name == "__init__.py" and _RUNTIME.exists() and path.parent.samefile(_RUNTIME)


def of_module(module: str, directory: str) -> list[Source]:
    """The files that `python -m module` runs, its packages first; none where they are not found as files. Nothing is imported.

    Args:
        directory: in which the program's modules are found first.
    """
    top, _, _ = module.partition(".")
    home = home_of(top, directory) or next((str(place.parent) for place in _places(top)), None)
    found = sources(module, home) if home is not None else []
    if found and found[-1].path == Path(home or "", *module.split("."), "__init__.py"):
        found = [*found, *sources(f"{module}.__main__", home or "")[-1:]]
    leaf = "__main__" if len(found) > 1 and found[-1].path.name == "__main__.py" else module.rpartition(".")[2]
    return found if found and found[-1].path.stem == leaf else []


def sources(module: str, directory: str) -> list[Source]:
    """The files of a module below a directory, its packages first; none where it is not there."""
    names, at, found = module.split("."), directory, list[Source]()
    for number, name in enumerate(names, 1):
        at = f"{at}/{name}"
        for path, package in ((f"{at}.py", names[: number - 1]), (f"{at}/__init__.py", names[:number])):
            if os.path.isfile(path):  # noqa: PTH113 (it does not raise where a directory may not be read)
                found.append(Source(Path(path), ".".join(package)))
                break
    return found


def home_of(top: str, directory: str) -> str | None:
    """The directory that holds a top-level module of the program; None for what is installed, or nowhere.

    Args:
        directory: in which the program's modules are found first.
    """
    if sources(top, directory):
        return directory
    places = _places(top)
    return None if any(map(_is_installed, places)) else next((str(place.parent) for place in places), None)


def _is_known(top: str) -> bool:
    """Whether a top-level module can be found: it is installed, built in, or imported already."""
    return top in sys.modules or any(map(_is_installed, _places(top)))


def _is_installed(place: Path) -> bool:
    """Whether that is a place of the standard library, of a package that was installed, or of what runs here itself."""
    return bool(_INSTALLED.intersection(place.parts)) or any(place.is_relative_to(each) for each in (*_STANDARD, *_OURS))


def _places(top: str) -> list[Path]:
    """Where a top-level module lies: its file, or the directory of its package. Nothing is imported."""
    try:
        spec = importlib.util.find_spec(top)
    except Exception:  # noqa: BLE001 - whoever finds modules here may raise anything
        return []
    if spec is None:
        return []
    return [
        Path(place) for place in spec.submodule_search_locations or ([spec.origin] if spec.has_location and spec.origin else [])
    ]
