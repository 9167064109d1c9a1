"""Campaigns as a person starts them: the real command, in a process of its own, watched from outside."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
import yaml
import zarr
from holding import GO_ON
from shared import once

from resilient import ledger
from resilient.agent.memory import agent_record, region_directory
from resilient.logs.reading import Wanted, lines

T = TypeVar("T")

STALLED = "run directory: it does not answer"  # how a fault begins that a disk or a processor of others makes
HELD: dict[str, Any] = {"hang_floor_s": 240.0}  # where ranks stand still for a test, they are not taken for hung

PATIENCE_S = 240.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_PER_LOOK = 0.01, 0.3, 9.0  # of `wait_for`: between two looks
MOUNTS = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: mounting a file system needs root")
ROOT = Path(__file__).parents[2]


def wait_for(what: Callable[[], T], why: str | Callable[[], str], patience_s: float = PATIENCE_S) -> T:
    """Poll until `what` returns something true; fail with `why` otherwise.

    A look that takes long, such as a question to Slurm, is repeated less often: the campaign needs the processors itself.
    """
    deadline = time.monotonic() + patience_s
    while True:
        began = time.monotonic()
        if got := what():
            return got
        if (now := time.monotonic()) > deadline:
            pytest.fail(f"waited {patience_s:.0f} s in vain: {why if isinstance(why, str) else why()}")
        time.sleep(min(max(SHORTEST_PAUSE_S, PAUSE_PER_LOOK * (now - began)), LONGEST_PAUSE_S))


class Campaign:
    """One run directory and the commands that are run on it."""

    def __init__(self, directory: Path, **config: Any) -> None:
        self.directory = directory
        self.run_dir = directory / "run"
        self.path = directory / "config.yaml"
        self.config = {"name": "test", "run_dir": str(self.run_dir), **config}
        text = yaml.safe_dump(self.config)
        if not self.path.exists() or self.path.read_text() != text:  # of a campaign that was run before, others may read it
            self.path.write_text(text)
        self.process: subprocess.Popen[str] | None = None
        self.family: dict[int, psutil.Process] = {}
        self.output = ""
        self.within: list[str] = []  # a command that runs the command that follows it

    def start(self, *overrides: str) -> "Campaign":
        """Start `resilient run`; returns at once."""
        # The code beside these tests, wherever an installation of it may point.
        environ = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{ROOT}"}
        self._out = (self.directory / "output").open("a+")
        self._out_from = self._out.seek(0, os.SEEK_END)
        self.process = subprocess.Popen(
            [*self.within, sys.executable, "-m", "resilient", "run", str(self.path), *overrides],
            stdout=self._out,
            stderr=subprocess.STDOUT,
            env=environ,
            cwd=self.directory,
            text=True,
            start_new_session=True,
        )
        return self

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """The exit code; what was printed is in `output` then."""
        assert self.process is not None
        try:
            code = self.process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"the campaign did not end within {patience_s:.0f} s\n{self._printed()}\n{self.logs()}")
        self.output = self._printed()
        self._out.close()
        return code

    def run(self, *overrides: str) -> int:
        return self.start(*overrides).wait()

    def _printed(self) -> str:
        self._out.flush()
        text = (self.directory / "output").read_text()
        return text[self._out_from :]

    def signal(self, sig: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(sig)

    def processes(self) -> list[psutil.Process]:
        """The driver's descendants that are alive now; all that were ever seen are remembered in `family`."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.family[process.pid] = process
        return [process for process in self.family.values() if alive(process)]

    def kill(self) -> None:
        """kill -9 of the driver."""
        assert self.process is not None
        self.processes()
        self.process.kill()
        self.process.wait()

    def go_on(self) -> None:
        """Ranks that stand still behind a step (`holding`) do so no longer."""
        (self.directory / GO_ON).touch()

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """The ledger, without what it tells of a run directory that did not answer for some seconds.

        That is told, rightly, wherever the disk or the disk process has to wait for other tests, and costs training nothing.
        """
        lines = self.ledger()
        stalls = {line["fault_id"] for line in lines if line["event"] == "fault" and line["detail"].startswith(STALLED)}
        return [line for line in lines if name in (None, line["event"]) and line.get("fault_id") not in stalls]

    def ledger(self) -> list[dict[str, Any]]:
        """The whole ledger."""
        return list(ledger.read(self.run_dir / ledger.EVENTS))

    def metrics(self) -> list[dict[str, Any]]:
        return list(ledger.read(self.run_dir / ledger.METRICS))

    def step(self) -> int:
        lines = self.metrics()
        return lines[-1]["step"] if lines else 0

    def reach(self, step: int) -> None:
        """Wait until the metrics show this step, or a later one."""
        wait_for(lambda: self.step() >= step or self._ended(), f"step {step}\n{self.logs()}")
        assert self.step() >= step, self._printed() + self.logs()

    def _ended(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def workers(self) -> dict[int, int]:
        """Process id by rank of the generation that runs."""
        found: dict[int, int] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, ProcessLookupError):
                environ = _environ_of(process.pid)
                if environ is not None:
                    found[environ] = process.pid
        return found

    def agents(self) -> dict[int, psutil.Process]:
        """The agents that are there, by node."""
        cluster = self.config.get("cluster", {})
        records = {node: agent_record(self.run_dir, node) for node in range(cluster.get("nodes", 1) + cluster.get("spares", 0))}
        there = {process.pid: process for process in self.processes()}
        return {node: there[record.pid] for node, record in records.items() if record is not None and record.pid in there}

    def logs(self) -> str:
        parts = []
        with contextlib.suppress(FileNotFoundError):  # old ones are packed meanwhile
            for path in sorted(self.run_dir.glob("logs/**/*.log")):
                parts.append(f"--- {path}\n{path.read_text()[-3000:]}")
        return "\n".join(parts)

    def printed(self, rank: int, generation: int = 1) -> str:
        """What a rank has printed in a generation, without times."""
        found = lines(self.run_dir, generation, Wanted(rank=rank))
        return "\n".join(line.split("] ", 1)[1] for line in found if f"[rank {rank}] " in line)

    def logs_of_rank(self, rank: int) -> str:
        """What a rank has printed in all generations that are not packed."""
        there = {event["generation"] for event in self.events("generation_started")}
        return "\n".join(self.printed(rank, each) for each in sorted(there) if (self.run_dir / f"logs/g{each}").is_dir())

    def losses(self) -> dict[int, set[str]]:
        """Every loss that was written for a step, as text, so that equal means equal to the last bit."""
        values: dict[int, set[str]] = {}
        for line in self.metrics():
            values.setdefault(line["step"], set()).add(repr(line["loss"]))
        return values


