"""Ranks of a node of which devices are left out: what they are told, and what is checked."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from resilient.agent import node_check
from resilient.agent.bootstrap import WorkerSpec
from resilient.agent.environment import environment_of
from resilient.agent.forkserver import ForkServer
from resilient.agent.inspection import state_of
from resilient.agent.settings import AgentSettings
from resilient.agent.standby import Role, Standbys
from resilient.health import compute
from resilient.health.node import compute_tasks
from resilient.protocol.messages import Start
from resilient.recovery.xids import parse
from resilient.visible_gpus import VARIABLE

WHOLE = Start(2, 1, 2, "n0", 1, 1.0, 1.0, 1.0, world_size=8, first_rank=4, devices=(0, 1, 2, 3))
LESS = Start(2, 1, 2, "n0", 1, 1.0, 1.0, 1.0, world_size=7, first_rank=4, devices=(0, 2, 3))
GPUS = ("0000:1b:00.0", "0000:3b:00.0", "0000:86:00.0", "0000:af:00.0")
BUS = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def settings(directory: Path) -> AgentSettings:
    return AgentSettings(1, 4, directory, "x", "a:b", 30.0, 5.0, 8, "cuda", "n:1", "t.1", "127.0.0.1", gpus=GPUS)


def told(start: Start, local_rank: int, of: AgentSettings) -> dict[str, str]:
    where: dict[str, Any] = {"session": Path("s"), "interface": None, "store_prefix": "p", "log_dir": Path("l")}
    return environment_of(start, local_rank, of, **where)


@pytest.mark.parametrize("visible", ["0,1,2,3", "4,5,6,7", "GPU-a,GPU-b,GPU-c,GPU-d"])
def test_a_device_that_is_left_out_is_hidden_and_ranks_count_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    names = visible.split(",")
    last = told(LESS, 2, settings(tmp_path))
    assert [last[name] for name in NAMES] == ["6", "2", "7", "3", "1"]
    assert last["CUDA_VISIBLE_DEVICES"] == ",".join([names[0], names[2], names[3]])
    assert "CUDA_VISIBLE_DEVICES" not in told(WHOLE, 2, settings(tmp_path))
    assert "CUDA_VISIBLE_DEVICES" not in told(LESS, 2, replace(settings(tmp_path), device="cpu"))


def test_what_is_checked_after_a_fault_are_the_devices_that_still_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node_check, "ports_of", lambda *_, **__: ())
    spec = node_check.spec_of(settings(tmp_path), {"tiers": []}, tmp_path, list(parse([BUS])), (), WHOLE.devices)
    assert (spec.devices, spec.gpus) == ((0, 2, 3), GPUS)
    assert node_check.spec_of(settings(tmp_path), {"tiers": []}, tmp_path, (), (), LESS.devices).devices == (0, 2, 3)
    assert node_check.spec_of(settings(tmp_path), {"tiers": []}, tmp_path).devices == (0, 1, 2, 3)


def test_the_check_computes_on_the_gpus_that_the_ranks_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node_check, "ports_of", lambda *_, **__: ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    whole = node_check.spec_of(settings(tmp_path), {"tiers": []}, tmp_path)
    less = node_check.spec_of(settings(tmp_path), {"tiers": []}, tmp_path, list(parse([BUS])), (), WHOLE.devices)
    assert (whole.visible, less.visible) == (None, told(LESS, 0, settings(tmp_path))["CUDA_VISIBLE_DEVICES"])
    one = torch.ones(1, 1)
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(compute, "_matrices", lambda size, device, dtype: asked.append((os.environ[VARIABLE], device)) or [one] * 3)
    monkeypatch.setattr(compute, "_difference", lambda *_: "")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    (*_, last) = compute_tasks(3, "cuda", tmp_path / "store", 30.0, devices=less.devices, visible=less.visible)
    finding = next(iter(last.run(*last.args)))
    assert asked[0] == ("4,6,7", "cuda:2")
    assert (finding.check, finding.verdict) == ("matmul 3", "ok") and last.names == ("matmul 3", "all-reduce 3")


MODULE = """
import os
from pathlib import Path


def warm_up(config, rank, world_size):
    seen = [os.environ[name] for name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES")]
    Path(__file__).with_name(f"warm-{os.getpid()}").write_text(" ".join([str(rank), str(world_size), *seen]))


def main(config):
    print(os.getpid())
"""
PATIENCE_S = 120.0


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An entry point that a fork server which is started after this finds."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    path = tmp_path / "entry_on_devices.py"
    path.write_text(MODULE)
    (tmp_path / "config.yaml").write_text("name: gpt\n")
    return path


@pytest.fixture
def standbys(module: Path, fork_server: ForkServer) -> Iterator[Standbys]:
    with closing(Standbys(module.with_name("config.yaml"), f"{module.stem}:main", fork_server, left_behind=lambda _: None)) as made:
        yield made


def warm(standbys: Standbys, role: Role) -> int:
    """The process id of a standby that has done its work."""
    standbys.fork(role)
    waiting, deadline = standbys._waiting[role.rank], time.monotonic() + PATIENCE_S
    while not waiting.ready:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return waiting.process.pid or 0


def test_a_standby_is_warmed_up_on_the_device_of_its_rank_among_those_that_work(standbys: Standbys, module: Path, tmp_path: Path):
    elsewhere = structs.replace(LESS, first_rank=3)  # the node before this one has a device less, too
    for start, local_rank, words in ((LESS, 1, "5 7 1 0,2,3"), (elsewhere, 0, "3 7 0 0,2,3"), (WHOLE, 3, "7 8 3 0,1,2,3")):
        pid = warm(standbys, Role.of(told(start, local_rank, settings(tmp_path))))
        assert module.with_name(f"warm-{pid}").read_text() == words


@pytest.mark.parametrize(
    "then", [structs.replace(LESS, devices=(0, 1, 3)), structs.replace(LESS, first_rank=3)], ids=["another device", "moved"]
)
def test_a_standby_on_other_devices_than_its_rank_has_now_becomes_no_rank(standbys: Standbys, tmp_path: Path, then: Start):
    role, now = Role.of(told(LESS, 1, settings(tmp_path))), told(then, 5 - then.first_rank, settings(tmp_path))
    pids = [warm(standbys, role)]
    assert (role.rank, role.world_size) == (5, 7) == (Role.of(now).rank, Role.of(now).world_size)
    assert standbys.missing([role]) is None
    assert standbys.missing([Role.of(now)]) == Role.of(now)
    pids.append(warm(standbys, role))
    where = [tmp_path / name for name in ("output", "stacks", "record", "config.yaml")]
    where[0].touch()
    process = standbys.start(WorkerSpec({**now, "OMP_NUM_THREADS": "1"}, *where, standbys._entrypoint))
    process.join(PATIENCE_S)
    assert process.exitcode == 0, where[0].read_text()
    assert int(where[0].read_text()) not in pids
    assert all(state_of(pid) in ("", "Z") for pid in pids)
