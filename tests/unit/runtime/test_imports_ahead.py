"""What is imported before the ranks are forked: what a program takes from installed packages, and nothing of its own."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from resilient import entry
from resilient.config.errors import ConfigError
from resilient.imports.ahead import MOST

EXAMPLES = Path(entry.__file__).parents[1] / "examples"
RAISES = "1 / 0\n"  # where it is executed; for whoever reads it, it changes nothing


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
        pieces__model="from .data import x\nfrom options import y\nimport torch.nn.functional as F\n",
    )
    found = ahead(monkeypatch, folder, "train.py --lr 3")
    assert found == ["json", "argparse", "csv", "torch.nn.functional"], "in the order in which Python does"


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
    folder = written(tmp_path, train="import a\n", a="import json, b, csv\n", b="import a, cmd, bad\n")
    (folder / "bad.py").write_text("def (")
    assert ahead(monkeypatch, folder, "train.py") == ["json", "cmd"]


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


CHANGES = [
    'os.environ["HF_HOME"] = "/scratch/hf"',
    'os.environ.setdefault("HF_HOME", "/scratch/hf")',
    'os.environ |= {"HF_HOME": "/scratch/hf"}',
    'del os.environ["HF_HOME"]',
    'sys.path.insert(0, "third_party")',
    'sys.path[:0] = ["third_party"]',
    'sys.path += ["third_party"]',
    'if os.path.exists("x"):\n    os.environ["A"] = "b"',
    'for name in ("A", "B"):\n    os.environ[name] = "1"',
    'from os import environ\nenviron["HF_HUB_OFFLINE"] = "1"',
    'from sys import path\npath.append("third_party")',
    'from sys import path\npath += ["third_party"]',
    'import os as _os\n_os.environ["HF_HUB_OFFLINE"] = "1"',
    'e = os.environ\ne.update(HF_HUB_OFFLINE="1")',
    'e = {}\nfor name in "ab":\n    e[name] = "1"\n    e = os.environ',
    'x = [e.update(A="1") for e in [os.environ]]',
    "from dotenv import load_dotenv\nload_dotenv()",
    'os.putenv("A", "b")',
    'os.chdir("/tmp")',
    'putenv = os.putenv\nputenv("A", "b")',
    'with open("env") as file:\n    exec(file.read())',
    "json.dumps = str",
    'setattr(json, "dumps", str)',
    'sys.modules["wave"] = json',
    "def apply():\n    os.environ['A'] = 'b'\napply()",
    "def apply():\n    os.environ['A'] = 'b'\nmax([1, 2], key=lambda x: apply())",
    "import functools\n@functools.cache\ndef apply():\n    os.environ['A'] = 'b'\napply()",
    "def register(kind):\n    os.environ['A'] = 'b'\n@register\nclass Model: ...",
    "class Settings:\n    os.environ['A'] = 'b'",
    "def f(x=os.environ.pop('A')): ...",
    "x: os.environ.pop('A') = 3",
    "try:\n    import nothing_of_this_name\nexcept ImportError:\n    os.environ['A'] = 'b'",
    "try:\n    os.environ['A'] = 'b'\nfinally:\n    pass",
    "if sys.argv[1:]:\n    import transformers",
    "import nothing_of_this_name",
    "raise SystemExit",
    "sys.exit()",
    "match sys.argv:\n    case [_]:\n        os.environ['A'] = 'b'",
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_imported_after_a_change_of_the_environment_is_left_to_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
):
    before = "import os, sys\nimport json\nprint(os.environ.get('A'), sys.path)\nimport csv\n"
    folder = written(tmp_path, train=f"{before}{change}\nimport wave\n")
    found = ahead(monkeypatch, folder, "train.py")
    assert found[:4] == ["os", "sys", "json", "csv"]
    assert "wave" not in found and "transformers" not in found


@pytest.mark.parametrize(
    "change",
    ['from os import environ\nenviron["HF_HUB_OFFLINE"] = "1"', "import dotenv\ndotenv.load_dotenv()", "import nothing_of_it"],
)
def test_a_module_of_the_program_that_changes_the_environment_ends_what_is_imported_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
):
    """Also if it is imported by another one, and of a package: by what is executed first, before the module that is asked for."""
    folder = written(
        tmp_path,
        train="import cmd\nimport settings.paths\nimport wave\n",
        settings__first="import csv\n",
        settings__paths="import transformers\n",
    )
    text = f"import json\nfrom . import first\nimport wave\n{change}\nimport transformers\n"
    (folder / "settings/__init__.py").write_text(text + RAISES)
    found = ahead(monkeypatch, folder, "train.py")
    assert found[:4] == ["cmd", "json", "csv", "wave"] and "transformers" not in found


@pytest.mark.parametrize(
    "text",
    [
        "envsetup.apply()\n",
        "from envsetup import *\nwarnings.simplefilter('ignore')\n",
        "from envsetup import *\nmax(1, 2)\n",
        "if warnings:\n    from envsetup import *\nmax(1, 2)\n",
        "from envsetup import warnings\nwarnings.simplefilter('ignore')\n",
    ],
)
def test_what_a_module_of_the_program_gives_may_do_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str):
    folder = written(tmp_path, train=f"import warnings\nimport envsetup\n{text}import wave\n", envsetup="def apply(): ...\n")
    assert ahead(monkeypatch, folder, "train.py") == ["warnings"]


HARMLESS = [
    '"""What it does."""',
    "import logging\nlogging.basicConfig(level=logging.INFO)\nlog = logging.getLogger(__name__)\nlog.info('starts')",
    "import warnings\nwarnings.filterwarnings('ignore')",
    "import warnings\nwith warnings.catch_warnings():\n    warnings.simplefilter('ignore')\n    import torch",
    "import argparse\nparser = argparse.ArgumentParser(description=__doc__)\nparser.add_argument('--lr', type=float, default=3e-4)",
    "from dataclasses import dataclass, field\n@dataclass(frozen=True)\nclass Config:\n    sizes: list = field(default=None)",
    "from pathlib import Path\nROOT = Path(__file__).resolve().parent.parent\nDATA = ROOT / 'data'",
    "WORDS, LENGTH = 64, 32\nTABLE = {}\nTABLE['a'] = [n for n in range(WORDS)]",
    "NAMES = 'a b'.split()\n__all__ = ['x']\n__all__ += ['y']",
    "class Model:\n    @property\n    def size(self): return self._size\n    @size.setter\n    def size(self, value): chdir(value)",
    "import torch\nclass Net(torch.nn.Module):\n    @torch.no_grad()\n    def forward(self, x): return setup(x)",
    "import torch\ndevice = torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
    "from typing import TYPE_CHECKING, TypeVar\nif TYPE_CHECKING:\n    import transformers\nT = TypeVar('T')",
    "try:\n    import nothing_of_this_name as wandb\nexcept ImportError:\n    wandb = None",
    "if sys.version_info >= (3, 11):\n    import tomllib\nelse:\n    import nothing_of_this_name as tomllib",
    "assert sys.version_info >= (3, 8), 'too old'\nif not sys.argv:\n    raise SystemExit('usage')",
    "RANK = int(os.environ.get('RANK', '0'))\nif RANK == 0:\n    print('rank', RANK)",
    "apply = lambda: os.environ.update(A='b')\ndef main():\n    os.environ['A'] = 'b'",
    "for name in ('a', 'b'):\n    while False:\n        pass",
    "match sys.platform:\n    case 'linux' | 'darwin' as found:\n        print(found)",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_what_changes_nothing_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str):
    folder = written(tmp_path, train="import beside\nimport cmd\n", beside=f"import os, sys\n{text}\nimport wave\n")
    found = ahead(monkeypatch, folder, "train.py")
    assert found[-2:] == ["wave", "cmd"] and "transformers" not in found


def test_a_module_that_is_a_program_as_well_is_read_as_what_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    main = "def main(): ...\nif __name__ == '__main__':\n    main()\n"
    folder = written(tmp_path, train=f"import beside\nimport wave\n{main}import cmd\n", beside=f"import json\n{main}import csv\n")
    assert ahead(monkeypatch, folder, "train.py") == ["json", "csv", "wave"]


@pytest.mark.parametrize("name", sorted(each.name for each in EXAMPLES.glob("*.py")))
def test_all_that_an_example_imports_is_imported_ahead(monkeypatch: pytest.MonkeyPatch, name: str):
    found = ahead(monkeypatch, EXAMPLES, name)
    for each in ast.parse((EXAMPLES / name).read_bytes()).body:
        if isinstance(each, ast.Import):
            assert {alias.name for alias in each.names} <= set(found)
        elif isinstance(each, ast.ImportFrom) and each.module != "transformers_trainer":
            assert {each.module, *(f"{each.module}:{alias.name}" for alias in each.names)} <= set(found)


def test_a_folder_that_may_not_be_read_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was found before it is imported. Tests may run as root, who may read everything: so the refusal is made."""
    folder = written(tmp_path, train="import transformers, json\nimport beside\n", beside="import wave\n")

    def refused(path: object) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    for name in ("is_file", "is_dir"):
        monkeypatch.setattr(Path, name, refused)
    assert ahead(monkeypatch, folder, "train.py") == ["transformers", "json", "wave"]