def loses_no_snapshot(run: Campaign) -> None:
    """Each generation went on from the newest step of which the ledger had told a whole snapshot before it, or from a later one."""
    newest = 0
    for event in run.events():
        if event["event"] == "snapshot":
            newest = max(newest, event["step"])
        elif event["event"] == "generation_started":
            assert event["resumed_step"] >= newest, event


def whole(run: Campaign, steps: int) -> None:
    """Every step has one loss, however often it was computed."""
    losses = run.losses()
    assert sorted(losses) == list(range(1, steps + 1))
    assert all(len(values) == 1 for values in losses.values())


def regions(run: Campaign) -> list[Path]:
    """What the agents of a run hold in shared memory."""
    place = region_directory(run.run_dir, 0)
    return [*place.glob("**"), *place.rglob("*")]


def alive(process: psutil.Process) -> bool:
    """Whether a process still does something; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _environ_of(pid: int) -> int | None:
    """The rank whose pipe this process prints to; None if it is no worker. (A forked worker's environ is its server's.)"""
    name = Path(f"/proc/{pid}/fd/1").readlink().name
    if name.startswith("rank") and os.getsid(pid) == pid:
        return int(name.removeprefix("rank").partition(".")[0])
    return None


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[Callable[..., Campaign]]:
    made: list[Campaign] = []

    def make(directory: Path | None = None, **config: Any) -> Campaign:
        where = directory or tmp_path
        where.mkdir(exist_ok=True)
        made.append(Campaign(where, **config))
        return made[-1]

    yield make
    for each in made:
        if each.process is not None and each.process.poll() is None:
            each.kill()
        if each.process is not None:
            wait_for(lambda each=each: not each.processes(), f"processes left behind: {each.processes()}")


@pytest.fixture
def counting(campaign: Callable[..., Campaign]) -> Callable[..., Campaign]:
    """A campaign of the toy that counts, with two ranks."""

    def make(entry: str = "count", steps: int = 60, directory: Path | None = None, **config: Any) -> Campaign:
        cluster = {"procs_per_node": 2, "device": "cpu", **config.pop("cluster", {})}
        train = {"steps": steps}
        return campaign(
            directory,
            entrypoint=f"toys:{entry}",
            cluster=cluster,
            train=train,
            checkpoint={"every_steps": config.pop("every_steps", 10)},
            **config,
        )

    return make


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """A small ext4 of its own, on a loop device."""
    mounted: list[Path] = []

    def make(mib: int = 16, inodes: int = 2000) -> Path:
        image, path = tmp_path / f"image{len(mounted)}", tmp_path / f"volume{len(mounted)}"
        with image.open("wb") as file:
            file.truncate(mib << 20)
        subprocess.run(["mkfs.ext4", "-q", "-N", str(inodes), "-m", "0", str(image)], check=True)
        path.mkdir()
        subprocess.run(["mount", "-o", "loop", str(image), str(path)], check=True)
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


# -- campaigns of the real trainer ---------------------------------------------------------------------------------------

STEPS = 40
EVERY = 5

ONE_THREAD = {"threads_per_proc": 1}  # sums are the same to the last bit only with as many, and threads that wait spin

MODEL = {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 64}
TRAIN = {"steps": STEPS, "global_batch_size": 8, "micro_batch_size": 2, "precision": "bf16", "eval_interval": 20, "eval_iters": 1}
OPTIMIZER = {"warmup_samples": 32, "decay_samples": 8 * STEPS}  # so that the target does not change the schedule

Training = Callable[..., Campaign]


def holding(step: int, **resilience: Any) -> dict[str, Any]:
    """Keys of a campaign that stands still from this step on, until `Campaign.go_on`."""
    return {"entrypoint": "paced:train", "args": {"step_s": 0.0, "holds": step}, "resilience": {**HELD, **resilience}}


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An indexed dataset with its tokenizer, built by the command from text that is made here."""

    def build(directory: Path) -> None:
        chance = random.Random(5)
        words = ["".join(chance.choices("abcdefghij", k=chance.randrange(2, 8))) for _ in range(300)]
        for number in range(60):
            text = " ".join(chance.choices(words, k=900))
            (directory / f"{number}.txt").write_text(text)
        files = [str(path) for path in sorted(directory.glob("*.txt"))]
        command = [sys.executable, "-m", "resilient", "data", "build", *files]
        subprocess.run([*command, "--output", str(directory / "corpus"), "--vocab-size", "400"], check=True)

    return once(tmp_path_factory, "data", build) / "corpus"


