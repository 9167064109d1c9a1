"""What a guard's commands have not undone is answered. Slurm and ports are commands and files of the test."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from leases import write_lease
from mounts import needs_root

from chaos.fault import CannotInject
from chaos.faults import ib_port
from chaos.faults.ib_port import IbPort
from chaos.faults.run_dir_read_only import RunDirReadOnly
from chaos.faults.time_limit import TimeLimit
from chaos.injectors.context import InjectionContext, Target
from chaos.injectors.guard import Guard
from chaos.injectors.injector import InjectionRequest
from chaos.primitives import processes, sockets
from chaos.verdict import machine
from resilient import storage
from resilient.config import dump, load
from resilient.storage import Storage, TierStorage

# The limit is in a file, and whose right it is to lengthen it in another one.
SCONTROL = """#!/bin/sh
cd {directory}
for word; do limit=$word; done
case "$* $(cat who)" in
  *show*) echo "JobId=7 JobState=RUNNING StartTime=2026-01-01T00:00:00 TimeLimit=$(cat limit)" ;;
  *TimeLimit=+*user | *TimeLimit=01:00:00*user) echo "Access/permission denied" >&2; exit 1 ;;
  *TimeLimit=+*) ;;
  *) echo "${{limit#TimeLimit=}}" > limit ;;
