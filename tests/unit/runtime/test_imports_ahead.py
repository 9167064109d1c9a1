"""What is imported before the ranks are forked: what a program takes from installed packages, and nothing of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from resilient import entry
from resilient.config.errors import ConfigError
from resilient.imports_ahead import MOST

RAISES = "raise AssertionError('imported')\n"


def written(folder: Path, **files: str) -> Path:
    """Files of a program by their names, with `__` for a slash; each raises where it is imported."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + RAISES)
    return folder


def ahead(monkeypatch: pytest.MonkeyPatch, folder: Path, words: str) -> list[str]:
    monkeypatch.chdir(folder)
    program = entry.parse(words)
    monkeypatch.setattr(sys, "path", [program.directory, *sys.path])
    return entry.ahead(program)


def test_a_function_is_imported_with_its_module():
    assert entry.ahead(entry.parse("trainer:train")) == ["trainer"]


def test_modules_beside_a_script_are_read_and_their_packages_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = written(
        tmp_path,
        train="import json, options\nfrom pieces import model, nothing\n",
        options="import argparse\nif True:\n    import tomllib\n",
        pieces__data="import csv\n",
        pieces__model="from .data import x\nfrom ..options import y\nimport torch.nn.functional as F\n",
    )
    found = ahead(monkeypatch, folder, "train.py --lr 3")
    assert found == ["json", "argparse", "torch.nn.functional", "csv"]


def test_a_package_that_was_not_installed_is_read_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As a checkout on PYTHONPATH, or one that was installed as editable."""
    written(tmp_path / "elsewhere", core__parallel="from transformers import Trainer\n")
    (tmp_path / "elsewhere/core/__init__.py").write_text("import colorsys\n" + RAISES)
    folder = written(tmp_path / "here", train="from core.parallel import x\n")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    assert ahead(monkeypatch, folder, "train.py") == ["colorsys", "transformers", "transformers:Trainer"]


@pytest.mark.parametrize("words", ["-m package.train", "-m package"])
def test_of_a_module_its_packages_are_read_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str):
    folder = written(tmp_path, package__train="from .more import x\n", package__more="import wave\n")
    (folder / "package/__init__.py").write_text("import cmd\n" + RAISES)
    (folder / "package/__main__.py").write_text("from .train import x\n" + RAISES)
    assert set(ahead(monkeypatch, folder, words)) == {"cmd", "wave"}


def test_a_folder_of_data_hides_no_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = written(tmp_path, train="import transformers\nimport missing\n")
    (folder / "transformers").mkdir()
    assert ahead(monkeypatch, folder, "train.py") == ["transformers"]


def test_what_imports_itself_and_what_is_no_python_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = written(tmp_path, train="import a\n", a="import b, json\n", b="import a, bad\n")
    (folder / "bad.py").write_text("def (")
    assert ahead(monkeypatch, folder, "train.py") == ["json"]


def test_a_large_program_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = {f"m{number}": f"import m{number + 1}\n" for number in range(2 * MOST)}
    folder = written(tmp_path, train="import m0\n", **files, **{f"m{2 * MOST}": "import json\n"})
    assert ahead(monkeypatch, folder, "train.py") == []


@pytest.mark.parametrize("words", ["-m package.train", "-m package"])
def test_of_a_module_elsewhere_nothing_is_imported_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str):
    """As of an editable installation: what its packages raise without a rank is raised by the rank alone."""
    folder = written(tmp_path / "src", package__train="from .more import x\n", package__more="import wave\n")
    (folder / "package/__init__.py").write_text("import cmd\n" + RAISES)
    (folder / "package/__main__.py").write_text("from .train import x\n" + RAISES)
    (tmp_path / "here").mkdir()
    monkeypatch.syspath_prepend(str(folder))
    assert set(ahead(monkeypatch, tmp_path / "here", words)) == {"cmd", "wave"}
    assert entry.find(entry.parse(words)) == (None, None)


@pytest.mark.parametrize(
    "line",
    [
        'os.environ["HF_HOME"] = "/scratch/hf"',
        'os.environ.setdefault("HF_HOME", "/scratch/hf")',
        'sys.path.insert(0, "third_party")',
        'if os.path.exists("x"):\n    os.environ["A"] = "b"',
    ],
)
def test_what_is_imported_after_a_change_of_the_environment_is_left_to_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
):
    folder = written(
        tmp_path, train=f"import os, sys\nimport json\nprint(os.environ.get('A'), sys.path)\nimport csv\n{line}\nimport wave\n"
    )
    assert ahead(monkeypatch, folder, "train.py") == ["os", "sys", "json", "csv"]


def test_a_folder_that_may_not_be_read_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = written(tmp_path, train="import transformers, json\n")

    def refused(path: object) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refused)
    assert ahead(monkeypatch, folder, "train.py") == ["transformers", "json"]


@pytest.mark.parametrize("name", ["checkpoint.py", "resilient.py", "checkpoint/__init__.py"])
def test_a_module_that_ranks_could_not_import_by_its_name_is_told_before_anything_begins(tmp_path: Path, name: str):
    path, top = tmp_path / name, name.partition("/")[0]
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    (tmp_path / "train.py").write_text(f"import {top.removesuffix('.py')}\n")
    (tmp_path / "elsewhere").mkdir()
    for cwd, script in ((tmp_path, "train.py"), (tmp_path / "elsewhere", "../train.py")):
        command = [shutil.which("resilient") or "resilient", "run", script]
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
        assert done.returncode == 78, done.stderr
        (line,) = done.stderr.splitlines()
        assert f"{tmp_path / top} has the name of a package of the runtime" in line
        assert not (cwd / "runs").exists()


def test_a_folder_of_checkpoints_is_no_module(tmp_path: Path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/step-10.pt").write_text("")
    entry.must_hide_nothing(str(tmp_path))


def test_the_packages_that_ranks_import_hide_nothing_wherever_they_are_reached_from(tmp_path: Path):
    for name in ("resilient", "checkpoint"):
        (tmp_path / name).symlink_to(Path(entry.__file__).parents[1] / name)
    entry.must_hide_nothing(str(tmp_path))


@pytest.mark.parametrize("project", ["project = 3", "[project]\nname = 'mine'", "not TOML"])
def test_a_directory_with_another_project_is_no_checkout_of_this_one(tmp_path: Path, project: str):
    (tmp_path / "pyproject.toml").write_text(project)
    (tmp_path / "checkpoint.py").write_text("")
    with pytest.raises(ConfigError, match="has the name of a package of the runtime"):
        entry.must_hide_nothing(str(tmp_path))


def test_the_directory_of_this_project_hides_nothing():
    entry.must_hide_nothing(str(Path(entry.__file__).parents[1]))
