"""A run directory that stalls, is full, read-only or gone while a campaign runs: training goes on, and no line is missing."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from campaigns import MOUNTS, Campaign, wait_for
from injectors import strike
from keeping import advance, beginning
from mounts import make_read_only
from soak import soaked

pytestmark = [MOUNTS, pytest.mark.alone]

STEP_S = 0.1
SHORT = 75  # steps; the start of a campaign takes longer
BRIEF_S = 5.0  # of a fault; what does not answer for two seconds is one


def command(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


def freeze(path: Path) -> None:
    command("fsfreeze", "-f", path)


def thaw(path: Path) -> None:
    command("fsfreeze", "-u", path)


def fill(path: Path) -> None:
    with (path / "filling").open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


def empty(path: Path) -> None:
    (path / "filling").unlink()


def unmount(path: Path) -> None:
    command("umount", "-l", path)


def mount(path: Path) -> None:
    command("mount", "-o", "loop", path.with_name(path.name.replace("volume", "image")), path)


def limit(path: Path, size: str) -> None:
    """The quota of the subvolume that the run directory is. A limit that is exceeded already can be changed by number only."""
    number = subprocess.run(
        ["btrfs", "inspect-internal", "rootid", path / "run"], check=True, capture_output=True, text=True
    ).stdout
    command("btrfs", "qgroup", "limit", size, f"0/{number.strip()}", path)


def use_up(path: Path) -> None:
    limit(path, "1")


def allow_more(path: Path) -> None:
    limit(path, "none")


FAULTS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "frozen": (freeze, thaw),
    "full": (fill, empty),
    "over_quota": (use_up, allow_more),
    "read_only": (make_read_only, unmount),
    "unmounted": (unmount, mount),
}


def with_quota(directory: Path) -> Iterator[Path]:
    """A btrfs whose directory `run` has a quota, which root has to keep, too."""
    if shutil.which("mkfs.btrfs") is None:
        pytest.skip("NOT TESTED HERE: a file system with quotas needs btrfs-progs")
    image, path = directory / "image-quota", directory / "volume-quota"
    with image.open("wb") as file:
        file.truncate(256 << 20)
    command("mkfs.btrfs", "-q", image)
    path.mkdir()
    command("mount", "-o", "loop", image, path)
    command("btrfs", "quota", "enable", path)
    command("btrfs", "subvolume", "create", path / "run")
    yield path
    command("umount", "-l", path)


@pytest.fixture
def ram() -> Iterator[Path]:
    path = Path(f"/dev/shm/resilient-test-{os.getpid()}-{random.randrange(1 << 30)}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def disk(request: pytest.FixtureRequest, volume: Callable[..., Path], tmp_path: Path) -> Iterator[Path]:
    """The file system of the run directory; whatever a test did to it is undone."""
    if "over_quota" in request.node.name:
        yield from with_quota(tmp_path)
        return
    path = volume(32)
    yield path
    subprocess.run(["fsfreeze", "-u", str(path)], check=False, capture_output=True)
    if not path.is_mount():
        mount(path)  # which the fixture unmounts


@pytest.fixture
def two_nodes(campaign: Callable[..., Campaign], disk: Path, ram: Path, tmp_path: Path) -> Callable[..., Campaign]:
    """Two nodes whose snapshots go to RAM, each with a copy on the other node, and to a durable tier outside the run directory."""

    def make(steps: int = SHORT, **changes: Any) -> Campaign:
        tiers = [
            {"name": "ram", "path": str(ram), "every_steps": 1, "keep_last": 2, "replicas": 1},
            {"name": "durable", "path": str(tmp_path / "durable"), "keep_last": 3},
        ]
        run = campaign(
            tmp_path / "campaign",
            run_dir=str(disk / "run"),
            entrypoint="keeping:train",
            args={"step_s": STEP_S},
            cluster={"nodes": 2, "procs_per_node": 1, "device": "cpu"},
            train={"steps": steps},
            checkpoint={"every_steps": 25, "tiers": tiers},
            chaos={"allow": True},
            **changes,
        )
        run.run_dir = disk / "run"
        return run

    return make


def whole(run: Campaign, name: str) -> list[dict[str, Any]]:
    """The lines of a file, none of which may be cut short."""
    text = (run.run_dir / name).read_text()
    lines = run.metrics() if name == "metrics.jsonl" else run.ledger()
    assert text.endswith("\n") and text.count("\n") == len(lines)
    return lines


def expected_losses(steps: int) -> list[float]:
    numbers = [beginning(rank) for rank in range(2)]
    found = []
    for _ in range(steps):
        found.append((numbers[0].sum() + numbers[1].sum()).item())
        for each in numbers:
            advance(each)
    return found


def undisturbed(run: Campaign, steps: int, *, since_t: float, until_t: float) -> None:
    """One generation, every step once and in order with the right number, also while nothing could be written."""
    metrics = whole(run, "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    assert [line["loss"] for line in metrics] == expected_losses(steps)
    assert {line["generation"] for line in metrics} == {1}
    assert len([line for line in metrics if since_t < line["t"] < until_t]) > 0.5 * (until_t - since_t) / (2 * STEP_S)
    events = whole(run, "events.jsonl")
    assert [event["generation"] for event in events if event["event"] == "generation_started"] == [1]
    faults = [event for event in events if event["event"] == "fault"]
    assert {event["kind"] for event in faults} == {"storage"}, faults
    # A disk that other things keep busy may stall once more, which is another fault.
    assert run.output.count("training goes on") == run.output.count("works again") == len(faults)


@pytest.mark.parametrize(
    ("for_s", "kind"),
    [
        *(soaked(BRIEF_S, kind) for kind in FAULTS),
        *(soaked(60.0, kind) for kind in FAULTS),
        soaked(180.0, "frozen"),
    ],
)
def test_a_run_directory_that_does_not_work_for_a_while_costs_nothing(
    two_nodes: Callable[..., Campaign], disk: Path, kind: str, for_s: float
):
    begin, end = FAULTS[kind]
    steps = SHORT + int(for_s / STEP_S)
    run = two_nodes(steps).start()
    run.reach(random.randrange(5, 30))
    since_t = time.time()
    begin(disk)
    time.sleep(for_s)  # as long as the fault lasts
    until_t = time.time()
    end(disk)
    assert run.wait() == 0, run.output + run.logs()
    undisturbed(run, steps, since_t=since_t + 1, until_t=until_t)


@pytest.mark.soak
@pytest.mark.parametrize("kind", FAULTS)
def test_a_stop_while_the_run_directory_does_not_work_drains_and_the_next_run_has_every_line(
    two_nodes: Callable[..., Campaign], disk: Path, kind: str
):
    begin, end = FAULTS[kind]
    run = two_nodes().start()
    run.reach(random.randrange(5, 30))
    begin(disk)
    wait_for(lambda: "training goes on" in run._printed(), "it is told that the run directory does not work")
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output
    end(disk)
    assert run.start().wait() == 0, run.output + run.logs()
    metrics = whole(run, "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, SHORT + 1))
    assert [line["loss"] for line in metrics] == expected_losses(SHORT)
    assert sorted({line["generation"] for line in metrics}) == [1, 2]
    (drained,) = [event for event in whole(run, "events.jsonl") if event["event"] == "drain"]
    assert [line["step"] for line in metrics if line["generation"] == 1] == list(range(1, drained["step"] + 1))


@pytest.mark.soak
def test_an_agent_that_is_replaced_while_the_run_directory_stands_still_keeps_the_driver_waiting_for_nothing(
    two_nodes: Callable[..., Campaign], disk: Path
):
    run = two_nodes().start()
    run.reach(random.randrange(5, 30))
    agent = run.agents()[1]
    (run.run_dir / "logs" / "agent1.log").unlink()  # the next one makes its own, which a frozen file system does not let it
    freeze(disk)
    agent.kill()
    wait_for(lambda: "training goes on" in run._printed(), "the driver tells that the run directory does not work", 60.0)
    thaw(disk)
    assert run.wait() == 0, run.output + run.logs()
    metrics = whole(run, "metrics.jsonl")
    assert {line["step"]: line["loss"] for line in metrics} == dict(enumerate(expected_losses(SHORT), 1))


@pytest.mark.soak
def test_a_run_directory_that_is_gone_for_good_ends_the_job_with_what_it_has_in_the_tiers_that_work(
    two_nodes: Callable[..., Campaign], disk: Path, tmp_path: Path
):
    run = two_nodes(100_000, resilience={"run_dir_patience_s": 10}).start()
    run.reach(random.randrange(5, 30))
    unmount(disk)
    assert run.wait() == 69, run.output
    assert "training goes on" in run.output
    mount(disk)
    run.start()
    wait_for(lambda: run.events("drain"), "the lines of the first run, from the spill file")
    (drained,) = run.events("drain")
    run.reach(drained["step"] + 20)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()
    metrics = whole(run, "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    assert [line["loss"] for line in metrics] == expected_losses(len(metrics))
    assert [line["step"] for line in metrics if line["generation"] == 1] == list(range(1, drained["step"] + 1))


@pytest.mark.soak
@pytest.mark.parametrize("away_s", [10.0, *(pytest.param(each, marks=pytest.mark.soak) for each in (40.0, 120.0))])
def test_a_driver_that_is_stopped_for_a_while_ends_no_generation(two_nodes: Callable[..., Campaign], away_s: float):
    steps = SHORT + int(away_s / STEP_S)
    run = two_nodes(steps).start()
    run.reach(random.randrange(5, 30))
    since_t = time.time()
    run.signal(signal.SIGSTOP)
    time.sleep(away_s)  # as long as the driver is away
    until_t = time.time()
    run.signal(signal.SIGCONT)
    assert run.wait() == 0, run.output + run.logs()
    metrics = whole(run, "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    assert {line["generation"] for line in metrics} == {1}
    assert [line for line in metrics if since_t + 1 < line["t"] < until_t]
    assert not [line for line in run.ledger() if line["event"] == "fault"]


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["run_dir_stall", "run_dir_full", "run_dir_read_only"])
def test_a_fault_of_the_run_directory_that_is_injected_costs_nothing_and_is_undone(two_nodes: Callable[..., Campaign], fault: str):
    steps = SHORT + int(BRIEF_S / STEP_S)
    run = two_nodes(steps).start()
    run.reach(random.randrange(5, 30))
    since_t = time.time()
    strike(run, fault, for_s=BRIEF_S)
    until_t = time.time()
    assert run.wait() == 0, run.output + run.logs()
    undisturbed(run, steps, since_t=since_t, until_t=until_t)
