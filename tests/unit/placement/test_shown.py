"""What `plan`, `doctor` and an agent make of a binding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from machines import juwels_booster

from resilient.config import Config, layout
from resilient.health.doctor import judge_binding
from resilient.placement.applied import of_this_node
from resilient.placement.binding import Binding, Place, Share
from resilient.plan import runtime_layout


def test_the_doctor_shows_where_ranks_run_and_warns_of_those_that_run_anywhere(tmp_path: Path):
    machine = juwels_booster(tmp_path)

    def found(names: str) -> Binding:
        share, environ = Share(0, 2, 2), {"CUDA_VISIBLE_DEVICES": names}
        return of_this_node("auto", "cuda", share, environ, sys=machine.sys, proc=machine.proc, allowed=machine.cpus)

    good = judge_binding(found("0,1"))
    assert good.verdict == "ok"
    assert good.text.startswith(
        "rank 0: cores 18-23,66-71, memory of domain 3; rank 1: cores 6-11,54-59, memory of domain 1; agent"
    )
    half = judge_binding(found("0,MIG-1"))
    assert half.verdict == "warn"
    assert "rank 1: anywhere" in half.text
    assert "1 of 2 GPUs is not known" in half.text
    assert judge_binding(found("MIG-1,MIG-2")).verdict == "skip"


def test_the_plan_shows_the_binding_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    config = Config.model_validate({"cluster": {"binding": "numa", "device": "cpu", "nodes": 2}})
    rows = runtime_layout(config, layout(config, cpu_count=4, gpu_count=0))
    assert rows["binding"] == f"{of_this_node('numa', 'cpu', Share(0, 1, 2))} (of this machine)"
    assert "rank 0: cores" in str(rows["binding"]), "this machine tells its domains"


LEFT = """
import os, sys
from resilient.placement.applied import leave_to_ranks
from resilient.placement.binding import Binding, Place
from resilient.placement.topology import cpus_in
leave_to_ranks(Binding((Place(cpus_in(sys.argv[1]), None),), cpus_in(sys.argv[2])))
print(",".join(map(str, sorted(os.sched_getaffinity(0)))))
"""


def test_an_agent_runs_on_what_ranks_leave_and_anywhere_where_that_cannot_be():
    mine = sorted(os.sched_getaffinity(0))
    for left, expected in ((str(mine[-1]), mine[-1:]), ("99999", mine), ("", mine)):
        done = subprocess.run([sys.executable, "-c", LEFT, str(mine[0]), left], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == ",".join(map(str, expected))
        assert ("cannot be bound" in done.stderr) == (left == "99999")


WITHIN = """
import os, sys
from resilient.placement.applied import of_this_node
from resilient.placement.binding import Share
os.sched_setaffinity(0, {int(sys.argv[1])})
print(*(place and sorted(place.cpus) for place in of_this_node("numa", "cpu", Share(0, 2, 2)).ranks))
"""


def test_on_this_machine_a_cpuset_is_kept_to():
    cpu = max(os.sched_getaffinity(0))
    done = subprocess.run([sys.executable, "-c", WITHIN, str(cpu)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"None [{cpu}]", "two ranks cannot share a core"


def test_a_binding_in_words():
    assert str(Binding((None,))) == "anywhere"
    assert str(Binding((Place(frozenset([0, 1, 4]), None),))) == "rank 0: cores 0-1,4"