@pytest.fixture
def training(campaign: Callable[..., Campaign], dataset: Path, tmp_path: Path) -> Training:
    def make(directory: Path | None = None, **changes: Any) -> Campaign:
        config: dict[str, Any] = {
            "cluster": {**ONE_THREAD, **changes.pop("cluster", {"procs_per_node": 2, "device": "cpu"})},
            "model": MODEL,
            "data": {"path": str(dataset)},
            "train": {**TRAIN, **changes.pop("train", {})},
            "optimizer": OPTIMIZER,
            "checkpoint": {"every_steps": EVERY},
        }
        return campaign(directory or tmp_path / "disturbed", **{**config, **changes})

    return make


def weights(run: Campaign, step: int = STEPS) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, by name, read by plain Zarr."""
    root = zarr.open_group(run.run_dir / "checkpoints" / f"step-{step:08}", mode="r")
    found: dict[str, np.ndarray] = {}

    def visit(group: zarr.Group, prefix: str) -> None:
        for name, member in group.members():
            if isinstance(member, zarr.Group):
                visit(member, f"{prefix}{name}/")
            else:
                found[prefix + name] = member[...]

    visit(root, "")
    return found


@pytest.fixture(scope="session")
def reference_runs(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Callable[[str], Campaign]:
    """The run in which nothing happens, once per precision."""

    def reference(precision: str) -> Campaign:
        config = {
            "cluster": {**ONE_THREAD, "procs_per_node": 2, "device": "cpu"},
            "model": MODEL,
            "data": {"path": str(dataset)},
            "train": {**TRAIN, "precision": precision},
            "optimizer": OPTIMIZER,
            "checkpoint": {"every_steps": EVERY},
        }
        return finished(tmp_path_factory, f"reference-{precision}", STEPS, **config)

    return reference


def finished(factory: pytest.TempPathFactory, name: str, steps: int, **config: Any) -> Campaign:
    """A campaign in which nothing happens, at its target of so many steps; run once for all processes of the tests."""

    def make(directory: Path) -> None:
        run = Campaign(directory, **config)
        assert run.run() == 0, run.output + run.logs()
        assert len(run.metrics()) == steps

    return Campaign(once(factory, name, make), **config)


def same(run: Campaign, reference: Campaign) -> None:
    """Equal to the last bit: one loss per step, and every array of the last checkpoint."""
    assert run.losses() == reference.losses()
    ours, theirs = weights(run), weights(reference)
    assert ours.keys() == theirs.keys()
    assert ours if run.config.get("entrypoint") == "keeping:train" else len(ours) > 10
    for name, array in theirs.items():
        assert array.tobytes() == ours[name].tobytes(), name
