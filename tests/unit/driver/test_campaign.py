"""What a job does before its driver: what the ledger tells against what is on the durable tier."""

import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

import checkpoint
from resilient import ledger
from resilient.config import layout, load
from resilient.driver.campaign import run_campaign
from resilient.driver.display import Display
from resilient.exits import EnvironmentUnusable
from resilient.identity.resume import Known
from resilient.lineage.fork import fork


def begin(file: Path) -> Any:
    """A job of a campaign, as the command begins it."""
    config = load(file)
    resumption = Known.of(config, file, ()).resume(config, None)
    return run_campaign(
        config,
        layout(config, cpu_count=2, gpu_count=0),
        Display("none", 10, console=Console(file=io.StringIO())),
        resumption=resumption,
    )


@pytest.fixture
def durable(tmp_path: Path) -> Path:
    """Of a campaign with a checkpoint of step 20 in it."""
    (tmp_path / "run").mkdir()
    tiers = [{"name": "durable", "path": str(tmp_path / "durable")}]
    config = {"run_dir": str(tmp_path / "run"), "cluster": {"device": "cpu"}, "checkpoint": {"tiers": tiers}}
    for file in (tmp_path / "config.yaml", tmp_path / "run/config.yaml"):
        file.write_text(yaml.safe_dump(config))
    shard = checkpoint.local_shard_of("model/w", torch.zeros(10))
    checkpoint.save(tmp_path / "durable", 20, [shard], {}, generation=1, keep_last=3)
    with ledger.Ledger(tmp_path / "run") as lines:
        lines.event("run_started", {"name": "run", "target_step": 300}, generation=1)
        for step in (10, 20):
            lines.event("committed", {"step": step, "tier": "durable", "bytes": 40, "files": 1}, generation=1)
    return tmp_path / "durable"


def test_a_job_whose_ledger_tells_of_a_checkpoint_is_refused_where_the_durable_tier_is_away(tmp_path: Path, durable: Path):
    shutil.rmtree(durable)
    with pytest.raises(EnvironmentUnusable, match="goes on from step 20, and nothing of it is in"):
        begin(tmp_path / "config.yaml")
    assert not durable.exists()


def test_the_first_job_of_a_fork_is_refused_where_the_durable_tier_is_away(tmp_path: Path, durable: Path):
    new = fork(tmp_path / "run", None, tmp_path / "new", []).run_dir
    own = load(new / "config.yaml").checkpoint.tiers[-1].path
    shutil.rmtree(own)
    with pytest.raises(EnvironmentUnusable, match="goes on from step 20, and nothing of it is in"):
        begin(new / "config.yaml")
    assert not own.exists()


@pytest.mark.parametrize("name", ["storage.json.new", "config.yaml.new"])
def test_a_disk_that_is_full_is_told_with_its_place(tmp_path: Path, durable: Path, name: str):
    (durable / ".identity").write_text("0123456789ab\n")
    (tmp_path / "run" / name).symlink_to("/dev/full")
    with pytest.raises(EnvironmentUnusable, match=f"cannot write {tmp_path}/run.*: No space left on device"):
        begin(tmp_path / "config.yaml")


@pytest.mark.parametrize("name", [".identity", ".fence", ".fence.lock"])
def test_a_pipe_in_place_of_a_file_of_the_durable_tier_is_refused_and_not_waited_for(tmp_path: Path, durable: Path, name: str):
    (durable / name).unlink(missing_ok=True)
    os.mkfifo(durable / name)
    with pytest.raises(EnvironmentUnusable, match=f"{name} is a pipe, a socket or a device, where a file is expected"):
        begin(tmp_path / "config.yaml")


def test_a_run_directory_that_is_a_link_to_nothing_is_told_as_that(tmp_path: Path, durable: Path):
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").symlink_to(tmp_path / "away")
    with pytest.raises(EnvironmentUnusable, match=f"cannot write {tmp_path}/run: it is a symbolic link to .*/away, which"):
        begin(tmp_path / "config.yaml")
