import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from resilient.agent import standby as standby_module
from resilient.agent import watch as watch_module
from resilient.agent.bootstrap import WorkerSpec, _cause_of, _raised, start_rank
from resilient.agent.forkserver import Forked, ForkServer
from resilient.agent.inspection import state_of
from resilient.agent.standby import Role, Standbys
from resilient.agent.watch import Watch
from resilient.heartbeat.agent_side import AgentRegion
from resilient.worker import REGION_VARIABLE

PATIENCE_S = 120.0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def environ_of(rank: int, world_size: int) -> dict[str, str]:
    """On a node with two ranks."""
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank % 2)}


def role(rank: int, world_size: int) -> Role:
    return Role.of(environ_of(rank, world_size))


@pytest.fixture
def spec(tmp_path: Path) -> WorkerSpec:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(os.getpid(), os.environ['RANK'], os.getsid(0), *sys.argv[1:])\n")
    (tmp_path / "output").touch()
    where = (tmp_path / "output", tmp_path / "stacks", tmp_path / "record", tmp_path / "config.yaml")
    return WorkerSpec(environ_of(3, 4), *where, f"{script} word")


@pytest.fixture
def standbys(spec: WorkerSpec, fork_server: ForkServer) -> Iterator[Standbys]:
    made = Standbys(spec.config, spec.entrypoint, fork_server, left_behind=lambda pid: None)
    yield made
    made.close()


def waiting(standbys: Standbys, rank: int = 3, world_size: int = 4) -> int:
    """One that waits for its orders; its process id."""
    standbys.fork(role(rank, world_size))
    wait_for(lambda: standbys._waiting[rank].ready)
    return standbys._waiting[rank].process.pid or 0


def ran(standbys: Standbys, spec: WorkerSpec) -> list[str]:
    """What the rank has printed."""
    process = standbys.start(spec)
    process.join(PATIENCE_S)
    assert process.exitcode == 0, spec.output.read_text()
    return spec.output.read_text().split()


def gone(pid: int) -> bool:
    return state_of(pid) in ("", "Z")


def test_a_standby_becomes_the_rank(standbys: Standbys, spec: WorkerSpec):
    pid = waiting(standbys)
    assert not spec.output.read_text()
    assert ran(standbys, spec) == [str(pid), "3", str(pid), "word"]
    assert standbys.missing([role(3, 4)]) == role(3, 4)


def test_without_a_standby_a_rank_is_forked(standbys: Standbys, spec: WorkerSpec):
    assert ran(standbys, spec)[1:] == ["3", spec.output.read_text().split()[0], "word"]


@pytest.mark.parametrize("stream", ["sys.stdout.close()", "sys.stdout = None", "sys.stdout = open(os.devnull); sys.stdout.close()"])
def test_a_script_that_has_closed_its_output_ends_as_well_as_any(standbys: Standbys, spec: WorkerSpec, stream: str):
    Path(spec.entrypoint.split()[0]).write_text(f"import os, sys\nprint('trained', file=sys.stderr)\n{stream}\n")
    assert ran(standbys, spec) == ["trained"]


@pytest.mark.parametrize("sig", [signal.SIGSTOP, signal.SIGKILL])
def test_a_standby_that_would_not_run_is_ended_and_replaced(standbys: Standbys, spec: WorkerSpec, sig: signal.Signals):
    pid = waiting(standbys)
    os.kill(pid, sig)
    wait_for(lambda: state_of(pid) in ("", "Z", "T"))
    assert ran(standbys, spec)[0] != str(pid)
    wait_for(lambda: gone(pid))


def test_a_standby_leaves_stops_to_the_driver(standbys: Standbys, spec: WorkerSpec):
    pid = waiting(standbys)
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        os.kill(pid, sig)
    assert ran(standbys, spec)[0] == str(pid)


def test_standbys_that_nobody_needs_are_ended(standbys: Standbys):
    pids = [waiting(standbys), waiting(standbys, 2)]
    standbys.close()
    wait_for(lambda: all(gone(pid) for pid in pids))


@pytest.mark.parametrize(("rank", "world_size"), [(2, 4), (3, 8)])
def test_a_standby_becomes_no_other_rank_than_the_one_it_was_warmed_up_as(
    standbys: Standbys, spec: WorkerSpec, rank: int, world_size: int
):
    pid = waiting(standbys, rank, world_size)
    assert ran(standbys, spec)[0] != str(pid)


def test_what_is_missing_is_told_and_what_is_of_another_layout_is_ended(standbys: Standbys):
    pids = {rank: waiting(standbys, rank) for rank in (2, 3)}
    assert standbys.missing([role(2, 4), role(3, 4)]) is None
    assert standbys.missing([role(2, 4), role(4, 4)]) == role(4, 4)
    wait_for(lambda: gone(pids[3]))
    assert standbys.missing([role(2, 2)]) == role(2, 2)
    wait_for(lambda: gone(pids[2]))


def test_one_that_does_not_die_is_told_of_as_it_may_hold_memory_of_a_gpu(standbys: Standbys, monkeypatch: pytest.MonkeyPatch):
    pid, told = waiting(standbys), list[int]()
    process = standbys._waiting[3].process
    monkeypatch.setattr(standbys, "_left_behind", told.append)
    monkeypatch.setattr(standby_module, "KILL_S", 0.0)
    os.kill(pid, signal.SIGSTOP)  # it would end by itself once nobody wants it
    monkeypatch.setattr(Forked, "kill", lambda _: None)  # as one that the kernel holds
    standbys.close()
    assert told == [pid]
    monkeypatch.undo()
    os.kill(pid, signal.SIGKILL)
    process.join(PATIENCE_S)


def test_no_room_for_a_standby_ends_nobody_and_is_tried_again(
    standbys: Standbys, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refused(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    watch = Watch.__new__(Watch)
    watch._workers = SimpleNamespace(underway=True, roles=[role(3, 4)])  # type: ignore[assignment]
    watch._standbys, watch._standby_t = standbys, 0.0
    descriptors = psutil.Process().num_fds()
    with monkeypatch.context() as patch:
        patch.setattr(ForkServer, "fork", refused)
        for _ in range(3):
            watch._stand_by()
    assert caplog.text.count("no standby for rank 3 can be had") == 1
    assert psutil.Process().num_fds() == descriptors
    assert 0.0 < watch._standby_t - time.monotonic() <= watch_module.STANDBY_AGAIN_S
    monkeypatch.setattr(watch, "_standby_t", 0.0)  # that time is over
    wait_for(lambda: [watch._stand_by(), standbys.missing([role(3, 4)])][1] is None)


@contextmanager
def run_to_its_end(spec: WorkerSpec, fork_server: ForkServer, script: str) -> Iterator[tuple[int | None, AgentRegion]]:
    """A rank that runs this script; its exit code, and its region."""
    Path(spec.entrypoint.split()[0]).write_text(script)
    with closing(AgentRegion(spec.output.with_name("region"))) as region:
        supervised = replace(spec, environ={**spec.environ, REGION_VARIABLE: str(region.path)})
        process = fork_server.Process(target=start_rank, args=(supervised,), name="rank3")
        process.start()
        process.join(PATIENCE_S)
        yield process.exitcode, region


def test_an_exception_of_a_process_that_the_script_has_forked_is_not_the_ranks(spec: WorkerSpec, fork_server: ForkServer):
    script = (
        "import os\n"
        "if (child := os.fork()) == 0:\n    raise ValueError('only a child')\n"
        "os._exit(7 if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1 else 8)\n"
    )
    with run_to_its_end(spec, fork_server, script) as (code, region):
        assert code == 7
        assert spec.output.read_text().endswith("ValueError: only a child\n")
        assert [record.event for record in region.drain()] == []


@pytest.mark.parametrize("stream", ["sys.stderr = None", "sys.stderr.close()"])
def test_why_a_script_leaves_that_has_no_standard_error_is_told(spec: WorkerSpec, fork_server: ForkServer, stream: str):
    with run_to_its_end(spec, fork_server, f"import sys\n{stream}\nsys.exit('no GPU is free')\n") as (code, region):
        assert code == 1
        assert [record.fields["message"] for record in region.drain()] == ["no GPU is free"]


def test_an_exception_in_the_loop_of_an_attached_script_is_told_with_the_step_as_its_phase(
    spec: WorkerSpec, fork_server: ForkServer
):
    script = (
        "import torch, resilient\n"
        "model = torch.nn.Linear(1, 1)\n"
        "for _ in resilient.attach(model=model, optimizer=torch.optim.SGD(model.parameters())).steps(5):\n"
        "    raise ValueError('a bad sample')\n"
    )
    with run_to_its_end(spec, fork_server, script) as (code, region):
        assert code == 1
        assert [record.event for record in region.drain()] == ["raised"]
        assert region.activity().phase == "step"


def test_an_exception_whose_text_cannot_be_had_is_told_by_its_type():
    class WithoutText(Exception):
        def __str__(self) -> str:
            raise ValueError

    try:
        raise WithoutText from WithoutText()
    except WithoutText as error:
        told = _raised(error)
    assert (told["type"], told["message"]) == ("WithoutText", "(its text cannot be had: ValueError)")
    assert "test_standby.py" in str(told["traceback"]) and str(told["causes"]).startswith("WithoutText: (its text")


def test_of_an_exception_whose_text_is_long_both_ends_are_told():
    def fail(rest: int) -> None:
        if rest:
            return fail(rest - 1)
        raise ValueError("bad batch: " + "7, " * 500_000 + "and no more")

    try:
        fail(3)
    except ValueError as error:
        told = _raised(error)
    message, traceback = str(told["message"]), str(told["traceback"])
    assert len(message) < 9 << 10 and message.startswith("bad batch: 7, ") and message.endswith("7, and no more")
    assert "[... 1,491,830 characters are left out ...]" in message
    assert len(traceback) < 16 << 10 and traceback.endswith(f"ValueError: {message}\n") and "in fail" in traceback


def test_of_a_traceback_that_is_long_both_ends_are_told():
    error: Exception | None = None
    for number in range(2000):
        try:
            raise ValueError(f"number {number}") from error
        except ValueError as raised:
            error = raised
    assert error is not None
    traceback = str(_raised(error)["traceback"])
    assert len(traceback) < 65 << 10 and "characters are left out ...]" in traceback
    assert "ValueError: number 0\n" in traceback and traceback.endswith("ValueError: number 1999\n")


def test_what_a_script_says_when_it_leaves_is_why_it_has_ended():
    said = SystemExit("no GPU is free")
    assert _cause_of(said) is said and _raised(said)["message"] == "no GPU is free"
    left = SystemExit(3)
    assert _cause_of(left) is left and _raised(left)["message"] == "3"
    caught = KeyError("lr")
    said.__context__ = caught
    assert _cause_of(said) is caught
