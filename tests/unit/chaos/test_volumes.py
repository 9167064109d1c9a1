"""Volumes of an experiment: named in its config, mounted, and gone again."""

import os
import subprocess
from pathlib import Path

import pytest

from chaos.experiment import Experiment
from chaos.staging.volumes import Volume, filled_in, mount, paths, undoing
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
