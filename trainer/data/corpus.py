"""The quickstart's corpus: English prose that every CPython carries, so that nothing is downloaded.

The documentation in `pydoc_data.topics`, and the docstrings of the standard library, one document per topic and per module. All is
parsed, nothing is imported. For one Python always the same.
"""

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from trainer.data.errors import DataError

LIMIT_BYTES = 6_000_000
# Tests say nothing in English, and what is installed beside the library differs from place to place.
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "idlelib", "lib2to3", "pydoc_data", "site-packages", "dist-packages"})
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def documents(limit_bytes: int = LIMIT_BYTES, library: Path | None = None) -> list[str]:
    """The documents, up to about so many bytes of UTF-8, in an order that puts neighbours of the alphabet far apart.

    So every split of it is a fair sample, rather than the modules from x to z.

    Raises:
        DataError: this Python has no sources.
    """
    root = library or Path(sysconfig.get_path("stdlib"))
    found = dict(_topics(root))
    found.update(_modules(root))
    if not found:
        raise DataError(f"{root} holds no sources of the standard library, so there is no text; name files in data.text")
    chosen, used = [], 0
    for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if used >= limit_bytes:
            break
        chosen.append(found[name])
        used += len(found[name].encode())
    return chosen


def _topics(library: Path) -> Iterator[tuple[str, str]]:
    tree = _parsed(library / "pydoc_data" / "topics.py")
    for node in tree.body if tree else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for key, text in ast.literal_eval(node.value).items():
                yield f"topic {key}", text


def _modules(library: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if not _LEFT_OUT.isdisjoint(inside.parts):
            continue
        tree = _parsed(path)
        if tree is None:
            continue
        texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, _WITH_DOCSTRING))
        found = "\n\n".join(text for text in texts if text and not text.isspace())
        if found and _encodable(found):
            yield f"module {inside.as_posix()}", found


def _parsed(path: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the sources, not of ours
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):  # a module for another Python, or somebody's leftover: no text of ours
        return None


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a docstring about lone surrogates
        return False
    return True
