"""Scripts of one rank on a GPU: after kills their losses are those of a run that nothing disturbed, to the last bit."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from campaigns import ROOT, Campaign

HERE = Path(__file__).parent
STEPS, KILLED = 120, "23,57,58"
SAME = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # products give the same bits every time
WAYS = ["ddp", "fsdp2", "fp16", "compiled", "graph", "generator", "average"]


def losses(text: str) -> dict[str, str]:
    return dict(re.findall(r"step (\d+) loss (\S+)", text))


@pytest.mark.parametrize("way", WAYS)
def test_a_script_that_is_killed_on_a_gpu_has_the_losses_of_one_that_is_not(
    campaign: Callable[..., Campaign], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
):
    for name, value in SAME.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, str(HERE / "cuda_script.py"), way, str(STEPS)]
    calm = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    run = campaign(entrypoint=f"{HERE / 'cuda_script.py'} {way} {STEPS} {KILLED}", cluster={"procs_per_node": 1})
    assert run.run() == 0, run.output + run.logs()
    assert [fault["kind"] for fault in run.events("fault")] == ["exit"] * 3
    expected = losses(calm.stdout)
    assert len(expected) == STEPS
    assert losses(run.logs_of_rank(0)) == expected


def test_a_kernel_that_reaches_outside_its_memory_costs_a_restart_and_no_check(campaign: Callable[..., Campaign], tmp_path: Path):
    script = f"{HERE / 'out_of_bounds.py'} {tmp_path / 'done'}"
    run = campaign(entrypoint=script, cluster={"procs_per_node": 1}, resilience={"health_check": True})
    assert run.run() == 0, run.output + run.logs()
    (fault,) = run.events("fault")
    assert fault["kind"] == "exception" and "a kernel reached outside its memory" in fault["detail"], fault
    assert all(event["took_s"] == 0.0 for event in run.events("health") if event["generation"] > 0), "no check"
