"""Lifelines, the run directory's lock, and the quickness of the command line: with real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resilient.agent.inspection import state_of
from resilient.main import guarded

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import os, sys, time
from resilient.lifeline import die_with_parent
die_with_parent(int(sys.argv[1]))
print("tied", flush=True)
time.sleep(600)
''', str(__import__("os").getpid())], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    return state_of(pid) in ("", "Z")


def test_a_process_on_a_lifeline_dies_with_its_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not gone(child)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while not gone(child):
        assert time.monotonic() < deadline


def test_a_process_whose_parent_is_gone_already_dies_at_once():
    code = "from resilient.lifeline import die_with_parent; die_with_parent(1 << 22)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize("heavy", ["torch", "numpy", "pydantic", "zarr", "tokenizers", "tensorboard"])
def test_help_imports_nothing_heavy(heavy: str):
    code = f"""
import sys
sys.argv = ["resilient", "--help"]
from resilient.main import main
try:
    main()
except SystemExit:
    pass
sys.exit({heavy!r} in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_the_driver_imports_nothing_that_only_ranks_or_agents_need():
    heavy = ["torch", "numpy", "zarr", "tensorboard", "resilient.agent"]
    code = f"import sys, resilient.driver.driver; print([each for each in {heavy} if each in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_no_framework_is_imported_unless_its_adapter_is():
    frameworks = ["transformers", "accelerate", "pytorch_lightning", "lightning", "torchdata"]
    modules = "resilient, resilient.worker, resilient.agent.bootstrap, resilient.integrations, resilient.state.attach"
    code = f"import sys, {modules}; print([each for each in {frameworks} if each in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


GROUPS = {
    "chaos": "chaos.cli",
    "ckpt": "checkpoint.cli",
    "data": "trainer.data.cli",
    "lab": "chaos.lab.cli",
    "trainer": "trainer.cli",
}


def groups_imported(*words: str) -> set[str]:
    """The command groups that a command line imports."""
    code = f"""
import sys
sys.argv = ["resilient", *{words}]
from resilient.main import main
try:
    main()
except SystemExit:
    pass
sys.stderr.write(" ".join(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name for name, module in GROUPS.items() if module in done.stderr.split()}


def test_a_command_imports_no_group_and_a_group_no_other_one():
    assert groups_imported("run", "--help") == set()
    assert groups_imported("ckpt", "--help") == {"ckpt"}
    assert groups_imported("--help") == GROUPS.keys()


def test_help_and_completion_list_every_group():
    command = [sys.executable, "-c", "import sys; sys.argv[0] = 'resilient'; from resilient.main import main; main()"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    environ = {**os.environ, "_RESILIENT_COMPLETE": "complete_bash", "COMP_WORDS": "resilient ", "COMP_CWORD": "1"}
    completed = subprocess.run(command, capture_output=True, text=True, env=environ, check=True).stdout.split()
    for name in ("run", "submit", *GROUPS):
        assert f" {name} " in shown
        assert name in completed


SLOW_IMPORT = """
import sys

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            print("imports", flush=True)
            sys.stdin.readline()

sys.meta_path.insert(0, Slow())
sys.argv = ["resilient", "--version"]
from resilient.main import main
main()
"""


def interrupted_import(before: str = "", sig: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
    """A command that gets a signal while it imports, and then is let go on; `before` is done to signals before it begins."""
    code = f"import signal\n{before}\n{SLOW_IMPORT}"
    pipe = subprocess.PIPE
    command = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert command.stdout is not None and command.stdout.readline() == "imports\n"
    command.send_signal(sig)
    out, err = command.communicate("\n", timeout=60)
    return command.returncode, out, err


def test_an_interrupt_while_a_command_imports_ends_it_without_a_word():
    assert interrupted_import() == (-signal.SIGINT, "", "")


def test_an_interrupt_that_is_ignored_is_ignored_while_a_command_imports_too():
    code, out, err = interrupted_import("signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert (code, err) == (0, "") and out.startswith("resilient ")


def test_a_signal_that_the_caller_of_a_command_has_blocked_arrives():
    blocked = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"
    assert interrupted_import(blocked, signal.SIGTERM) == (-signal.SIGTERM, "", "")


def test_a_command_whose_working_directory_was_deleted_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    assert guarded(os.getcwd) == 69
    assert capfd.readouterr().err == "resilient: the working directory was deleted: go to another one\n"


def test_an_interrupt_that_no_command_has_handled_is_no_traceback(capfd: pytest.CaptureFixture[str]):
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert guarded(interrupted) == 128 + signal.SIGINT
    assert capfd.readouterr().err == ""
