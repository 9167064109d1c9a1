"""A whole agent, as a process, with the test as its driver."""

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from parts import PATIENCE_S, FakeDriver

from checkpoint.tiers import session
from resilient import storage
from resilient.agent.memory import agent_record, daemon_directory, region_directories, region_directory
from resilient.config import Config
from resilient.driver.lease import LOCK
from resilient.exits import Exit
from resilient.protocol.connection import TOKEN_VARIABLE
from resilient.protocol.messages import (
    AgentFailed,
    Arm,
    Health,
    Hello,
    Imported,
    Inspect,
    Inspected,
    LinksChanged,
    Propose,
    Proposed,
    Ready,
    RecordsWritten,
    Report,
    Shutdown,
    SignalReceived,
    Start,
    Started,
    Stop,
    WorkerEnded,
)

SCRIPT = """
import json, os, time
from resilient import worker
context = worker.init()
worker.report({"step": 4, "environ": os.environ["RESILIENT_GUARD"]}, event="resumed")
step = 0
while (context.generation, context.rank) != (2, 1):
    step += 1
    time.sleep(0.01)
    worker.report({"step": step, "loss": float("nan")})
    worker.beat(step)
raise SystemExit(3)
"""
TALKING = """
import logging, threading, time
def talk():
    while True:
        logging.getLogger("library").warning("still here")
        time.sleep(0.001)
threading.Thread(target=talk, daemon=True).start()
"""


class Node:
    """An agent's process, and this test as its driver.

    Attributes:
        early: reports of the newest generation that came before its `Started`: a standby may be faster than that.
    """

    early: list[Report]

    def __init__(self, tmp_path: Path, *, mounted: bool = True) -> None:
        self.run_dir = tmp_path / "run"
        self.run_dir.mkdir()
        (self.run_dir / "logs").mkdir()
        (self.run_dir / LOCK).touch()  # as the driver that holds it has
        (tmp_path / "script.py").write_text(SCRIPT)
        (self.run_dir / "config.yaml").write_text("")
        config = Config.model_validate({"name": "gpt", "checkpoint": {"tiers": [{"name": "d", "path": str(tmp_path / "durable")}]}})
        (tmp_path / "durable").mkdir()
        storage.write(self.run_dir, storage.arrange(config, 1, "id", {tmp_path / "durable": False}))
        if not mounted:
            shutil.rmtree(self.run_dir)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.process = subprocess.Popen(
                [
                    *[sys.executable, "-m", "resilient.agent", "--driver", f"127.0.0.1:{listener.getsockname()[1]}", "--node", "0"],
                    *["--procs", "2", "--run-dir", str(self.run_dir), "--run-id", "test", "--fence-s", "600", "--health-s", "60"],
                    *["--entrypoint", str(tmp_path / "script.py"), "--parent", str(os.getpid())],
                ],
                env={**os.environ, TOKEN_VARIABLE: "secret.7"},
                start_new_session=True,
            )
            listener.settimeout(PATIENCE_S)
            self.driver = FakeDriver(listener)

    def start(self, generation: int) -> tuple[Ready, Started]:
        """Let a generation of this one node begin."""
        ready, _ = self.driver.until(Ready)
        self.begin(ready, generation)
        started, before = self.driver.until(Started)
        self.early = [message for message in before if isinstance(message, Report)]
        return ready, started

    def begin(self, ready: Ready, generation: int) -> None:
        """Say that one is to begin."""
        self.driver.send(
            Start(
                generation=generation,
                node_rank=0,
                nodes=1,
                master_addr="127.0.0.1",
                master_port=ready.store_port,
                collective_timeout_s=600.0,
                report_s=0.2,
                mtbf_s=3600.0,
                saved_step=2,
                go_back_to=3,
                skip=((5, 6),),
                world_size=2,
                devices=(0, 1),
            )
        )

    def close(self) -> None:
        self.driver.close()
        self.process.kill()
        self.process.wait()
        shutil.rmtree(daemon_directory(self.run_dir, 0), ignore_errors=True)  # it stays for the next job


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


