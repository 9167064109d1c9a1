"""A killed worker of which the kernel does not let go: its peers have lost it, and its agent has not seen it end."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from campaigns import Campaign, wait_for
from mounts import device_on, freezable_disk, needs_root


@needs_root
@pytest.mark.parametrize("cluster", [{"nodes": 2, "procs_per_node": 1}, {"procs_per_node": 2}], ids=["two nodes", "one node"])
def test_a_worker_that_takes_long_to_end_is_blamed_for_it_and_not_its_peer(
    counting: Callable[..., Campaign], tmp_path: Path, cluster: dict[str, int]
):
    with freezable_disk(tmp_path / "disk", 16) as disk, device_on(disk) as device:
        subprocess.run(["fsfreeze", "--freeze", disk], check=True)
        run = counting("linger", steps=40, args={"device": str(device)}, cluster=cluster).start()
        wait_for(lambda: run.events("fault"), f"a fault\n{run.logs()}")
        subprocess.run(["fsfreeze", "--unfreeze", disk], check=True)
        assert run.wait() == 0, run.output + run.logs()
    (fault,) = run.events("fault")
    assert (fault["kind"], fault["detail"], fault["ranks"], fault["step"]) == ("exit", "SIGKILL", [1], 10), fault
    assert len(run.events("recovered")) == 1
