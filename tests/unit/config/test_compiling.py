"""`train.compile: auto`: what it comes to by device, layout and compiler, and that a run directory keeps it."""

import subprocess
import sys
from pathlib import Path

import pytest

from resilient import compiling
from resilient.compiling import choose, settled
from resilient.config import Config, load, write
from resilient.decided import decided
from resilient.plan import training


def config(run_dir: Path, **sections: object) -> Config:
    return Config.model_validate({"run_dir": str(run_dir), **sections})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This machine has two, and a compiler."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(compiling, "_builds", lambda: True)
    return monkeypatch


ON_GPUS = [
    ({}, True, "GPUs"),
    ({"pp": 2}, True, "GPUs"),
    ({"pp": 2, "schedule": "zero_bubble"}, False, "zero_bubble"),
    ({"schedule": "zero_bubble"}, True, "GPUs"),  # without a pipeline there is no schedule
    ({"tp": 2}, False, "wrong gradients"),
    ({"cp": 2}, False, "context parallelism"),
]


@pytest.mark.parametrize(("parallel", "compiled", "why"), ON_GPUS)
def test_layers_are_compiled_on_gpus_where_the_layout_allows_it(
    tmp_path: Path, parallel: dict[str, object], compiled: bool, why: str
):
    given = config(tmp_path, parallel=parallel)
    found = choose(given, gpus=2, builds=True)
    assert found.compile is compiled
    assert why in found.why
    assert not choose(given, gpus=0, builds=True).compile
    assert not choose(given, gpus=2, builds=False).compile


def test_the_machine_decides_unless_ranks_compute_on_the_cpu(tmp_path: Path, gpus: pytest.MonkeyPatch):
    assert settled(config(tmp_path))[0].train.compile is True
    assert settled(config(tmp_path, cluster={"device": "cpu"}))[0].train.compile is False
    gpus.setenv("CUDA_VISIBLE_DEVICES", "")
    assert settled(config(tmp_path))[0].train.compile is False


@pytest.mark.parametrize("named", [True, False])
def test_a_value_that_is_named_is_left_alone(tmp_path: Path, gpus: pytest.MonkeyPatch, named: bool):
    wanted = config(tmp_path, train={"compile": named})
    assert settled(wanted) == (wanted, None)


def test_a_run_keeps_its_value_on_another_machine_unless_the_new_layout_forbids_it(tmp_path: Path, gpus: pytest.MonkeyPatch):
    write(decided(config(tmp_path))[0], tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml").train.compile is True
    gpus.setenv("CUDA_VISIBLE_DEVICES", "")
    again, choice = settled(config(tmp_path))
    assert again.train.compile is True
    assert choice is not None
    assert choice.why == "kept from the run directory"
    assert settled(config(tmp_path, parallel={"tp": 2}))[0].train.compile is False


def test_a_c_compiler_and_its_headers_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda _name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "")
    assert not compiling._builds()
    compiler = tmp_path / "clang"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert not compiling._builds(), "no Python.h"
    (tmp_path / "Python.h").touch()
    assert compiling._builds()


def test_the_plan_says_what_it_came_to_and_why(tmp_path: Path, gpus: pytest.MonkeyPatch):
    found, decisions = decided(config(tmp_path))
    assert decisions["train.compile"].value == "true"
    assert training(found, decisions, [])["compiled"] == "yes here: ranks compute on GPUs"
    assert training(config(tmp_path, train={"compile": False}), {}, [])["compiled"] == "no"


def test_it_is_decided_without_torch():
    code = "import sys, resilient.decided as d, resilient.config as c; d.decided(c.Config()); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