esac
"""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a campaign in a job of an hour."""
    path = tmp_path / "config.yaml"
    path.write_text(f"run_dir: {tmp_path}\ncluster: {{device: cpu, procs_per_node: 1}}\nchaos: {{allow: true}}\n")
    path.write_text(dump(load(path, [])))
    script = tmp_path / "scontrol"
    script.write_text(SCONTROL.format(directory=tmp_path))
    script.chmod(0o755)
    (tmp_path / "limit").write_text("01:00:00\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    driver = subprocess.Popen(["sleep", "600"], env={**os.environ, "SLURM_JOB_ID": "7"})
    write_lease(tmp_path, driver.pid)
    yield tmp_path
    driver.kill()
    driver.wait()


def of_an_injector(run_dir: Path) -> list[dict[str, Any]]:
    """What it answers that shortens the limit, and is let go of at once."""
    line = InjectionRequest("1", "time_limit", run_dir, Target()).line()
    done = subprocess.run(
        [sys.executable, "-m", "chaos.injectors.injector"], input=line, capture_output=True, text=True, check=False
    )
    return [json.loads(each) for each in done.stdout.splitlines()]


@pytest.mark.parametrize(("who", "last", "limit"), [("operator", "undone", "01:00:00"), ("user", "failed", None)])
def test_a_limit_that_could_not_be_set_again_is_not_undone(run_dir: Path, who: str, last: str, limit: str | None):
    (run_dir / "who").write_text(who)
    answers = of_an_injector(run_dir)
    assert [each["what"] for each in answers] == ["armed", "injected", last]
    now = (run_dir / "limit").read_text().strip()
    assert limit in (now, None)
    if last == "failed":
        assert answers[-1]["reason"] == f"not undone: the time limit of job 7 was 01:00:00, and is {now}"


def test_a_limit_that_its_user_may_not_set_again_stays(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    (run_dir / "who").write_text("user")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with Guard() as guard, pytest.raises(CannotInject, match="permission denied"):
        context = InjectionContext(run_dir, load(run_dir / "config.yaml", []), Target(), guard, over=lambda seconds: True)
        TimeLimit().inject(context)
    assert (run_dir / "limit").read_text() == "01:00:00\n"
    assert context.not_undone() == ""


@pytest.mark.parametrize(
    ("down", "up", "injected", "undone"),
    [
        ("DOWN", "ACTIVE", True, True),
        ("DOWN", "DOWN", True, False),
        ("ACTIVE", "ACTIVE", False, True),
    ],
)
def test_a_port_is_down_only_if_its_state_says_so_and_up_again_too(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, down: str, up: str, injected: bool, undone: bool
):
    monkeypatch.setattr(ib_port, "PORTS", run_dir)
    monkeypatch.setattr(processes, "TAKES_S", 0.5)
    state = run_dir / "mlx5_0/ports/1/state"
    state.parent.mkdir(parents=True)
    state.write_text("ACTIVE\n")
    fault = IbPort(**{name: [f"sh -c 'echo {to} > {state}'"] for name, to in (("down", down), ("up", up))})
    with Guard() as guard:
        context = InjectionContext(run_dir, load(run_dir / "config.yaml", []), Target(), guard, over=lambda seconds: True)
        if injected:
            assert fault.inject(context)["states"] == {str(state.parent): "DOWN"}
        else:
            with pytest.raises(CannotInject, match="no port has changed"):
                fault.inject(context)
    assert (context.not_undone() == "") == undone


def test_a_rank_hears_again_whatever_modules_the_working_directory_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    (tmp_path / "chaos.py").write_text("raise ImportError('a script of somebody else')")
    with socket.create_server(("127.0.0.1", 0)) as server:
        script = f"import socket; print(socket.create_connection(('127.0.0.1', {server.getsockname()[1]})).recv(1), flush=True)"
        rank = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        peer, _ = server.accept()
        process = psutil.Process(rank.pid)
        with sockets.borrowed(process) as connections:
            for each in connections.values():
                sockets.deafen(each)
        subprocess.run(sockets.undo(process), check=False)
        peer.sendall(b"x")
        try:
            assert rank.communicate(timeout=5)[0] == b"b'x'\n"
        finally:
            rank.kill()
            rank.wait()
            peer.close()


def describe(run_dir: Path, root: Path) -> None:
    """Leave what a driver leaves of a campaign's tiers: one in memory, and the durable one."""
    common: dict[str, Any] = {
        "keep_last": 2,
        "keep_every": None,
        "every_steps": 1,
        "every_s": None,
        "replicas": False,
        "max_bytes_per_s": None,
    }
    tiers = (
        TierStorage("ram", "memory", durable=False, roots=(str(root),), **common),
        TierStorage("disk", "durable", durable=True, roots=(str(run_dir / "checkpoints"),), **common),
    )
    (run_dir / storage.FILE).write_text(json.dumps(asdict(Storage("0" * 16, tiers, 2, ()))))


@needs_root
@pytest.mark.parametrize("name", ["all runs", "Läufe"])
def test_a_run_directory_of_any_name_turns_read_only_and_is_mounted_once_afterwards(tmp_path: Path, name: str):
    run_dir = tmp_path / name
    run_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", run_dir], check=True)
    try:
        describe(run_dir, run_dir / "ram")
        (tmp_path / "config.yaml").write_text("cluster: {device: cpu, procs_per_node: 1}\n")
        config = load(tmp_path / "config.yaml", [f"run_dir={run_dir}"])
        before = machine.inspect([run_dir])["mount"]
        with (run_dir / "log").open("w"), Guard() as guard:  # open, so that the kernel lets only a view be mounted
            context = InjectionContext(run_dir, config, Target(), guard, over=lambda seconds: True)
            assert RunDirReadOnly().inject(context)["view"]
            assert machine.inspect([run_dir])["mount"] != before
        assert machine.inspect([run_dir])["mount"] == before
        (run_dir / "log").write_text("")
    finally:
        while subprocess.run(["mountpoint", "-q", run_dir], check=False).returncode == 0:
            subprocess.run(["umount", "-l", run_dir], check=True)


# An injector's process, which is killed as it begins to delete.
KILLED_AS_IT_DELETES = """
import os, shutil, signal, sys
from pathlib import Path
from chaos.faults.snapshot_lost import SnapshotLost
from chaos.injectors.context import InjectionContext, Target
from chaos.injectors.guard import Guard
from resilient.config import load
run_dir = Path(sys.argv[1])
shutil.rmtree = lambda path: os.kill(os.getpid(), signal.SIGKILL)
with Guard() as guard:
    SnapshotLost().inject(InjectionContext(run_dir, load(run_dir / "config.yaml", []), Target(node=0), guard))
"""


def test_of_snapshots_that_are_lost_nothing_is_left_when_their_injector_is_killed(run_dir: Path):
    root = run_dir / "ram" / "identity" / "node0"
    (root / "step-00000003").mkdir(parents=True)
    describe(run_dir, root)
    killed = subprocess.run([sys.executable, "-c", KILLED_AS_IT_DELETES, str(run_dir)], check=False)
    assert killed.returncode == -9
    deadline = time.monotonic() + 20
    while (left := list(root.parent.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []
