"""Orders to ranks: each is carried out at most once, by whom it was given to, and an injector knows of its own ones alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from chaos.faults import worker_oom
from chaos.faults.worker_oom import WorkerOom
from chaos.faults.worker_raise import InjectedError
from chaos.injectors import inside
from chaos.injectors.context import Target
from chaos.injectors.injector import InjectionRequest
from resilient import worker
from resilient.agent.oom import Controller
from resilient.config import dump, load

NO_ROOM = """
import resource, signal, sys
from pathlib import Path
from chaos.injectors import inside
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    inside.withdraw(Path(sys.argv[1]), "one")
except OSError:
    print("no room")
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a campaign that allows faults, and runs nowhere."""
    path = tmp_path / "config.yaml"
    path.write_text(f"run_dir: {tmp_path}\ncluster: {{device: cpu, procs_per_node: 1}}\nchaos: {{allow: true}}\n")
    path.write_text(dump(load(path, [])))
    return tmp_path


def order_given(run_dir: Path, fault: str = "worker_raise") -> subprocess.Popen[str]:
    """An injector that has a rank do something to itself; its input is open."""
    process = subprocess.Popen(
        [sys.executable, "-m", "chaos.injectors.injector"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write(InjectionRequest(f"1-{fault}", fault, run_dir, Target(rank=0)).line())
    process.stdin.flush()
    return process


def answers(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """All of an injector whose input ends now."""
    printed, _ = process.communicate(timeout=60)
    return [json.loads(line) for line in printed.splitlines()]


def rank_0(run_dir: Path) -> inside._OrderWatcher:
    return inside._OrderWatcher(worker.Context(0, 0, 1, 1, 1, run_dir, supervised=True), run_dir / inside.DIRECTORY)


def come_to_step(rank: inside._OrderWatcher, step: int) -> None:
    rank(None, step - 1)
    rank("step", step)


def order_of(run_dir: Path) -> Path:
    """The file of an order, once it is there."""
    while not (found := [*(run_dir / inside.DIRECTORY).glob("*.order")]):
        time.sleep(0.01)
    return found[0]


def test_what_could_not_be_marked_can_still_be_taken_back(tmp_path: Path):
    inside.give(tmp_path, inside.Order("one", "worker_raise", 0))
    done = subprocess.run([sys.executable, "-c", NO_ROOM, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "no room\n"
    assert inside.withdraw(tmp_path, "one")
    assert not inside.withdraw(tmp_path, "one")
    assert [path.name for path in (tmp_path / inside.DIRECTORY).iterdir()] == ["one.taken"]


def test_an_order_that_was_taken_back_is_given_again_and_one_that_was_carried_out_is_not_told_of_twice(run_dir: Path):
    for _ in range(2):
        *_, last = answers(order_given(run_dir))
        assert last == last | {"what": "failed", "reason": "rank 0 did not come to step any"}
    injector = order_given(run_dir)
    rank = rank_0(run_dir)
    with pytest.raises(InjectedError):
        while injector.poll() is None:
            rank(None, 4)
            rank("step", 5)
    assert [answer["what"] for answer in answers(injector)] == ["armed", "injected", "undone"]
    *_, last = answers(order_given(run_dir))
    assert last["what"] == "failed"


def test_an_order_that_nobody_renews_any_more_is_not_carried_out_and_goes(tmp_path: Path):
    for name in ("one", "two"):
        inside.give(tmp_path, inside.Order(name, "worker_raise", 0, 5))
    old_t = time.time() - inside.STALE_S - 10
    os.utime(tmp_path / inside.DIRECTORY / "one.order", (old_t, old_t))
    rank = rank_0(tmp_path)
    with pytest.raises(InjectedError):
        come_to_step(rank, 5)
    come_to_step(rank, 6)
    assert sorted(path.name for path in (tmp_path / inside.DIRECTORY).iterdir()) == ["one.taken", "two.order", "two.taken"]
    assert (inside.taken(tmp_path, "one"), inside.taken(tmp_path, "two") is None) == (None, False)


def test_an_injector_renews_its_order_as_long_as_it_waits(run_dir: Path):
    injector = order_given(run_dir)
    path = order_of(run_dir)
    os.utime(path, (1000, 1000))
    while path.stat().st_mtime == 1000:
        time.sleep(0.01)
    with pytest.raises(InjectedError):
        come_to_step(rank_0(run_dir), 5)
    assert [answer["what"] for answer in answers(injector)] == ["armed", "injected", "undone"]


def test_a_rank_that_cannot_do_what_it_was_asked_for_trains_on_and_says_why(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    nowhere = run_dir / "there" / "is" / "none"
    monkeypatch.setattr(worker_oom, "controller", lambda text: Controller(nowhere, "/", unified=True))
    assert "cannot be made" in WorkerOom().lacks()
    injector = order_given(run_dir, "worker_oom")
    order_of(run_dir)
    injector.send_signal(signal.SIGSTOP)
    come_to_step(rank_0(run_dir), 5)
    injector.send_signal(signal.SIGCONT)
    armed, failed = answers(injector)
    assert (armed["what"], failed["what"]) == ("armed", "failed")
    assert str(nowhere) in failed["reason"]
