"""Modules of a program that have the names of our packages: each importer gets its own."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from chaos.primitives.sockets import undo
from resilient.recovery.frames import place

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
        timeout=30,
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
    """Whichever is imported first; and again, when all are only looked up. What is found by its name alone is the script's."""
    parts = [*STATEMENTS, RUNTIME] if order == "the script's first" else [RUNTIME, *STATEMENTS]
    text = "\n".join([*parts, RUNTIME, *STATEMENTS])
    found = "import sys\nassert sys.modules['checkpoint'].whose == 'the script'\n"
    ran(f"{text}\n{found}assert resilient.spill.__name__ in sys.modules and 'checkpoint.framing' in sys.modules\n", beside=beside)


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
    ran(f"{code}assert sys.modules['checkpoint'].whose == 'the script'\n", beside=beside)


def test_what_pickle_asks_for_is_ours_and_nothing_of_the_script_is_executed(beside: Path):
    """It imports by name, in the name of whoever called it."""
    (beside / "checkpoint.py").write_text("raise SystemExit('executed')\n")
    code = f"{RUNTIME}import pickle\nfrom checkpoint.errors import StaleGeneration\n"
    ran(f"{code}assert pickle.loads(pickle.dumps(StaleGeneration)) is StaleGeneration\n", beside=beside)


def test_what_is_defined_in_a_script_s_module_is_found_by_its_name(beside: Path):
    """By pickle, also in a process that is spawned, by `typing`, `inspect` and `importlib`."""
    (beside / "checkpoint.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nclass Inner: pass\n"
        "@dataclass\nclass Settings:\n    inner: Inner\n    def told(self, to): to.put(self)\n"
    )
    code = f"{RUNTIME}import importlib.util, inspect, multiprocessing, pickle, typing\nimport chaos.ape, checkpoint\n"
    code += "from checkpoint import Inner, Settings\nif __name__ == '__main__':\n"
    for line in (
        "assert typing.get_type_hints(Settings) == {'inner': Inner}",
        "assert 'inner: Inner' in inspect.getsource(Settings)",
        "assert pickle.loads(pickle.dumps(Settings(3))) == pickle._loads(pickle._dumps(Settings(3))) == Settings(3)",
        "context = multiprocessing.get_context('spawn'); queue = context.SimpleQueue()",
        "context.Process(target=Settings(4).told, args=(queue,)).start()",
        "assert queue.get() == Settings(4)",
        "assert importlib.util.find_spec('checkpoint').origin == checkpoint.__file__",
        "assert importlib.reload(checkpoint) is checkpoint and checkpoint.Settings is not Settings",
        "del sys.modules['checkpoint']; import checkpoint as anew; assert anew is not checkpoint and anew.Inner",
    ):
        code += f"    {line}\n"
    ran(f"import sys\n{code}", beside=beside)


@pytest.mark.parametrize("before", ["import resilient\n", ""])
@pytest.mark.parametrize("name", ["trainer", "checkpoint"])  # another one than they import, or the same
def test_threads_of_the_runtime_import_while_a_module_of_the_script_is_executed(beside: Path, name: str, before: str):
    """It may train meanwhile, and wait for them."""
    (beside / f"{name}.py").write_text(
        "import resilient, threading\nthread = threading.Thread(target=__import__, args=('resilient.spill',), daemon=True)\n"
        "thread.start()\nthread.join(5)\nwhole = not thread.is_alive()\nassert whole\n"
    )
    ran(f"{before}import {name}, sys\nassert {name}.whole\nassert 'checkpoint.framing' in sys.modules\n", beside=beside)


def test_a_directory_of_modules_without_init_is_a_script_s_own_too(beside: Path):
    """For Python it gives way to what was installed, and the script would work only without us."""
    (beside / "trainer/inner").mkdir(parents=True)
    (beside / "trainer/loop.py").write_text("whose = 'the script'\n")
    (beside / "trainer/inner/deep.py").write_text("from trainer.loop import whose\n")
    code = f"{RUNTIME}from trainer.loop import whose\nimport trainer.inner.deep\nfrom trainer.inner import deep\n"
    ran(f"{code}assert whose == deep.whose == 'the script'\n", beside=beside)


def test_a_directory_of_anything_hides_ours_from_no_one_where_it_is_installed_as_editable(tmp_path: Path):
    """The finder of such an installation comes after `sys.path`."""
    (tmp_path / "checkpoint").mkdir()
    code = (
        f"import sys\nfrom importlib.machinery import PathFinder\nsys.path.remove({str(ROOT)!r})\nsys.path_importer_cache.clear()\n"
    )
    code += "class Editable:\n    @staticmethod\n    def find_spec(name, path=None, target=None):\n"
    code += f"        return PathFinder.find_spec(name, [{str(ROOT)!r}]) if path is None else None\n"
    code += "sys.meta_path[:] = [each for each in sys.meta_path if 'ditable' not in str(each)] + [Editable]\n"
    ran(f"{code}{RUNTIME}from checkpoint import StaleGeneration\n", beside=tmp_path)


def test_an_import_in_a_function_costs_next_to_nothing_the_second_time(beside: Path):
    code = f"{RUNTIME}import sys, time\nfor each in range(5000):\n    sys.modules[f'other{{each}}'] = sys\n"
    code += "def step():\n    from checkpoint import whose\n    import chaos.ape\n    from chaos import ape\nstep()\n"
    code += "began = time.thread_time()\nfor each in range(100):\n    step()\ntook = time.thread_time() - began\n"
    ran(f"{code}assert took < 0.03, took\n", beside=beside)


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
    code = "import resilient\nfrom resilient.imports import shadowing\nimport trainer\n"
    code += f"assert trainer is shadowing.import_for_program('trainer') and trainer.__file__.startswith({str(ROOT)!r})\n"
    (beside / "pyproject.toml").write_text("[project]\nname = 'resilient'\n")
    ran(code, beside=beside)


