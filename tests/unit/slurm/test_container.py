"""Command lines that run in a container, checked by a program in the place of apptainer that takes what it documents."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilient.config import Config
from resilient.exits import EnvironmentUnusable
from resilient.slurm.container import on_node, outside, runtime_of
from resilient.slurm.script import script

STAND_IN = (Path(__file__).parents[2] / "fake_apptainer.py").read_text()


def install(directory: Path, *names: str) -> None:
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).write_text(f"#!{sys.executable} -S\n{STAND_IN}")
        (directory / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for runtimes on a PATH that has none."""
    (tmp_path / "calls").mkdir()
    (tmp_path / "image.sif").touch()
    monkeypatch.setenv("CONTAINER_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    for name in ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "RESILIENT_CONTAINER_RUNTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "bin"


def config(tmp_path: Path, *, environment: dict[str, str] | None = None, **container: Any) -> Config:
    run_dir = tmp_path / "run"
    run_dir.mkdir(exist_ok=True)
    tiers = [{"name": "nvme", "path": str(tmp_path / "disks/a b")}, {"name": "durable", "path": str(run_dir / "checkpoints")}]
    slurm = {"container": {"image": str(tmp_path / "image.sif"), **container}, "environment": environment or {}}
    return Config.model_validate({"run_dir": str(run_dir), "checkpoint": {"tiers": tiers}, "slurm": slurm})


def on(config: Config, command: list[str], *, runtime: str = "apptainer", gpus: bool = False) -> list[str]:
    container = config.slurm.container
    assert container is not None
    return on_node(config, container, command, directory=Path.cwd(), runtime=runtime, gpus=gpus)


def calls(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (tmp_path / "calls").glob("*.json")]


def test_an_agent_runs_inside_with_all_that_it_needs_bound_and_its_tiers_made(tmp_path: Path, programs: Path):
    install(programs, "apptainer")
    wanted = config(tmp_path, python=sys.executable, binds=["/usr:/data:ro"])
    line = on(wanted, ["/nowhere/python", "-c", "import os; print(os.environ['PMIX_SECURITY_MODE'], os.getcwd(), 'a b')"])
    said = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    assert said == f"native {tmp_path} a b\n"
    (call,) = calls(tmp_path)
    # The rest lies below the directory in which it runs.
    assert (call["--bind"], call["--pwd"]) == (["/dev/shm", str(tmp_path), "/usr:/data:ro"], [str(tmp_path)])
    assert (tmp_path / "disks/a b").is_dir()
    assert (call["image"], call["--nv"]) == (str(tmp_path / "image.sif"), [])


def test_what_lies_elsewhere_is_bound_by_itself(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch):
    install(programs, "singularity")
    wanted = config(tmp_path, python="true", environment={"PMIX_SECURITY_MODE": "munge"})
    monkeypatch.chdir("/")
    subprocess.run(on(wanted, ["python"], runtime="singularity"), check=True)
    (call,) = calls(tmp_path)
    assert call["--bind"] == ["/dev/shm", str(tmp_path / "run"), str(tmp_path / "disks/a b")]
    assert call["--env"] == ["PMIX_SECURITY_MODE=munge"]
    assert call["program"] == "singularity"


@pytest.mark.parametrize(
    ("nv", "gpus", "there"), [("auto", True, True), ("auto", False, False), (True, False, True), (False, True, False)]
)
def test_gpus_are_inside_where_there_are_any_unless_told_otherwise(tmp_path: Path, programs: Path, nv, gpus, there):
    install(programs, "apptainer")
    subprocess.run(on(config(tmp_path, python="true", nv=nv), ["python"], gpus=gpus), check=True)
    assert calls(tmp_path)[0]["--nv"] == [""] * there


@pytest.mark.parametrize(("runtime", "found"), [("auto", "apptainer"), ("singularity", "singularity")])
def test_the_driver_of_a_job_takes_the_shells_place_inside(tmp_path: Path, programs: Path, runtime: str, found: str):
    install(programs, "apptainer", "singularity")
    told, program = tmp_path / "told", tmp_path / "py"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" $$ "$MODULE" "$RESILIENT_CONTAINER_RUNTIME" "$@" > {told}\nexit 75\n')
    program.chmod(0o755)
    wanted = config(tmp_path, driver=True, python=str(program), runtime=runtime)
    wanted = wanted.model_copy(update={"slurm": wanted.slurm.model_copy(update={"setup": ["export MODULE=loaded"]})})
    path = tmp_path / "job.sh"
    path.write_text(script(wanted, tmp_path / "run", arguments=["c.yaml", "args.a=b c"], python="/nowhere", directory=tmp_path))
    process = subprocess.Popen(["bash", str(path)])
    assert process.wait() == 75
    words = [str(process.pid), "loaded", str(programs / found), "-m", "resilient", "run", "c.yaml", "args.a=b c"]
    assert told.read_text().splitlines() == words
    assert calls(tmp_path)[0]["--env"] == ["PMIX_SECURITY_MODE=native"]


def test_a_job_without_a_runtime_ends_as_unusable(tmp_path: Path, programs: Path):
    path = tmp_path / "job.sh"
    path.write_text(script(config(tmp_path, driver=True), tmp_path / "run", arguments=["c"], python="p", directory=tmp_path))
    ended = subprocess.run(["bash", str(path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 69
    assert "no apptainer and no singularity on the PATH" in ended.stderr


def test_the_driver_stays_outside_unless_told_otherwise(tmp_path: Path):
    text = script(config(tmp_path), tmp_path / "run", arguments=["c"], python="/v/python", directory=tmp_path)
    assert text.endswith("exec /v/python -m resilient run c\n")


def test_the_runtime_is_the_one_that_is_there(tmp_path: Path, programs: Path):
    box = config(tmp_path).slurm.container
    assert box is not None
    with pytest.raises(EnvironmentUnusable, match="no apptainer and no singularity"):
        runtime_of(box, os.environ)
    install(programs, "singularity")
    assert runtime_of(box, os.environ) == str(programs / "singularity")
    install(programs, "apptainer")
    assert runtime_of(box, os.environ) == str(programs / "apptainer")
    assert runtime_of(box, {"RESILIENT_CONTAINER_RUNTIME": "/opt/apptainer", "APPTAINER_CONTAINER": "x"}) == "/opt/apptainer"
    (tmp_path / "image.sif").unlink()
    with pytest.raises(EnvironmentUnusable, match=r"slurm.container.image: there is no .*image.sif"):
        runtime_of(box, os.environ)


def test_what_one_container_says_of_itself_is_no_order_to_the_next():
    inside = {"APPTAINER_CONTAINER": "/a.sif", "APPTAINER_BIND": "/a", "APPTAINER_CACHEDIR": "/c", "PATH": "/bin"}
    assert outside(inside) == {"APPTAINER_CACHEDIR": "/c", "PATH": "/bin"}
    assert outside({"APPTAINER_BIND": "/mine"}) == {"APPTAINER_BIND": "/mine"}
