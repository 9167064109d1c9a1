"""The quickstart's corpus: English prose that every CPython carries, so that nothing is downloaded.

The documentation in `pydoc_data.topics`, and the docstrings of the standard library, read from its sources without importing them.
One document per topic and per module, in sorted order: for one Python always the same.
"""

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

LIMIT_BYTES = 6_000_000
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "pydoc_data"}


def documents(limit_bytes: int = LIMIT_BYTES) -> Iterator[str]:
    """The documents, up to about so many bytes of text."""
    used = 0
    for text in (*_topics(), *_modules(Path(sysconfig.get_path("stdlib")))):
        yield text
        used += len(text.encode())
        if used >= limit_bytes:
            return


def _topics() -> Iterator[str]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]


def _modules(library: Path) -> Iterator[str]:
    for path in sorted(library.rglob("*.py")):
        if not _LEFT_OUT.isdisjoint(path.relative_to(library).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the sources, not of ours
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        found = "\n\n".join(text for text in texts if text)
        if found:
            yield found
