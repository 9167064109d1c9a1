"""Experiments on hosts of the lab: to their verdict, and killed on the way."""

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import beside_module, wait_for

from chaos.judging import machine
from chaos.lab.host import namespaces

pytestmark = pytest.mark.timeout(1500)
experiments = beside_module("experiments")


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Any]:
    yield from experiments.commands(tmp_path)


def test_links_that_fail_end_well(chaos: Any):
    assert chaos.run("links") == 0, chaos.printed + chaos.said()
    assert chaos.verdict()["ok"]
    assert not chaos.all_of_it()


def test_a_command_that_is_killed_at_any_moment_leaves_no_host_and_no_rule(chaos: Any, rounds: int):
    before = machine.look([chaos.directory])
    for number in range(rounds):
        chaos.out = chaos.directory / f"out{number}"
        chaos.start("links", "--seed", str(number))
        moment_s = random.Random(number).uniform(0.5, 40.0)
        with pytest.raises(subprocess.TimeoutExpired):
            chaos.process.wait(moment_s)
        labs = [name for name in namespaces() if f"chaos{chaos.process.pid}" in name]
        chaos.process.kill()
        chaos.process.wait()
        wait_for(lambda: not chaos.all_of_it(), f"left after {moment_s:.2f} s (round {number}): {chaos.all_of_it()}", 90.0)
        assert labs or moment_s < 10
        assert not [name for name in namespaces() if name in labs]
        assert not machine.changes(before, machine.look([chaos.directory]))
