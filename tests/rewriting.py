"""Modules are compiled once, and not by each of the processes that run tests beside each other.

Before pytest imports a test module it rewrites its assertions, and keeps what comes of it beside the compiled modules. In a fresh
checkout six processes would do that at the same time for each of four hundred modules, which takes 12 s of processor time in each.
"""

import compileall
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook

REWRITTEN = ("test_*.py", "conftest.py")


def rewrite(path: Path, hook: Loader) -> None:
    """Have pytest rewrite and keep a module; nothing in it is run."""
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=hook)
    assert spec is not None
    module = ModuleType(path.stem)
    module.__spec__ = spec
    module.__dict__["__builtins__"] = {}  # its first import fails
    with suppress(Exception):  # whoever imports it says what is wrong
        hook.exec_module(module)


def compile_all(paths: Sequence[Path], hook: Loader) -> None:
    for path in paths:
        if any(path.match(pattern) for pattern in REWRITTEN):
            rewrite(path, hook)
        else:
            compileall.compile_file(path, quiet=2)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no" or sys.dont_write_bytecode:
        return
    hook = next((finder for finder in sys.meta_path if isinstance(finder, AssertionRewritingHook)), None)
    if hook is None:  # --assert=plain
        return
    asked = [Path(config.invocation_params.dir, word.split("::")[0]) for word in config.args]
    packages = [path.parent for path in config.rootpath.glob("*/__init__.py")]
    paths = sorted({file for path in (*asked, *packages) for file in (path.rglob("*.py") if path.is_dir() else [path])})
    count = len(os.sched_getaffinity(0))
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=compile_all, args=(paths[first::count], hook)) for first in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
