"""The terminal is not part of the campaign: whatever becomes of it, the target is reached with the same numbers, and no restart."""

import contextlib
import fcntl
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from campaigns import ROOT, Campaign, Training, alive, same, wait_for
from soak import soaked

from resilient.driver.lease import holder
from resilient.ledger import EVENTS
from resilient.logs.paths import DRIVER_LOG

STEPS = 200
SOON = 20  # the step at which something happens
LATE = STEPS - 20  # a step from which a run goes on once all has been done to it
STEP_S = 0.05

Counting = Callable[..., Campaign]


@pytest.fixture(autouse=True)
def not_ignored() -> Iterator[None]:
    """SIGHUP is as it is in a shell, also where these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


class Terminal:
    """A pty with a process that leads its session; nobody reads it unless asked to.

    Args:
        words: a command.
        run: the campaign whose files it is about.
    """

    def __init__(self, run: Campaign, *words: str) -> None:
        self.master, slave = pty.openpty()

        def lead() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            words,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{ROOT}", "TERM": "xterm"},
            cwd=run.directory,
            preexec_fn=lead,  # noqa: PLW1509 - the terminal is to be that of its session
        )
        os.close(slave)
        self.shown = b""
        self._reading: threading.Thread | None = None

    def read(self) -> "Terminal":
        """Take what is shown from now on."""

        def work() -> None:
            with contextlib.suppress(OSError):
                while part := os.read(self.master, 1 << 16):
                    self.shown += part

        self._reading = threading.Thread(target=work, daemon=True)
        self._reading.start()
        return self

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def close(self) -> None:
        """As when the window is closed, or the connection of ssh breaks."""
        if self.master >= 0:
            os.close(self.master)
            self.master = -1

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.close()


def command(run: Campaign) -> list[str]:
    return [sys.executable, "-m", "resilient", "run", str(run.path)]


def driver(run: Campaign) -> psutil.Process:
    """The process that has the run directory."""
    return psutil.Process(wait_for(lambda: (found := holder(run.run_dir)) and found.pid, "a driver"))


def said(run: Campaign) -> str:
    return (run.run_dir / DRIVER_LOG).read_text()


@pytest.fixture
def terminals() -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(run: Campaign, *words: str) -> Terminal:
        made.append(Terminal(run, *words))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.fixture
def steady(counting: Counting) -> Iterator[Callable[..., Campaign]]:
    """A campaign whose driver may be anybody's child; none outlives the test. From step `holds` on it waits until it may go on."""
    made: list[Campaign] = []

    def make(holds: int | None = None, **changes: object) -> Campaign:
        made.append(counting(steps=STEPS, args={"step_s": STEP_S, "holds": holds}, **changes))
        return made[-1]

    yield make
    for run in made:
        found = holder(run.run_dir) if run.run_dir.exists() else None
        if found is not None and found.pid:
            process = psutil.Process(found.pid)
            process.kill()
            wait_for(lambda process=process: not alive(process), "the end of the driver")


def reach(run: Campaign, step: int) -> None:
    wait_for(lambda: run.run_dir.exists() and run.step() >= step, lambda: f"step {step}\n{run.logs()}")


def ended(run: Campaign) -> int:
    """The exit code of the campaign, as its ledger has it; the driver has ended as well."""
    process = driver(run) if holder(run.run_dir) is not None else None
    code = wait_for(lambda: run.events("run_finished"), lambda: f"the end\n{run.logs()}\n{said(run)}")[-1]["exit_code"]
    if process is not None:
        wait_for(lambda: not alive(process), "the end of the driver")
    return code


def undisturbed(run: Campaign) -> None:
    """The target was reached, at once, with the numbers that the toy has in a run without trouble."""
    assert [event["generation"] for event in run.events("generation_started")] == [1]
    assert not run.events("fault")
    assert run.losses() == {step: {repr(1.0 / step + (2 * (step - 1) + 1.0))} for step in range(1, STEPS + 1)}
    assert "is done" in said(run), said(run)


