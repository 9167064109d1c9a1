"""The config.yaml of a run directory: written by this runtime, and never over one that somebody else has written."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from resilient import worker
from resilient.config import ConfigError, load, write
from resilient.run_dir_config import must_not_be_foreign

ROOT = Path(__file__).parents[3]
MINE = "name: mine\ncluster: {procs_per_node: 1}\nentrypoint: toy.py 2\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory of a user's, with a script and a config that he has written."""
    made = tmp_path / "p"
    made.mkdir()
    made.chmod(0o755)
    (made / "toy.py").write_text("raise SystemExit(3)\n")
    (made / "config.yaml").write_text(MINE)
    return made


def resilient(place: Path, *words: str) -> tuple[int, str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(
        [sys.executable, "-m", "resilient", *words],
        check=False,
        cwd=place,
        env=environ,
        text=True,
        capture_output=True,
        timeout=120,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "words", [("run", "config.yaml", "run_dir=."), ("run", "--run-dir", ".", "toy.py"), ("submit", "config.yaml", "run_dir=.")]
)
def test_a_config_that_somebody_has_written_is_never_written_over(place: Path, words: tuple[str, ...]):
    code, told = resilient(place, *words)
    assert (code, told.count("\n")) == (78, 1), told
    assert f"command line: run_dir: {place / 'config.yaml'} is not of a run directory" in told
    assert "name another run_dir" in told
    assert (place / "config.yaml").read_text() == MINE
    assert sorted(path.name for path in place.iterdir()) == ["config.yaml", "toy.py"]
    assert stat.S_IMODE(place.stat().st_mode) == 0o755


def test_an_empty_run_directory_is_a_variable_that_is_not_set(place: Path):
    code, told = resilient(place, "run", "--run-dir", "", "toy.py")
    assert code == 2 and "--run-dir" in told and "is empty" in told
    for given in ('run_dir=""', "run_dir="):
        with pytest.raises(ConfigError, match=r"command line: run_dir"):
            load(place / "config.yaml", [given])
    assert (place / "config.yaml").read_text() == MINE


def test_the_trainer_without_a_supervisor_refuses_it_too(place: Path):
    config = load(place / "config.yaml", [f"run_dir={place}"])
    with pytest.raises(ConfigError, match="is not of a run directory"):
        worker.record_config(config)
    assert (place / "config.yaml").read_text() == MINE


def test_without_a_supervisor_a_start_that_came_to_nothing_is_started_again(place: Path, tmp_path: Path):
    config = load(place / "config.yaml", [f"run_dir={tmp_path / 'run'}"])
    worker.record_config(config)
    worker.record_config(config)
    assert load(tmp_path / "run/config.yaml") == config


@pytest.mark.parametrize("name", ["identity.json", "events.jsonl", "events.jsonl.1"])
def test_a_run_directory_of_an_earlier_version_has_no_mark_in_its_config(place: Path, name: str):
    (place / name).write_text("")
    must_not_be_foreign(place)


def test_a_copy_of_a_run_directorys_config_is_the_users(place: Path, tmp_path: Path):
    run = tmp_path / "run"
    worker.record_config(load(place / "config.yaml", [f"run_dir={run}"]))
    shutil.copy(run / "config.yaml", place / "config.yaml")
    with pytest.raises(ConfigError, match="is not of a run directory"):
        must_not_be_foreign(place)
    (tmp_path / "link").symlink_to(run)
    must_not_be_foreign(tmp_path / "link")


@pytest.mark.parametrize("kind", ["fifo", "directory", "link"])
def test_what_is_no_regular_file_is_neither_read_nor_replaced(place: Path, tmp_path: Path, kind: str):
    path = tmp_path / "run/config.yaml"
    path.parent.mkdir()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(place / "config.yaml")
    with pytest.raises(ConfigError, match="is not of a run directory"):
        must_not_be_foreign(path.parent)


def test_a_first_start_that_died_once_the_config_was_written_goes_on(place: Path, tmp_path: Path):
    config = load(place / "config.yaml", [f"run_dir={tmp_path / 'run'}"])
    config.run_dir.mkdir()
    must_not_be_foreign(config.run_dir)
    write(config, config.run_dir / "config.yaml")
    must_not_be_foreign(config.run_dir)
