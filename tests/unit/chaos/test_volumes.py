"""Volumes of an experiment: named in its config, mounted, and gone again."""

import os
import subprocess
from pathlib import Path

import pytest

from chaos.experiment import Experiment
from chaos.orchestration.volumes import Volume, filled_in, mount, paths, undoing
from resilient.exits import EnvironmentUnusable

VOLUMES = {"scratch": Volume(mib=8, inodes=200), "small": Volume(kind="tmpfs", mib=4)}


def test_a_config_gets_the_paths_of_the_volumes_that_it_names(tmp_path: Path) -> None:
    tiers = [{"name": "a", "path": "${volume.scratch}/checkpoints"}, {"name": "b", "path": "${run_dir}/${volume.other}"}]
    found = filled_in({"checkpoint": {"tiers": tiers, "every_steps": 3}}, paths(VOLUMES, tmp_path))
    first, second = found["checkpoint"]["tiers"]
    assert first == {"name": "a", "path": f"{tmp_path}/volumes/scratch/checkpoints"}
    assert second == tiers[1]
    assert found["checkpoint"]["every_steps"] == 3


def test_hosts_of_a_lab_have_no_volumes() -> None:
    campaign = {"config": {}, "volumes": {"scratch": {}}}
    with pytest.raises(ValueError, match=r"campaign\.volumes"):
        Experiment.model_validate({"name": "x", "campaign": campaign, "lab": {"hosts": 2}, "faults": [{"fault": "worker_kill"}]})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may mount")
def test_without_root_they_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusable, match=r"scratch, small.*needs root"):
        mount(VOLUMES, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: mounting a file system needs root")
def test_volumes_are_file_systems_of_the_size_that_was_asked_for_and_are_undone(tmp_path: Path) -> None:
    mount(VOLUMES, tmp_path)
    where = paths(VOLUMES, tmp_path)
    try:
        assert all(path.is_mount() for path in where.values())
        assert os.statvfs(where["small"]).f_blocks * os.statvfs(where["small"]).f_frsize == 4 << 20
        assert os.statvfs(where["scratch"]).f_files < 300
    finally:
        for _ in range(2):  # the second time there is nothing left to undo
            for command in undoing(VOLUMES, tmp_path):
                subprocess.run(command, check=False)
    assert not any(path.exists() for path in where.values())
    assert not list((tmp_path / "volumes").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: mounting a file system needs root")
def test_what_a_run_directory_of_its_own_held_is_kept_but_for_its_checkpoints(tmp_path: Path) -> None:
    volumes = {"run_dir": Volume(mib=8)}
    run_dir = paths(volumes, tmp_path)["run_dir"]
    assert run_dir == tmp_path / "run"
    mount(volumes, tmp_path)
    try:
        assert run_dir.is_mount()
        (run_dir / "events.jsonl").write_text("{}\n")
        (run_dir / "checkpoints").mkdir()
        (run_dir / "checkpoints" / "large").write_bytes(bytes(100))
    finally:
        for _ in range(2):
            for command in undoing(volumes, tmp_path):
                subprocess.run(command, check=False)
    assert not run_dir.is_mount()
    assert [path.name for path in run_dir.iterdir()] == ["events.jsonl"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
