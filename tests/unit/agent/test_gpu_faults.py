"""What an agent does about faults of GPUs, and about processes that do not die: the node is checked before it goes on."""

import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resilient import worker
from resilient.agent import agent as agent_module
from resilient.agent import lastwords, node_check
from resilient.agent import workers as workers_module
from resilient.agent.agent import NodeAgent
from resilient.agent.oom import KernelLog
from resilient.agent.settings import AgentSettings
from resilient.agent.workers import Workers
from resilient.health import gpus
from resilient.health import node as node_module
from resilient.health.bounded import Task
from resilient.health.node import NodeCheck
from resilient.protocol.messages import Ready, Start
from resilient.recovery.xids import Xid, parse

BUS = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
ECC = "NVRM: Xid (PCI:0000:3b:00): 94, pid=7, name=rank0, Contained: SM (0x1). RST: No, D-RST: No"
OWN = "NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=rank0, channel 0x0000000a, intr 00000000. MMU Fault: ENGINE GRAPHICS"
START = Start(1, 0, 1, "n0", 1, 1.0, 1.0, 1.0, world_size=2, devices=(0, 1))


def settings(directory: Path) -> AgentSettings:
    return AgentSettings(0, 0, directory, "x", "a:b", 30.0, 5.0, 2, "cuda", "n:1", "t.1", "127.0.0.1")


class Checks:
    """Stands for the check of a node: remembers what was to be checked."""

    def __init__(self) -> None:
        self.specs: list[node_check.NodeSpec] = []

    def __call__(self, spec: node_check.NodeSpec, _: object) -> None:
        self.specs.append(spec)


class Agent(NodeAgent):
    """An agent between two generations, without a driver, a daemon or processes."""

    def __init__(self, directory: Path, faults: Sequence[Xid] = ()) -> None:
        self._settings, self._storage, self._regions = settings(directory), {"tiers": []}, directory
        self._check, self._workers, self._left_behind, self._stuck = None, None, False, ()
        self._events: Any = SimpleNamespace(take_gpu_faults=lambda: tuple(faults))
        self._driver: Any = SimpleNamespace(generation=1)
        self._reports: Any = SimpleNamespace(end=lambda: None)
        self._fork_server: Any = SimpleNamespace(end_strays=lambda: None)
        self.standbys_closed = False
        self._standbys: Any = SimpleNamespace(close=lambda: setattr(self, "standbys_closed", True))
        self._devices = None
        self._worker_group: Any = SimpleNamespace(spec=SimpleNamespace(local_world_size=2))
        self._loop: Any = None
        self.sent: list[object] = []

    def end(self, *stuck: int) -> None:
        """The generation's workers are killed, and these processes do not die."""
        self._workers: Any = SimpleNamespace(stuck=stuck, close=lambda: None)
        self._stop_workers(None)  # type: ignore[arg-type]

    def go_on(self) -> None:
        self._ready(5000)

    def _take_inventory(self) -> Any:
        return None

    def _send(self, message: Any) -> None:
        self.sent.append(message)

    def _next(self, *_: Any) -> Any:
        return START, None


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    found = Checks()
    monkeypatch.setattr(agent_module, "NodeCheck", found)
    monkeypatch.setattr(agent_module, "end_workers", lambda workers, _: not workers.stuck)
    return found


@pytest.mark.parametrize("line", [BUS, ECC], ids=["bus", "memory"])
def test_a_node_is_checked_again_after_a_fault_of_its_gpus(tmp_path: Path, checks: Checks, line: str):
    faults = list(parse([line]))
    agent = Agent(tmp_path, faults)
    agent.go_on()
    assert [spec.gpu_faults for spec in checks.specs] == [tuple(faults)]
    assert agent.standbys_closed
    assert isinstance(agent.sent[-1], Ready)


def test_what_a_program_has_done_to_itself_on_a_gpu_costs_no_check(tmp_path: Path, checks: Checks):
    agent = Agent(tmp_path, list(parse([OWN])))
    agent.go_on()
    assert not checks.specs and not agent.standbys_closed
    assert isinstance(agent.sent[-1], Ready)


def test_a_node_waits_for_the_memory_of_processes_that_do_not_die_once(tmp_path: Path, checks: Checks):
    agent = Agent(tmp_path)
    agent.end()
    agent.go_on()
    assert not checks.specs
    agent.end(4242)
    agent.go_on()
    agent.go_on()
    assert [spec.stuck for spec in checks.specs] == [(4242,)]


def test_a_check_looks_at_the_gpus_faults_and_at_what_holds_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun: list[Task] = []
    nothing = SimpleNamespace(findings=(), took_s=0.0, close=lambda: None)
    monkeypatch.setattr(node_module, "Examination", lambda tasks, *_: begun.extend(tasks) or nothing)
    monkeypatch.setattr(node_check, "ports_of", lambda *_, **__: ())
    spec = node_check.spec_of(settings(tmp_path), {"tiers": []}, tmp_path, list(parse([BUS])), (4242,))
    found = NodeCheck(spec, multiprocessing.get_context("spawn")).report()
    assert [each.check for each in found.findings if each.verdict == "fail"] == ["GPU 0000:3b:00"]
    waiting = {task.names: (task.run, task.args[0]) for task in begun}
    assert waiting[gpus.MEMORY,] == (gpus.freed, (4242,))


def test_a_rank_that_fails_brings_along_what_the_driver_of_the_gpus_has_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = tmp_path / "kmsg"
    log.write_text(f"4,1,1,-;{BUS}\n")  # of the generation before
    monkeypatch.setattr(workers_module, "KernelLog", lambda **options: KernelLog(log, **options))
    process = SimpleNamespace(pid=4242, exitcode=1, sentinel=-1, join=lambda: None)
    printed = SimpleNamespace(pipe=tmp_path / "pipe", tail=lambda: "CUDA error: unknown error")
    workers = Workers(
        0,
        [{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", worker.GENERATION_VARIABLE: "1"}],
        regions=tmp_path,
        output=SimpleNamespace(open=lambda *_: printed),  # type: ignore[arg-type]
        log_file=tmp_path / "log",
        config=tmp_path / "config",
        entrypoint="toys:count",
        standbys=SimpleNamespace(start=lambda _: process),  # type: ignore[arg-type]
    )
    assert workers._finish(workers._ranks[0], 1.0).log == "CUDA error: unknown error"
    with log.open("a") as file:
        file.write(f"4,2,2,-;{BUS}\n")
    assert workers._finish(workers._ranks[0], 1.0).log == f"CUDA error: unknown error\n{BUS}"


def test_records_are_waited_for_longer_than_they_were_measured_to_take():
    # Of 2,000 collectives with 65 frames each, beside a main thread that spins: 0.06 s; five others may want the same processor.
    assert min(lastwords.WINDOW_S, lastwords.RECORD_S, workers_module.RECORDS_S) > 0.3
