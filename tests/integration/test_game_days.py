"""The experiments that are shipped, on one machine: each to its verdict."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import looked_at
from reported import agreed

from experiments import Chaos, commands

pytestmark = [pytest.mark.timeout(1500), pytest.mark.soak]


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Chaos]:
    yield from commands(tmp_path)


@pytest.mark.parametrize("name", ["quick", "one-gpu", "preemption", "node-loss", "your-script", "storage"])
def test_it_ends_well(chaos: Chaos, tmp_path: Path, name: str):
    if name == "storage" and os.geteuid() != 0:
        pytest.skip("NOT TESTED HERE: mounts file systems, which takes root")
    assert chaos.run(name) == 0, chaos.printed + chaos.said()
    assert chaos.verdict()["ok"]
    assert not chaos.all_of_it()
    agreed(chaos.out / "run", chaos.out / "report.html")
    looked_at(chaos.out / "report.html", chaos.out / "verdict.html", profile=tmp_path / "browser")
