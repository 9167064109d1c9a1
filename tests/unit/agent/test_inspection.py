"""Inspection of real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mounts import device_on, freezable_disk, needs_root

from resilient.agent import effort, inspection, recorder
from resilient.heartbeat.region import Activity
from resilient.protocol.messages import Inspection

WORKER = """
import sys, time
from pathlib import Path
from resilient.agent.inspection import answer_with_stacks
answer_with_stacks(Path(sys.argv[1]))
print("ready", flush=True)
def here():
    while sys.argv[2] == "spin":
        pass
    time.sleep(60)
here()
"""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, who can answer does."""
    monkeypatch.setattr(inspection, "ANSWER_S", 60.0)
    monkeypatch.setattr(inspection, "STOPS_S", 60.0)


def becomes(pid: int, state: str) -> None:
    while inspection.state_of(pid) != state:
        time.sleep(0.01)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[[str], tuple[int, Path]]]:
    """A process that answers: its id, and where."""
    started: list[subprocess.Popen[bytes]] = []
    (tmp_path / "as_a_module.py").write_text(WORKER)

    def start(how: str, *begin: str) -> tuple[int, Path]:
        path = tmp_path / f"stacks{len(started)}"
        words = [sys.executable, *(begin or ("-c", WORKER)), str(path), how]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, env=environ))
        out = started[-1].stdout
        assert out is not None and out.readline() == b"ready\n"
        while "in here" not in inspection.inspect({0: (started[-1].pid, path)})[0].stacks:
            pass
        return started[-1].pid, path

    yield start
    for each in started:
        each.kill()
        each.wait()
        if each.stdout is not None:
            each.stdout.close()


@pytest.mark.parametrize(("crash", "words"), [(signal.SIGSEGV, "Segmentation fault"), (signal.SIGABRT, "Aborted")])
def test_a_process_that_crashes_says_where_it_was(worker: Callable[[str], tuple[int, Path]], crash: signal.Signals, words: str):
    pid, path = worker("sleep")
    assert inspection.crash_of(path) == "", "where it was before, when it was asked, is no crash"
    os.kill(pid, crash)
    becomes(pid, "Z")
    first, *lines = inspection.crash_of(path).splitlines()
    assert first == f"Fatal Python error: {words}"
    assert any(line.endswith("in here") for line in lines), lines
    assert "Extension modules" not in "\n".join(lines)
    assert inspection.crash_of(path.with_name("nowhere")) == ""


def test_who_has_asked_python_for_it_finds_a_crash_in_the_log(tmp_path: Path):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONFAULTHANDLER": "1"}
    code = "from resilient.agent.inspection import answer_with_stacks\nimport os, sys, pathlib\n"
    code += "answer_with_stacks(pathlib.Path(sys.argv[1]))\nos.abort()\n"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "stacks")], env=environ, capture_output=True, check=False)
    assert done.returncode == -signal.SIGABRT and b"Fatal Python error: Aborted" in done.stderr
    assert inspection.crash_of(tmp_path / "stacks") == ""


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    becomes(pid, "T")


@pytest.mark.parametrize(("how", "state", "busy"), [("sleep", "S", False), ("spin", "R", True)])
def test_an_inspection_of_a_real_process(worker: Callable[[str], tuple[int, Path]], how: str, state: str, busy: bool):
    mine = worker(how)
    for _ in range(2):  # what was written before does not come again
        becomes(mine[0], state)  # it has done with the signal before
        found = inspection.inspect({3: mine})[3]
        assert found.stacks.count("in here") == 1
        assert (found.state, found.cpu > 0.5) == (state, busy)


LABORIOUS = """
import signal, sys, time
from resilient.agent.inspection import STACKS_SIGNAL
def answer(*_):
    until = time.process_time() + 0.6
    while time.process_time() < until:
        pass
    with open(sys.argv[1], "w") as file:
        file.write("<module>\\n in <module>\\n")
signal.signal(STACKS_SIGNAL, answer)
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_what_it_takes_to_answer_is_not_held_against_a_process_that_sleeps(tmp_path: Path):
    path = tmp_path / "stacks"
    with subprocess.Popen([sys.executable, "-c", LABORIOUS, str(path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            becomes(process.pid, "S")
            found = inspection.inspect({0: (process.pid, path)})[0]
            assert found.stacks and found.cpu < 0.5
        finally:
            process.kill()


HESITANT = """
import signal, sys, time
from resilient.agent.inspection import STACKS_SIGNAL
file = open(sys.argv[1], "w")
print("<module>", file=file, flush=True)
def answer(*_):
    signal.pthread_sigmask(signal.SIG_BLOCK, [STACKS_SIGNAL])  # as the kernel does for faulthandler
    print("Current thread (most recent call first):", file=file, flush=True)
    time.sleep(0.3)  # waits for a core
    print('  File "x", line 1 in <module>', file=file, flush=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACKS_SIGNAL])
