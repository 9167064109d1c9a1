"""Ranks of a node of which devices are left out: what they are told, and what is checked."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resilient.agent import node_check
from resilient.agent.environment import environment_of
from resilient.agent.settings import AgentSettings
from resilient.protocol.messages import Start
from resilient.recovery.xids import parse

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
