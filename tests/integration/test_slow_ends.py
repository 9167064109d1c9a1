"""A killed worker of which the kernel does not let go: its peers have lost it, and its agent has not seen it end."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from campaigns import Campaign, wait_for
from mounts import device_on, freezable_disk, needs_root
from soak import soaked_after


@needs_root
@pytest.mark.parametrize(
    "cluster",
    soaked_after(1, [{"nodes": 2, "procs_per_node": 1}, {"procs_per_node": 2}, {"procs_per_node": 1}]),
    ids=["two nodes", "one node", "no peer that fails"],
)
def test_a_worker_that_takes_long_to_end_is_blamed_for_it_and_waited_for(
    counting: Callable[..., Campaign], tmp_path: Path, cluster: dict[str, int]
):
    last = cluster.get("nodes", 1) * cluster["procs_per_node"] - 1
    with freezable_disk(tmp_path / "disk", 16) as disk, device_on(disk) as device:
        subprocess.run(["fsfreeze", "--freeze", disk], check=True)
        soon = {"hang_floor_s": 2.0}
        run = counting("linger", steps=40, args={"device": str(device)}, cluster=cluster, resilience=soon).start()
        wait_for(lambda: run.events("fault"), f"a fault\n{run.logs()}")
        time.sleep(0.5)  # in which ranks would have begun anew
        thawed_t = time.time()
        subprocess.run(["fsfreeze", "--unfreeze", disk], check=True)
        assert run.wait() == 0, run.output + run.logs()
    (fault,) = run.events("fault")
    assert (fault["kind"], fault["detail"], fault["ranks"], fault["step"]) == ("exit", "SIGKILL", [last], 10), fault
    assert len(run.events("recovered")) == 1
    assert run.events("generation_started")[-1]["t"] > thawed_t, "the memory of a GPU would not be free yet"