# -- standard output -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shell", "wrong"),
    [
        pytest.param('"$@" | head -n 1; exit ${PIPESTATUS[0]}', "standard output: Broken pipe", id="head", marks=pytest.mark.soak),
        pytest.param('"$@" >&- 2>&-', "standard output: it is closed", id="closed", marks=pytest.mark.soak),
        pytest.param('"$@" <&- >&- 2>&-', "standard error: it is closed", id="all-closed", marks=pytest.mark.soak),
        pytest.param('"$@" > /dev/full 2>&1', "standard output: No space left on device", id="full"),
    ],
)
def test_standard_output_that_is_gone_or_full_ends_nothing(steady: Callable[..., Campaign], shell: str, wrong: str):
    run = steady()
    run.within = ["bash", "-c", shell, "bash"]
    assert run.start().wait() == 0, run.output + said(run)
    undisturbed(run)
    assert wrong in said(run)


HELD = """
import os, subprocess, sys
reading, writing = os.pipe()
os.set_blocking(writing, False)
try:
    while os.write(writing, b"x"):
        pass
except BlockingIOError:
    os.set_blocking(writing, BLOCKING)
sys.exit(subprocess.run(sys.argv[1:], stdout=writing, stderr=writing, pass_fds=[reading]).returncode)
"""


@pytest.mark.soak
@pytest.mark.parametrize("blocking", [True, False])
def test_a_pipe_that_nobody_reads_holds_nothing_up(steady: Callable[..., Campaign], blocking: bool):
    run = steady()
    run.within = [sys.executable, "-c", HELD.replace("BLOCKING", str(blocking))]
    assert run.start().wait() == 0, said(run)
    undisturbed(run)


# -- signals ---------------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_hang_ups_before_anything_was_started_and_while_the_terminal_is_there_are_a_line_each_and_no_more(
    steady: Callable[..., Campaign],
):
    run = steady().start()
    assert run.process is not None
    status = Path(f"/proc/{run.process.pid}/status")

    def caught() -> bool:
        caught = next(int(line.split()[1], 16) for line in status.read_text().splitlines() if line.startswith("SigCgt"))
        return bool(caught >> (signal.SIGHUP - 1) & 1)

    wait_for(caught, "a handler of SIGHUP")
    run.signal(signal.SIGHUP)
    assert not run.run_dir.exists() or not run.events("generation_started")
    reach(run, SOON)
    run.signal(signal.SIGHUP)
    run.signal(signal.SIGHUP)
    assert run.wait() == 0, run.output
    undisturbed(run)
    assert (said(run).count("SIGHUP"), run.output.count("SIGHUP")) == (2, 1)  # the first one came before anything was shown


def test_a_hang_up_drains_where_the_config_wants_it(steady: Callable[..., Campaign]):
    run = steady(resilience={"on_hangup": "drain"}).start()
    reach(run, SOON)
    run.signal(signal.SIGHUP)
    run.signal(signal.SIGHUP)  # the kernel and the shell both say so
    assert run.wait() == 75, run.output
    drain = run.events("drain")[-1]
    assert drain["signal"] == "SIGHUP" and drain["step"] == run.step() < STEPS
    assert run.run() == 0, run.output
    assert max(run.losses()) == STEPS and all(len(values) == 1 for values in run.losses().values())


# -- a terminal that goes away, or stands still ----------------------------------------------------------------------------

CLOSED = {
    "ssh": '"$@"',  # the shell waits for it: its foreground job
    "exec": 'exec "$@"',  # it leads the session itself
    "background": '"$@" & wait',
    "nohup": 'nohup "$@" & wait',
    "setsid": 'setsid --wait "$@"',
}


@pytest.mark.parametrize("how", ["ssh", soaked("exec"), soaked("background"), soaked("nohup"), soaked("setsid")])
def test_a_terminal_that_is_closed_ends_nothing(steady: Callable[..., Campaign], terminals: Callable[..., Terminal], how: str):
    run = steady(LATE)
    terminal = terminals(run, "bash", "-c", f"{CLOSED[how]}; :", "bash", *command(run)).read()
    reach(run, SOON)
    process = driver(run)
    terminal.close()
    run.go_on()
    assert ended(run) == 0
    assert not alive(process)
    undisturbed(run)
    if how != "nohup":  # which writes to a file of its own
        assert "standard output: Input/output error" in said(run)


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("tmux") is None, reason="NOT TESTED HERE: a session of tmux needs tmux")
def test_a_session_of_tmux_that_is_killed_ends_nothing(steady: Callable[..., Campaign]):
    run = steady(LATE)
    name = f"resilient-{os.getpid()}"
    tmux = ["tmux", "-L", name, "-f", os.devnull]
    environ = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{ROOT}"}
    subprocess.run([*tmux, "new-session", "-d", "-s", "s", "-c", str(run.directory), *command(run)], check=True, env=environ)
    try:
        reach(run, SOON)
        process = driver(run)
    finally:
        subprocess.run([*tmux, "kill-session", "-t", "s"], check=True)
    run.go_on()
    assert ended(run) == 0
    assert not alive(process)
    undisturbed(run)
    assert "SIGHUP" in said(run)