signal.signal(STACKS_SIGNAL, answer)
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_an_answer_that_has_begun_is_waited_for(tmp_path: Path):
    words = [sys.executable, "-c", HESITANT, str(tmp_path / "stacks")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            for _ in range(2):
                found = inspection.inspect({0: (process.pid, tmp_path / "stacks")})[0].stacks
                assert found.endswith("in <module>\n"), found
        finally:
            process.kill()


@pytest.mark.parametrize("begin", [(), ("-m", "as_a_module")], ids=["a script", "a module, as agents are"])
def test_a_stopped_process_is_stopped_again_as_soon_as_it_has_answered(
    worker: Callable[..., tuple[int, Path]], begin: tuple[str, ...]
):
    pid, path = worker("sleep", *begin)
    for _ in range(2):
        stop(pid)
        began = time.monotonic()
        stacks = inspection.stacks_of_stopped({0: (pid, path)})[0]
        assert time.monotonic() - began < inspection.ANSWER_S, "it ran on until nobody waited for an answer any more"
        assert inspection.state_of(pid) == "T" and stacks.count("in here\n") == 1 and stacks.startswith("Current thread")
        os.kill(pid, signal.SIGCONT)
        becomes(pid, "S")


def test_a_stopped_process_says_where_it_was_unless_all_are_stopped(worker: Callable[[str], tuple[int, Path]]):
    one, other = worker("sleep"), worker("sleep")
    stop(one[0])
    becomes(other[0], "S")
    found = inspection.inspect({0: one, 1: other})
    assert (found[0].state, found[1].state) == ("T", "S")
    assert "in here" in found[0].stacks
    for pid, _ in (one, other):
        stop(pid)
    found = inspection.inspect({0: one, 1: other})
    assert [each.state for each in found.values()] == ["T", "T"]
    assert inspection.state_of(one[0]) == "T"  # it is left as it is


def test_a_stopped_process_that_said_where_it_was_is_stopped_again(worker: Callable[[str], tuple[int, Path]]):
    pid, path = worker("spin")
    stop(pid)
    for _ in range(50):  # a process takes a signal when it next runs, which another one may keep it from
        assert "in here" in inspection.stacks_of_stopped({0: (pid, path)})[0]
        assert inspection.state_of(pid) == "T"


DEAF = WORKER.replace("print(", "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); print(")


def test_a_stopped_process_that_takes_no_signal_is_not_continued_for_it(tmp_path: Path):
    path = tmp_path / "stacks"
    with subprocess.Popen([sys.executable, "-c", DEAF, str(path), "spin"], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            stop(process.pid)
            used = inspection._stat(process.pid)
            assert inspection.stacks_of_stopped({0: (process.pid, path)}) == {0: ""}
            assert inspection._stat(process.pid) == used
        finally:
            process.kill()


BUSY = """
import json, sys, threading, time
from pathlib import Path
from resilient.agent import recorder
from resilient.agent.inspection import answer_with_stacks
def busy():
    while True:
        json.loads(json.dumps({"a": [1] * 50}))
answer_with_stacks(Path(sys.argv[1]))
recorder.answer_with_record(Path(sys.argv[2]))
threading.Thread(target=busy, daemon=True).start()
print("ready", flush=True)
time.sleep(600)
"""


def test_whoever_is_asked_while_its_threads_run_goes_on_and_says_where_they_are(tmp_path: Path):
    stacks, record = tmp_path / "stacks", tmp_path / "record"
    with subprocess.Popen([sys.executable, "-c", BUSY, str(stacks), str(record)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            for _ in range(100):  # read at a signal, the frames of a running thread ended one process in six
                recorder.ask(process.pid, record)
                inspection._ask(process.pid)
                recorder.wait_for_answers([record], time.monotonic() + 60)
                assert process.poll() is None and record.exists()
            threads = recorder.threads_of(record)
            assert "in busy\n" in threads and threads.count("most recent call first") == 1
            found = inspection.inspect({0: (process.pid, stacks)})[0]
            assert " in <module>\n" in found.stacks and "in busy" not in found.stacks
        finally:
            process.kill()


def test_a_program_in_the_place_of_a_rank_is_inspected_and_lives_on(tmp_path: Path):
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            found = inspection.inspect({0: (process.pid, tmp_path / "stacks")})[0]
            recorder.ask(process.pid, tmp_path / "record")
            assert found.state and not found.stacks
            time.sleep(0.2)
            assert process.poll() is None
        finally:
            process.kill()


def test_an_inspection_of_nobody(tmp_path: Path):
    process = subprocess.Popen(["true"])
    process.wait()
    assert inspection.inspect({3: (process.pid, tmp_path / "none")}) == {3: Inspection(state="", cpu=0.0, stacks="")}


@pytest.mark.parametrize(("device_s", "thread_s", "own_s"), [(0.0, 3.0, 3.5), (2.0, 3.0, 2.5), (2.0, None, 2.5), (0.0, None, None)])
def test_own_time_is_that_of_the_gpu_where_the_script_tells_it(device_s: float, thread_s: float | None, own_s: float | None):
    activity = Activity(1, 1, 1, "step", False, 0, 1.0, 1.0, data_s=0.5, device_s=device_s)
    assert effort.own_s(activity, thread_s) == own_s


ENDS_LATE = """
import os, sys
device = os.open(sys.argv[1], os.O_RDWR)
os.write(device, bytes(4096))
print("ready", flush=True)
input()
os._exit(int(sys.argv[2]))
"""


@needs_root
@pytest.mark.parametrize(("status", "failure"), [(3, 3), (0, None), (-signal.SIGKILL, -signal.SIGKILL)])
def test_how_a_process_fails_is_known_before_the_kernel_has_ended_it(tmp_path: Path, status: int, failure: int | None):
    with freezable_disk(tmp_path / "disk", 16) as disk, device_on(disk) as device:
        subprocess.run(["fsfreeze", "--freeze", disk], check=True)
        words = [sys.executable, "-c", ENDS_LATE, str(device), str(status)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == b"ready\n"
            assert inspection.failure_of(process.pid) is None
            if status < 0:
                process.send_signal(-status)
            else:
                process.stdin.write(b"go\n")
                process.stdin.flush()
            becomes(process.pid, "D")
            assert inspection.failure_of(process.pid) == failure
            assert process.poll() is None
            subprocess.run(["fsfreeze", "--unfreeze", disk], check=True)
            assert process.wait() == status
        assert inspection.failure_of(process.pid) is None