def test_a_script_s_own_module_in_a_folder_of_a_checkout_is_its_own(beside: Path):
    (beside / "mine").mkdir()
    (beside / "mine/checkpoint.py").write_text("whose = 'the script'\n")
    (beside / "pyproject.toml").write_text("[project]\nname = 'resilient'\n")
    ran(f"{RUNTIME}from checkpoint import whose\n", beside=beside / "mine")


def test_a_library_that_was_there_before_us_finds_the_script_s_modules(beside: Path):
    """By an `import_module` that it has taken from Python, as those do that are told names of classes."""
    (beside / "library.py").write_text("from importlib import import_module\n")
    ran(f"import library\n{RUNTIME}assert library.import_module('checkpoint').whose == 'the script'\n", beside=beside)


def test_a_script_s_module_is_run_as_a_program_although_ours_is_there(beside: Path):
    code = f"{RUNTIME}from resilient import entry\nentry.run(entry.parse('-m checkpoint'), dict)\n"
    ran(f"import os, sys\nos.chdir(sys.path[0])\n{code}assert sys.modules['__main__'].whose == 'the script'\n", beside=beside)


def test_an_import_that_fails_says_what_python_says(beside: Path):
    code = "import resilient\ntry:\n    from checkpoint import nothing\nexcept ImportError as error:\n    print(error)\n"
    assert ran(code, beside=beside) == f"cannot import name 'nothing' from 'checkpoint' ({beside}/checkpoint.py)\n"
    (beside / "checkpoint.py").write_text("1 / 0\n")
    attempt = "try:\n    import checkpoint\nexcept ZeroDivisionError:\n    print('failed')\n"
    code = f"import resilient\n{attempt}{attempt}"
    assert ran(code, beside=beside) == "failed\nfailed\n"


def test_an_import_that_fails_is_told_to_have_failed_in_the_script(beside: Path):
    code = "import resilient, sys, traceback\ntry:\n    import chaos.nothing\n"
    code += "except ImportError:\n    traceback.print_exc(file=sys.stdout)\n"
    assert place(ran(code, beside=beside)) == f"{beside}/script.py:3 in <module>"


def test_what_a_fault_of_sockets_did_is_undone_from_wherever_a_campaign_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "chaos.py").write_text("")
    monkeypatch.chdir(tmp_path)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(undo(psutil.Process()), env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_working_directory_on_pythonpath_stays_on_it(tmp_path: Path):
    """Agents are started with -P: what is first is no directory that Python has put there."""
    code = "import sys\nfrom resilient import entry\nentry.find_modules(entry.parse('scripts/train.py'))\nprint(*sys.path[:2])"
    command = [sys.executable, "-P", "-c", code]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / "scripts"), str(tmp_path)]


def test_what_is_found_first_may_change_when_the_directory_of_the_script_is_known(
    beside: Path, tmp_path_factory: pytest.TempPathFactory
):
    """A module on PYTHONPATH, and a package beside the script."""
    other = tmp_path_factory.mktemp("other")
    (other / "chaos.py").write_text("")
    code = f"import sys\nbeside = sys.path.pop(0)\nsys.path.insert(0, {str(other)!r})\n{RUNTIME}"
    code += "sys.path.insert(0, beside)\nresilient.shadowing.look()\nimport chaos.ape\nassert chaos.ape.whose == 'the script'\n"
    ran(code, beside=beside)


def test_a_script_s_module_that_has_the_runtime_import_ours_of_its_name_takes_nothing_from_it(beside: Path):
    """`checkpoint.framing` of both; the script's is being imported when the runtime is."""
    (beside / "checkpoint").mkdir()
    (beside / "checkpoint.py").unlink()
    (beside / "checkpoint/__init__.py").write_text("")
    (beside / "checkpoint/framing.py").write_text(f"{RUNTIME}ours = resilient.spill\nwhose = 'the script'\n")
    code = "import sys\nfrom checkpoint.framing import whose, ours\nexec('from checkpoint import framing as first', vars(ours))\n"
    code += "import resilient.outbox\nfrom checkpoint.framing import whose as same\n"
    code += "exec('from checkpoint import framing as second', vars(ours))\nassert ours.first is ours.second\nassert same == whose\n"
    ran(code, beside=beside)


def test_a_script_s_module_may_put_another_into_its_place(beside: Path):
    (beside / "checkpoint.py").write_text(
        "import sys, types\nlazy = types.SimpleNamespace(whose='the script')\nsys.modules[__name__] = lazy\n"
    )
    ran(f"{RUNTIME}import checkpoint\nassert checkpoint.whose\nfrom checkpoint import whose\n{RUNTIME}", beside=beside)


def test_commands_are_ours_where_entry_points_were_looked_up_before(beside: Path):
    command = [sys.executable, "-c", "import importlib.metadata, runpy; runpy.run_module('resilient', run_name='__main__')"]
    environ = {**os.environ, "PYTHONPATH": f"{beside}{os.pathsep}{ROOT}"}
    done = subprocess.run([*command, "ckpt", "--help"], cwd=beside, env=environ, capture_output=True, text=True, check=False)
    assert "Usage: " in done.stdout, done.stderr


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
