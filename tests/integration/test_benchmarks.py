"""Benchmarks go on running as what they measure changes; what they find is not looked at here."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from soak import soaked, soaked_after

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str, patience_s: float) -> subprocess.CompletedProcess[str]:
    """A benchmark as a person starts it."""
    command = [sys.executable, f"benchmarks/{script}", *arguments]
    return subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=patience_s)


SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py") if "argparse.ArgumentParser(" in path.read_text())
TORCH_FIRST = ("checkpoint.py", "step_anatomy.py", "trainer.py")  # import it to say what they take


@pytest.mark.parametrize("script", soaked_after(3, sorted(SCRIPTS, key=lambda each: each in TORCH_FIRST)))
def test_a_benchmark_started_from_a_checkout_says_what_it_takes(script: str):
    ran = run(script, "--help", patience_s=120.0)
    assert (ran.returncode, ran.stdout[:6]) == (0, "usage:"), ran.stderr


# What parts of checkpoint.py print, and the ratios that it writes to its file.
PARTS = {
    "disk": (
        ["raw O_DIRECT write", "DCP save", "snapshot + flush", "restore"],
        {"save/raw", "save/DCP save", "restore/DCP load", "snapshot + flush/raw"},
    ),
    "stall reshard": (["stops training", "bytes read"], {"stall"}),
}


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("part", "says", "ratios"),
    [("disk", *PARTS["disk"]), soaked("stall reshard", *PARTS["stall reshard"])],
    ids=PARTS,
)
def test_checkpoints_can_be_measured(tmp_path: Path, part: str, says: list[str], ratios: set[str]):
    scratch, found = tmp_path / "scratch", tmp_path / "found.json"
    scratch.mkdir()
    small = ["--mib", "48", "--rounds", "1", "--dir", str(scratch), "--part", *part.split()]
    ran = run("checkpoint.py", *small, "--json", str(found), patience_s=240.0)
    assert ran.returncode == 0, ran.stderr
    assert not [words for words in says if words not in ran.stdout], ran.stdout
    assert not list(scratch.iterdir())
    told = json.loads(found.read_text())
    assert ratios <= {figure["name"] for figure in told["figures"] if figure["ratio"]}
    assert str(scratch) not in found.read_text()  # where things lie on this machine is nobody's business


# What each is told to do, so little that it takes a minute or two, and what it must then say.
SMALL = {
    "kills": ("recovery.py --kills 1 --rounds 1 --launchers resilient,torchrun", ["resilient  median", "torchrun   median"]),
    "stops": ("recovery.py --kills 0 --stops 1 --rounds 1 --launchers resilient", ["SIGSTOP", "resilient  median"]),
    "script": (
        "your_script.py --kills 1 --rounds 1 --turns 6 --turn-s 2",
        ["resilient  median", "torchrun   median", "times as fast", "ratio"],
    ),
    "calm": ("calm.py --minutes 0.5", ["moody", "trainer"]),
    "nodes": ("nodes.py --rounds 1", ["with a spare", "without a spare", "the return of the node"]),
    "lost_hour": ("lost_nodes.py --part hour", ["teuken-7b", "goodput: uneven"]),
    "steady": (
        "steady.py --ranks 2 --seconds 5 --turns 6 --turn-s 4",
        ["agent", "daemon", "torchrun", "resilient", "ratio"],
    ),
    "control_plane": ("control_plane.py --ranks 64 --seconds 2 --deaths 1", ["death: first start", "driver_cpu_share"]),
    "default_tier": ("default_tier.py --turns 6 --turn-s 4 --kills 1", ["ratio", "by processor time", "computed again"]),
    "past": ("past.py --steps 2000 --faults 20 --jobs 4 --rounds 1 --watch-s 4", ["its memory", "of a core", "first line"]),
    "many": ("many.py --agents 3 --kills 1 --rejoin-s 0", ["rank of node", "drained", "exit status 75"]),
    "model": ("trainer.py --part model --rounds 1", ["plain script, eager", "this trainer, compiled"]),
    "attention": ("trainer.py --part attention --rounds 1", ["4096", "less memory"]),
    "products": ("trainer.py --part products --rounds 1", ["gate and up", "as fast"]),
    "replicas": ("trainer.py --part replicas --rounds 1", ["ZeRO-2, 16 micro batches", "by the plan"]),
    "anatomy": ("step_anatomy.py --ranks 2 parallel.zero_stage=2", ["operations", "plain loop", "torchtitan", "reduce_scatter"]),
    "layouts": ("trainer.py --part layouts --rounds 1", ["tp 2 pp 2 dp 1", "of dp 4"]),
}


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("command", "says"), SMALL.values(), ids=SMALL)
def test_a_benchmark_runs_small(command: str, says: list[str]):
    ran = run(*command.split(), patience_s=1200.0)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not [words for words in says if words not in ran.stdout], ran.stdout


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_kills_at_random_moments_leave_nothing_behind(rounds: int):
    # What there is after the first five is what the end is compared with.
    ran = run("recovery.py", "--leaks", "--kills", str(5 + 5 * rounds), patience_s=1200.0)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_benchmark_that_is_asked_to_end_ends_its_campaign(rounds: int):
    started: dict[int, psutil.Process] = {}
    for _ in range(rounds):
        script = subprocess.Popen([sys.executable, "benchmarks/start.py", "--rounds", "1"], cwd=ROOT)
        while "rank0" not in {process.name() for process in started.values() if process.is_running()}:
            assert script.poll() is None
            started |= {process.pid: process for process in psutil.Process(script.pid).children(recursive=True)}
            time.sleep(0.01)
        script.terminate()
        assert script.wait(60.0) == 128 + signal.SIGTERM
        _, left = psutil.wait_procs(list(started.values()), 30.0)
        assert not left