def test_an_agent_whose_run_directory_is_not_mounted_says_so_in_place_of_its_hello_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It makes nothing in its place, although a library logs all the time."""
    (tmp_path / "talking").mkdir()
    (tmp_path / "talking/sitecustomize.py").write_text(TALKING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'talking'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    node = Node(tmp_path, mounted=False)
    try:
        failed = node.driver.next()
        assert isinstance(failed, AgentFailed)
        assert failed.error == f"{node.run_dir} is not there on {socket.gethostname()}: is it mounted?"
        assert node.process.wait(PATIENCE_S) == Exit.UNUSABLE
        assert not node.run_dir.exists()
    finally:
        node.close()


def test_an_agent_says_who_it_is_runs_generations_and_reports_what_becomes_of_them(node: Node):
    hello = node.driver.next()
    assert isinstance(hello, Hello)
    assert (hello.node, hello.incarnation, hello.generation) == (0, 7, 0)
    node.driver.until(Imported)
    health, before = node.driver.until(Health)
    assert not [each for each in before if isinstance(each, Ready)], "a node is checked before it is ready"
    assert not [finding for finding in health.findings if finding.check.startswith("rank")]
    ready, started = node.start(1)
    assert ready.generation == 0
    assert sorted(started.pids) == [0, 1]

    resumed: set[int] = set()
    steps: dict[int, list[int]] = {0: [], 1: []}
    while min(map(len, steps.values())) < 20:
        report, others = (node.early.pop(0), []) if node.early else node.driver.until(Report)
        assert report.generation == 1
        assert all(isinstance(each, LinksChanged) for each in others), "an agent on a busy machine may see TCP retransmit"
        for record in report.records:
            if record.event == "resumed":
                assert record.fields["environ"] == '{"go_back_to": 3, "skip": [[5, 6]], "saved_step": 2}'
                resumed.add(record.rank)
            else:
                assert math.isnan(record.fields["loss"])
                steps[record.rank].append(record.fields["step"])
        for rank, beat in report.heartbeats.items():
            assert beat.step < 0 or rank in resumed, "a step is reported before the record that came before it"
            assert beat.step <= max(steps[rank], default=0)
        node.driver.send(RecordsWritten(generation=1, count=len(report.records)))
    for found in steps.values():
        assert found == list(range(1, len(found) + 1))

    deadline, told = time.monotonic() + PATIENCE_S, list[int]()
    while told != [0, 1]:  # a rank that gets no core in time does not say where it is
        assert time.monotonic() < deadline
        node.driver.send(Inspect(generation=1))
        inspected, _ = node.driver.until(Inspected)
        told = sorted(rank for rank, each in inspected.ranks.items() if "script.py" in each.stacks)
    os.kill(node.process.pid, signal.SIGUSR1)
    received, _ = node.driver.until(SignalReceived)
    assert received.name == "SIGUSR1"
    node.driver.send(Propose(generation=1, reason="SIGUSR1"))
    proposed, _ = node.driver.until(Proposed)
    assert proposed.generation == 1

    node.driver.send(Stop(generation=1))
    _, started = node.start(2)
    end, before = node.driver.until(WorkerEnded)
    assert (end.end.rank, end.end.exitcode, end.generation, end.stopped) == (1, 3, 2, False)
    told = [record.rank for report in [*node.early, *before] if isinstance(report, Report) for record in report.records]
    assert 1 in told, "its records go before its end"
    node.driver.send(Arm(generation=1, target=1), Stop(generation=1))  # of a generation that is over: nobody minds
    node.driver.until(Report)
    node.driver.send(Stop(generation=2))
    node.driver.until(Ready)
    node.driver.send(Shutdown(generation=2))
    assert node.process.wait(PATIENCE_S) == 0
    assert not region_directory(node.run_dir, 0).exists()
    assert list((node.run_dir / ".spill").glob("*.jsonl")), "what was not acknowledged is left in the run directory"


def test_an_agent_whose_driver_is_gone_ends_with_its_workers_and_leaves_what_they_reported(node: Node):
    _, started = node.start(1)
    workers = [psutil.Process(pid) for pid in started.pids.values()]
    report, _ = node.driver.until(Report)
    while not report.records:
        report, _ = node.driver.until(Report)
    node.driver.close()
    assert node.process.wait(PATIENCE_S) == 0
    assert not psutil.wait_procs(workers, PATIENCE_S)[1]
    assert list((node.run_dir / ".spill").glob("*-g1-0.jsonl"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as worker, pytest.raises(ConnectionRefusedError):  # no daemon is there
        worker.connect(str(daemon_directory(node.run_dir, 0) / session.SOCKET))


def test_an_agent_that_ends_by_an_error_of_its_own_says_which(node: Node):
    ready, _ = node.driver.until(Ready)
    regions = region_directory(node.run_dir, 0)
    shutil.rmtree(regions)  # no earlier: the health check is there, too
    regions.write_text("not a directory")
    node.begin(ready, 1)
    failed, _ = node.driver.until(AgentFailed)
    regions.unlink()
    assert failed.error.startswith("NotADirectoryError: ")
    assert str(regions) in failed.error
    assert node.process.wait(PATIENCE_S) == 1


def test_an_agent_whose_directory_in_memory_was_cleared_starts_the_next_generation(node: Node):
    node.start(1)
    (regions,) = region_directories(node.run_dir)
    shutil.rmtree(regions)
    node.driver.send(Stop(generation=1))
    _, started = node.start(2)
    assert sorted(started.pids) == [0, 1]
    record = agent_record(node.run_dir, 0)
    assert record is not None and record.pid == node.process.pid
    assert [path.name for path in regions.glob("g2-rank*")] != []