@pytest.mark.parametrize("name", ["resilient.py", "resilient/__init__.py"])
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
        assert f"{tmp_path / top} has the name of the runtime" in line
        assert not (cwd / "runs").exists()


def test_a_folder_without_code_is_no_module(tmp_path: Path):
    (tmp_path / "resilient").mkdir()
    (tmp_path / "resilient/step-10.pt").write_text("")
    entry.must_hide_nothing(str(tmp_path))


def test_the_packages_that_ranks_import_hide_nothing_wherever_they_are_reached_from(tmp_path: Path):
    (tmp_path / "resilient").symlink_to(Path(entry.__file__).parent)
    entry.must_hide_nothing(str(tmp_path))


@pytest.mark.parametrize("project", ["project = 3", "[project]\nname = 'mine'", "not TOML"])
def test_a_directory_with_another_project_is_no_checkout_of_this_one(tmp_path: Path, project: str):
    (tmp_path / "pyproject.toml").write_text(project)
    (tmp_path / "resilient.py").write_text("")
    with pytest.raises(ConfigError, match="has the name of the runtime"):
        entry.must_hide_nothing(str(tmp_path))


def test_the_directory_of_this_project_hides_nothing():
    entry.must_hide_nothing(str(Path(entry.__file__).parents[1]))
