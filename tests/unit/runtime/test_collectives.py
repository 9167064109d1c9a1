"""Collectives as signs of life: real groups, in one process."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from resilient.heartbeat.agent_side import AgentRegion
from resilient.heartbeat.layout import PHASES
from resilient.heartbeat.worker_side import WorkerRegion
from resilient.script import collectives
from resilient.script.collectives import REGULAR, REGULAR_S, Collectives, numbered


@pytest.fixture
def region(tmp_path: Path) -> Iterator[tuple[AgentRegion, WorkerRegion]]:
    agent = AgentRegion(tmp_path / "region")
    yield agent, WorkerRegion(tmp_path / "region")
    agent.close()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_collectives_of_all_groups_are_numbered(group: None):
    before = numbered()
    dist.all_reduce(torch.ones(1))
    assert numbered() == before + 1
    dist.barrier(dist.new_group([0]))
    assert numbered() > before + 1


def test_a_process_without_groups_has_none():
    assert numbered() == 0


@pytest.mark.parametrize(
    ("looks", "apart_s", "told"),
    [
        (REGULAR - 1, REGULAR_S, False),
        (REGULAR, REGULAR_S / (REGULAR - 0.5), False),
        (REGULAR, REGULAR_S / (REGULAR - 1.5), True),
    ],
    ids=["too few", "too soon", "regular"],
)
def test_they_are_told_once_they_are_regular(
    region: tuple[AgentRegion, WorkerRegion], group: None, looks: int, apart_s: float, told: bool
):
    agent, worker = region
    seen = Collectives(worker, numbered)
    for look in range(looks):
        dist.all_reduce(torch.ones(1))
        seen.look(look * apart_s)
    assert agent.activity().observed == (agent.activity().phase_t > 0) == told
    first_t = agent.activity().phase_t
    seen.look(looks * apart_s)
    assert agent.activity().phase_t == first_t  # there was none since
    assert agent.activity().step == -1


def test_the_time_in_a_loader_stays_what_it_is(region: tuple[AgentRegion, WorkerRegion]):
    agent, worker = region
    worker.enter(PHASES.index("data"))
    before = agent.activity()
    worker.touch()
    assert agent.activity() == before


def test_they_are_looked_at_only_as_long_as_nothing_else_is_seen(
    region: tuple[AgentRegion, WorkerRegion], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(collectives, "LOOK_S", 0.01)
    needed = threading.Event()
    needed.set()
    collectives.watch(region[1], needed.is_set)
    (thread,) = (each for each in threading.enumerate() if each.name == "collectives")
    assert thread.daemon
    needed.clear()
    thread.join(120)
    assert not thread.is_alive()
