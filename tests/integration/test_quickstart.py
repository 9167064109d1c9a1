"""The quickstart as the README has it, from nothing to a trained model."""

import contextlib
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from campaigns import ROOT, Campaign, wait_for

QUICKSTART = ROOT / "examples/quickstart.yaml"


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had in use, as the kernel says."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with what the README's first command installs, a copy and not an editable one, in `.venv`.

    What the project depends on is that of the environment of the tests.
    """
    clone, environment = tmp_path / "clone", tmp_path / "clone/.venv"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "*.egg-info"))
    venv.create(environment)
    (site_packages,) = environment.glob("lib/*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin/python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-build-isolation", "."], cwd=clone, check=True)
    return clone


def test_the_first_command_of_the_readme_works_as_a_person_runs_it(checkout: Path):
    (block,) = re.findall(r"<!-- quickstart -->\n```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    command = shlex.split(block.rpartition("&&")[2])
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    shorter = ["train.steps=3", "train.eval_interval=3", "train.eval_iters=1", "data.tokenizer.vocab_size=300", "model.layers=1"]
    ran = subprocess.run([*command, *shorter], cwd=checkout, env=environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "validation loss" in ran.stdout
    assert (checkout / "runs/quickstart/checkpoints").is_dir()
    where = [checkout / ".venv/bin/python", "-c", "import resilient; print(resilient.__file__)"]
    found = subprocess.run(where, cwd=checkout.parent, env=environ, capture_output=True, text=True, check=True).stdout
    assert Path(found).is_relative_to(checkout / ".venv"), "a copy is installed, and no checkout is used"


@pytest.mark.soak
def test_the_quickstart_learns_two_nats_within_its_memory(campaign: Callable[..., Campaign]):
    config = yaml.safe_load(QUICKSTART.read_text())
    del config["run_dir"]
    run = campaign(**config).start()
    peaks: dict[int, int] = {}

    def ended() -> bool:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, StopIteration):
            for rank, pid in run.workers().items():
                peaks[rank] = max(peaks.get(rank, 0), peak_bytes(pid))
        assert run.process is not None
        return run.process.poll() is not None

    wait_for(ended, "the end of the quickstart", 900.0)
    assert run.wait() == 0, run.output + run.logs()
    losses = [event["val_loss"] for event in run.events("validation")]
    assert losses[0] - losses[-1] >= 2.0
    assert len(run.metrics()) == config["train"]["steps"]
    assert set(peaks) == {0, 1}
    assert max(peaks.values()) < 1.5 * 2**30
    print("peak memory of each worker, MiB:", {rank: peak >> 20 for rank, peak in peaks.items()})


@pytest.mark.soak
@pytest.mark.alone
def test_the_quickstart_as_shipped_loses_no_more_than_what_it_has_measured_to_each_of_ten_kills(campaign: Callable[..., Campaign]):
    config = yaml.safe_load(QUICKSTART.read_text())
    del config["run_dir"]
    run = campaign(**config).start("train.steps=400")
    chance, last = random.Random(1), 0
    for number in range(10):
        last = run.step() + chance.randint(8, 20)
        run.reach(last)
        os.kill(run.workers()[chance.randrange(2)], signal.SIGKILL)
        wait_for(lambda number=number: len(run.events("recovered")) > number, run.logs)
    lost = [event["lost_steps"] for event in run.events("recovered")]
    told = [event["every_steps"] for event in run.events("cadence")]
    print("steps computed again:", lost, "intervals:", told)
    assert max(lost) <= max([1, *told])  # on a machine that has nothing else to do: 1
    assert all(len(values) == 1 for values in run.losses().values())
    run.kill()