@pytest.mark.soak
def test_a_terminal_that_nobody_reads_holds_nothing_up(steady: Callable[..., Campaign], terminals: Callable[..., Terminal]):
    run = steady()
    terminal = terminals(run, *command(run))  # the pty takes 4 KiB, and the live line is longer by then
    assert wait_for(lambda: terminal.process.poll() is not None, "the end") and terminal.process.returncode == 0, said(run)
    undisturbed(run)


def test_ctrl_z_and_fg_cost_no_restart(steady: Callable[..., Campaign], terminals: Callable[..., Terminal]):
    run = steady(LATE)
    terminal = terminals(run, "bash", "--norc", "-i").read()
    terminal.type(" ".join(command(run)).encode() + b"; echo the code is $?\n")
    reach(run, SOON)
    process = driver(run)
    terminal.type(b"\x1a")
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED, "the driver stands still")
    before = len(terminal.shown)
    time.sleep(1.0)  # it is the time that it is stopped for
    assert process.status() == psutil.STATUS_STOPPED
    assert b"\x1b[?25h" in terminal.shown  # the cursor is there for the shell
    terminal.type(b"fg; echo the code is $?\n")
    run.go_on()
    wait_for(lambda: b"the code is 0" in terminal.shown[before:], lambda: terminal.shown.decode()[-2000:])
    undisturbed(run)


@pytest.mark.soak
def test_a_minute_of_ctrl_z_costs_no_restart(counting: Counting, terminals: Callable[..., Terminal]):
    run = counting(steps=1600, args={"step_s": STEP_S}, every_steps=100)
    terminal = terminals(run, "bash", "--norc", "-i").read()
    terminal.type(" ".join(command(run)).encode() + b"\n")
    reach(run, SOON)
    process = driver(run)
    terminal.type(b"\x1a")
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED, "the driver stands still")
    time.sleep(60.0)
    terminal.type(b"fg\n")
    assert ended(run) == 0
    assert [event["generation"] for event in run.events("generation_started")] == [1]
    assert len(run.metrics()) == 1600 and not run.events("fault")


# -- with the real trainer -------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("how", CLOSED)
def test_weights_are_the_same_to_the_last_bit_although_the_terminal_was_closed(
    training: Training, reference_runs: Callable[[str], Campaign], terminals: Callable[..., Terminal], how: str
):
    run = training(train={"precision": "fp32"})
    terminal = terminals(run, "bash", "-c", f"{CLOSED[how]}; :", "bash", *command(run)).read()
    reach(run, 5)
    terminal.close()
    assert ended(run) == 0
    same(run, reference_runs("fp32"))


# -- attach ----------------------------------------------------------------------------------------------------------------


def test_another_terminal_shows_the_campaign_and_its_end(steady: Callable[..., Campaign], terminals: Callable[..., Terminal]):
    run = steady(LATE).start()
    wait_for((run.run_dir / EVENTS).exists, "the campaign")
    terminal = terminals(run, sys.executable, "-m", "resilient", "attach", str(run.run_dir)).read()
    left = terminals(run, sys.executable, "-m", "resilient", "attach", str(run.run_dir)).read()
    wait_for(lambda: f"/{STEPS}".encode() in left.shown, "the live line")
    left.type(b"\x03")
    assert left.process.wait(timeout=200.0) == 0
    wait_for(lambda: b"the campaign goes on" in left.shown, "the last word")
    wait_for(lambda: f"/{STEPS}".encode() in terminal.shown, "the live line of the other one")
    run.go_on()
    assert run.wait() == 0, run.output
    assert terminal.process.wait(timeout=200.0) == 0
    wait_for(lambda: b"reached at" in terminal.shown, "the last word")
    shown = terminal.shown.decode()
    assert f"/{STEPS}" in shown and "loss" in shown and "generation 1" in shown and f"reached at step {STEPS} of {STEPS}" in shown
    undisturbed(run)
