"""Modules of a program that have the names of our packages: each importer gets its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def ran(code: str, *, beside: Path, words: tuple[str, ...] = ()) -> str:
    """What a script in that directory prints."""
    script = beside / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, *words, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A directory with a module and a package of names of ours."""
    (tmp_path / "checkpoint.py").write_text("whose = 'the script'\n")
    package = tmp_path / "chaos"
    package.mkdir()
    (package / "__init__.py").write_text("from .monkey import whose\nfrom chaos.monkey import whose as same\n")
    (package / "monkey.py").write_text("whose = 'the script'\n")
    (package / "ape.py").write_text("whose = 'the script'\n")
    return tmp_path


RUNTIME = "import resilient.spill\n"  # which imports parts of our checkpoint, and not torch
STATEMENTS = (
    "import checkpoint; assert checkpoint.whose == 'the script'",
    "import checkpoint as c; assert c.whose == 'the script'",
    "from checkpoint import whose; assert whose == 'the script'",
    "from checkpoint import *; assert whose == 'the script'",
    "import chaos; assert chaos.whose == chaos.same == 'the script'",
    "import chaos.ape; assert chaos.ape.whose == 'the script'",
    "import chaos.ape as a; assert a.whose == 'the script'",
    "from chaos import ape; assert ape.whose == 'the script'",
    "import importlib; assert importlib.import_module('checkpoint').whose == 'the script'",
    "import importlib; assert importlib.import_module('.ape', 'chaos').whose == 'the script'",
    "exec('import checkpoint; assert checkpoint.whose', {})",
)


@pytest.mark.parametrize("order", ["the script's first", "the runtime's first"])
def test_a_script_gets_its_own_modules_and_the_runtime_gets_ours(beside: Path, order: str):
    """Whichever is imported first; and again, when all are only looked up. What pickle finds by its name is ours."""
    parts = [*STATEMENTS, RUNTIME] if order == "the script's first" else [RUNTIME, *STATEMENTS]
    text = "\n".join([*parts, RUNTIME, *STATEMENTS])
    ours = f"import sys\nassert sys.modules['checkpoint'].__file__ == {str(ROOT / 'checkpoint/__init__.py')!r}\n"
    ran(f"{text}\n{ours}assert resilient.spill.__name__ in sys.modules and 'checkpoint.framing' in sys.modules\n", beside=beside)


@pytest.mark.parametrize("statement", STATEMENTS)
def test_each_way_of_importing_finds_the_script_s_own_alone(beside: Path, statement: str):
    ran(f"{RUNTIME}{statement}\n", beside=beside)


def test_a_module_is_executed_once_however_often_and_from_wherever_it_is_imported(beside: Path):
    (beside / "checkpoint.py").write_text("print('executed')\n")
    (beside / "other.py").write_text("import checkpoint as c\n")
    code = "import resilient, threading, os\nimport checkpoint\nimport other\nassert other.c is checkpoint\n"
    code += "def again():\n    import checkpoint as c\n    assert c is checkpoint, c\n"
    code += "thread = threading.Thread(target=again); thread.start(); thread.join()\n"
    code += "pid = os.fork()\nif pid == 0:\n    again(); os._exit(0)\nassert os.waitpid(pid, 0)[1] == 0\n"
    assert ran(code, beside=beside) == "executed\n"


def test_a_script_s_module_may_import_the_runtime(beside: Path):
    """Which then finds its own under a name whose import is going on."""
    (beside / "checkpoint.py").write_text(f"{RUNTIME}whose = 'the script'\n")
    (beside / "later.py").write_text("from checkpoint import whose\n")
    code = "from checkpoint import whose\nimport later, resilient.outbox, sys\nassert later.whose == whose == 'the script'\n"
    ran(f"{code}assert sys.modules['checkpoint'].__file__ == {str(ROOT / 'checkpoint/__init__.py')!r}\n", beside=beside)


def test_what_pickle_asks_for_is_ours_and_nothing_of_the_script_is_executed(beside: Path):
    """It imports by name, in the name of whoever called it."""
    (beside / "checkpoint.py").write_text("raise SystemExit('executed')\n")
    code = f"{RUNTIME}import pickle\nfrom checkpoint.errors import StaleGeneration\n"
    ran(f"{code}assert pickle.loads(pickle.dumps(StaleGeneration)) is StaleGeneration\n", beside=beside)


def test_a_directory_without_code_gives_way_as_for_python_and_nothing_is_changed(tmp_path: Path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/step-10.pt").write_text("")
    ran(
        f"import builtins\nbefore = builtins.__import__\nimport resilient\nassert builtins.__import__ is before\n{RUNTIME}",
        beside=tmp_path,
    )


def test_of_a_checkout_nothing_is_imported_beside_what_is_installed(beside: Path):
    """As where somebody installs a checkout and starts in it: parts of two copies do not go together."""
    (beside / "trainer").mkdir()
    (beside / "trainer/__init__.py").write_text("raise SystemExit('the copy')\n")
    code = "import resilient\nfrom resilient import shadowing\nimport trainer\n"
    code += f"assert trainer is shadowing.import_for_program('trainer') and trainer.__file__.startswith({str(ROOT)!r})\n"
    (beside / "pyproject.toml").write_text("[project]\nname = 'resilient'\n")
    ran(code, beside=beside)


def test_an_import_that_fails_says_what_python_says(beside: Path):
    code = "import resilient\ntry:\n    from checkpoint import nothing\nexcept ImportError as error:\n    print(error)\n"
    assert ran(code, beside=beside) == f"cannot import name 'nothing' from 'checkpoint' ({beside}/checkpoint.py)\n"
    (beside / "checkpoint.py").write_text("1 / 0\n")
    attempt = "try:\n    import checkpoint\nexcept ZeroDivisionError:\n    print('failed')\n"
    code = f"import resilient\n{attempt}{attempt}"
    assert ran(code, beside=beside) == "failed\nfailed\n"


@pytest.mark.parametrize("words", [("--help",), ("ckpt", "--help"), ("chaos", "--help"), ("data", "--help")])
def test_commands_are_ours_where_pythonpath_has_others_of_their_names(beside: Path, words: tuple[str, ...]):
    (beside / "trainer.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "resilient", *words],
        cwd=beside,
        env={**os.environ, "PYTHONPATH": f"{beside}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: " in done.stdout
