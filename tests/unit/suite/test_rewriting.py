"""Test modules are rewritten before the processes that run them start, and nothing in them is run for it."""

import sys
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook
from rewriting import compile_all

MODULE = '''"""What it says first."""
from pathlib import Path

Path({ran!r}).touch()

def test_it():
    assert 1 == len([])
'''


@pytest.fixture
def hook() -> AssertionRewritingHook:
    return next(finder for finder in sys.meta_path if isinstance(finder, AssertionRewritingHook))


def test_what_is_kept_is_the_rewritten_module_which_has_not_run(tmp_path: Path, hook: AssertionRewritingHook):
    test, helper, broken = (tmp_path / name for name in ("test_module.py", "helper.py", "test_broken.py"))
    module = MODULE.format(ran=str(tmp_path / "ran"))
    test.write_text(module)
    helper.write_text(module)
    broken.write_text("def")
    compile_all([broken, test, helper], hook)
    kept = {path.name.partition(".")[0]: path for path in (tmp_path / "__pycache__").iterdir()}
    assert kept.keys() == {"test_module", "helper"}
    assert "pytest" in kept["test_module"].name and b"@py_assert" in kept["test_module"].read_bytes()
    assert "pytest" not in kept["helper"].name
    assert not (tmp_path / "ran").exists()
