"""Modules of a program that it does not get, for others of their names are imported already."""

import json
import os
import resource
from pathlib import Path

import pytest

from resilient.imports.ahead import Source
from resilient.imports.hidden import Hidden, hidden, taken_names, tell

IMPORTED = {"json": json, "os": os, "resource": resource}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Modules beside it have names of the standard library, and one imports another."""
    for name in ("resource.py", "os.py", "mine.py", "json/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "numbers").mkdir()
    path = tmp_path / "train.py"
    path.write_text("import os\nimport mine\n")
    return path


def found(script: Path) -> list[Hidden]:
    directory = str(script.parent)
    return hidden([Source(script)], directory, taken_names(directory, IMPORTED))


def test_names_are_taken_where_another_module_is_imported_and_a_program_could_have_its_own(script: Path):
    """`os` is frozen into the interpreter."""
    assert taken_names(str(script.parent), IMPORTED) == {"json": json.__file__, "resource": resource.__file__}
    assert taken_names(str(Path(json.__file__).parent.parent), IMPORTED) == {}, "they are those that lie there"


def test_a_module_that_the_program_does_not_import_is_not_missed(script: Path):
    assert found(script) == []


def test_an_import_is_found_in_the_program_and_in_its_own_modules(script: Path):
    mine = script.with_name("mine.py")
    mine.write_text("def later():\n    from resource import VALUE\n    return VALUE\n")
    script.write_text("import mine\nimport json.decoder\n")
    assert found(script) == [
        Hidden(script.parent / "json/__init__.py", script, 2, str(json.__file__)),
        Hidden(script.with_name("resource.py"), mine, 2, str(resource.__file__)),
    ]


def test_a_program_is_told_which_of_its_modules_it_does_not_get(script: Path, caplog: pytest.LogCaptureFixture):
    script.write_text("import resource, json\n")
    tell([Source(script)], str(script.parent))
    (told,) = caplog.messages
    for name in ("resource.py", "json/__init__.py"):
        assert f"{script.parent}/{name} (imported in {script}:1, which gets " in told
    assert str(json.__file__) in told and "Call yours something else" in told


def test_a_program_with_names_of_its_own_is_told_nothing(script: Path, caplog: pytest.LogCaptureFixture):
    tell([Source(script)], str(script.parent))
    assert caplog.messages == []
