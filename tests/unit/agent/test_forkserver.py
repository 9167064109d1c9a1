"""The fork server: real processes, forked, ended, killed and stopped."""

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest
from forked_targets import answer, fail, leave, leave_one_behind, leave_when_told, sleep
from parts import Talk

from resilient.agent import forkserver
from resilient.agent.forkserver import Forked, ForkServer, ForkServerGone
from resilient.agent.inspection import state_of
from resilient.agent.template import MOST_DEATHS
from resilient.protocol.messages import Alive, Ping

PATIENCE_S = 120.0


def run(server: ForkServer, target: object, *args: object, name: str = "") -> Forked:
    process = server.Process(target=target, args=args, name=name)  # type: ignore[arg-type]
    process.start()
    return process


def told(server: ForkServer, target: object) -> object:
    """What a process says before it ends."""
    ours, its = server.Pipe()
    process = run(server, target, its)
    its.close()
    assert ours.poll(PATIENCE_S)
    said: object = ours.recv()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    process.close()
    return said


def gone(pid: int) -> bool:
    return state_of(pid) in ("", "Z")


def asked(server: ForkServer) -> tuple[int, object]:
    """The parent of a new process, and what that was told."""
    ours, its = server.Pipe()
    process = run(server, answer, its)
    its.close()
    ours.send("a word")
    assert ours.poll(PATIENCE_S)
    told: tuple[int, object] = ours.recv()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    process.close()
    return told


@pytest.mark.parametrize(("status", "exitcode"), [(0, 0), (None, 0), (3, 3), ("words", 1)])
def test_the_exit_status_of_a_forked_process_arrives(fork_server: ForkServer, status: object, exitcode: int):
    process = run(fork_server, leave, status)
    assert wait([process.sentinel], PATIENCE_S)
    process.join(PATIENCE_S)
    assert process.exitcode == exitcode


def test_an_exception_ends_a_forked_process_with_status_1(fork_server: ForkServer):
    process = run(fork_server, fail)
    process.join(PATIENCE_S)
    assert process.exitcode == 1


def test_a_killed_process_has_its_signal_as_status_and_others_go_on(fork_server: ForkServer):
    processes = [run(fork_server, sleep) for _ in range(5)]
    assert [process.exitcode for process in processes] == [None] * 5
    processes[3].kill()
    processes[3].join(PATIENCE_S)
    assert [process.exitcode for process in processes] == [None, None, None, -signal.SIGKILL, None]
    with pytest.raises(ValueError, match="still runs"):
        processes[0].close()


def test_ends_that_nobody_waited_for_are_not_mixed_up(fork_server: ForkServer):
    processes = [run(fork_server, leave, number) for number in range(40)]
    for process in reversed(processes):
        process.join(PATIENCE_S)
    assert [process.exitcode for process in processes] == list(range(40))


def test_connections_travel_with_the_arguments(fork_server: ForkServer):
    assert asked(fork_server)[1] == "a word"


def test_a_forked_process_has_the_name_it_was_given(fork_server: ForkServer):
    process = run(fork_server, sleep, name="rank12345")
    deadline = time.monotonic() + PATIENCE_S
    while psutil.Process(process.pid).name() != "rank12345":
        assert time.monotonic() < deadline


def test_a_killed_server_takes_what_it_forked_along_and_another_one_serves(fork_server: ForkServer):
    process = run(fork_server, sleep)
    server, _ = asked(fork_server)
    os.kill(server, signal.SIGKILL)
    process.join(PATIENCE_S)
    assert process.exitcode == -signal.SIGKILL
    another, word = asked(fork_server)
    assert another != server
    assert word == "a word"


def test_a_server_that_is_stopped_is_replaced(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forkserver, "FORK_S", 0.3)
    server, _ = asked(fork_server)
    os.kill(server, signal.SIGSTOP)
    assert asked(fork_server)[0] != server
    psutil.wait_procs([psutil.Process(server)] if psutil.pid_exists(server) else [], PATIENCE_S)
    assert not psutil.pid_exists(server)


@pytest.mark.parametrize(("state", "exitcode"), [("R", 3), ("T", -signal.SIGKILL)])
def test_a_server_that_waits_for_a_core_still_tells_a_status_and_one_that_is_stopped_is_not_waited_for(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch, state: str, exitcode: int
):
    """That it gets no core is played by stopping it."""
    monkeypatch.setattr(forkserver, "STATUS_S", 0.2)
    monkeypatch.setattr(forkserver, "FORK_S", PATIENCE_S)
    server, _ = asked(fork_server)
    ours, its = fork_server.Pipe()
    process = run(fork_server, leave_when_told, its)
    os.kill(server, signal.SIGSTOP)
    while state_of(server) != "T":
        time.sleep(0.01)
    ours.send(3)
    assert wait([process.sentinel], PATIENCE_S)
    monkeypatch.setattr(forkserver, "state_of", lambda _: state)
    going_on = threading.Timer(1.0 if state == "R" else PATIENCE_S, os.kill, (server, signal.SIGCONT))
    going_on.start()
    assert process.exitcode == exitcode
    going_on.cancel()
    os.kill(server, signal.SIGCONT)
    ours.close(), its.close()


def test_without_a_template_there_is_no_other_server(template, fork_server: ForkServer):
    process = run(fork_server, sleep)
    template[1].kill()
    process.join(PATIENCE_S)
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(ForkServerGone):
        run(fork_server, sleep)


def test_servers_that_die_again_and_again_are_given_up(fork_server: ForkServer, template):
    with pytest.raises(ForkServerGone):
        for _ in range(2 * MOST_DEATHS):
            os.kill(asked(fork_server)[0], signal.SIGKILL)
    assert template[1].wait(PATIENCE_S) == 1


def test_what_was_forked_ends_with_the_agent(tmp_path: Path):
    code = (
        "import os, socket, sys, test_forkserver as t\n"
        "from resilient.agent.forkserver import ForkServer\n"
        "from resilient.agent.template import die_with_parent, keep_serving\n"
        "ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "if os.fork() == 0:\n"
        "    ours.close(); die_with_parent(os.getppid()); keep_serving(its, preparation=None)\n"
        "its.close(); server = ForkServer(ours)\n"
        "print(*(t.run(server, t.sleep).pid for _ in range(3)), flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    agent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environ)
    assert agent.stdout is not None
    family = [psutil.Process(int(pid)) for pid in agent.stdout.readline().split()]
    assert len(family) == 3
    agent.kill()
    agent.wait()
    _, alive = psutil.wait_procs(family, PATIENCE_S)
    assert not alive


def test_a_server_that_is_stopped_keeps_no_ping_waiting(template, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forkserver, "FORK_S", 1.0)
    talk = Talk()
    fork_server = ForkServer(template[0], talk.loop.wait_readable)
    talk.loop.watch(fork_server.fileno(), fork_server.receive)
    server, _ = asked(fork_server)
    os.kill(server, signal.SIGSTOP)
    talk.peer.send(Ping(generation=0))
    assert asked(fork_server)[0] != server
    assert talk.peer.next() == Alive(generation=0)
    assert not talk.peer.arrived()
    fork_server.close()
    talk.close()


def test_what_an_ended_process_has_started_in_a_session_of_its_own_is_killed_and_what_runs_is_left(fork_server: ForkServer):
    other = run(fork_server, sleep)
    left = [int(told(fork_server, leave_one_behind)) for _ in range(3)]  # type: ignore[call-overload]
    assert not [pid for pid in left if gone(pid)]
    fork_server.end_strays()
    assert [pid for pid in left if gone(pid)] == left
    assert other.exitcode is None
    other.kill()
