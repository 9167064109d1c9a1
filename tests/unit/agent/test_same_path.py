"""Two campaigns whose run directories have one path on a machine, as in two containers, or where the first one was moved away."""

import os
import shutil
from pathlib import Path

from resilient import storage
from resilient.agent import memory
from resilient.config import Config
from resilient.heartbeat.agent_side import AgentRegion
from resilient.heartbeat.worker_side import WorkerRegion
from resilient.processes import local_pids


def begun(tmp_path: Path) -> Path:
    """The run directory of a campaign that begins, at the path that every one has here."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    checkpoint = {"tiers": [{"name": "durable", "path": str(run_dir / "checkpoints")}]}
    config = Config.model_validate({"run_dir": str(run_dir), "checkpoint": checkpoint})
    storage.write(run_dir, storage.storage_of(config, 1))
    return run_dir


def test_what_nodes_have_in_ram_of_two_campaigns_at_one_path_is_kept_apart(tmp_path: Path) -> None:
    first = begun(tmp_path)
    regions = memory.region_directory(first, 0)
    memory.salvaged(regions)
    daemon = memory.daemon_directory(first, 0)
    daemon.mkdir(mode=0o700)
    page = AgentRegion(regions / memory.region_name(1, 0))
    rank = WorkerRegion(page.path)
    moved = first.rename(tmp_path / "old")
    second = begun(tmp_path)
    others = memory.region_directory(second, 0)
    try:
        assert others != regions
        assert memory.daemon_directory(second, 0) != daemon
        memory.salvaged(others)
        assert memory.region_directory(second, 0) == others and memory.directories(second) == [others]
        assert page.path.exists(), "the rank that has mapped it still reports there"
        assert memory.region_directories(first, storage.nonce_of(storage.read(moved))) == [regions]
        assert local_pids(moved, str(first)) == {"rank 0": os.getpid()} and local_pids(second, None) == {}
    finally:
        rank.close()
        page.close()
        for path in (regions, daemon, others):
            shutil.rmtree(path, ignore_errors=True)
