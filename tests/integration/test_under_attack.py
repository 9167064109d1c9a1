"""A campaign of two nodes among strangers on the same machine: at which addresses it listens, and what attacks on these cost it."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from campaigns import ROOT, Campaign, wait_for
from listening import descendants, listeners
from soak import soaked

HELLOS_PER_S = 1100.0  # of which some meet nobody: a listener has just gone
STEP_S = 0.05
RSS_BYTES = 150 << 20
LINES = 20
ABOUT_IT = re.compile(r"refused|handshake|Traceback|TCPStore|c10d|socket\.cpp|Errno|accept")

pytestmark = pytest.mark.alone


@pytest.fixture
def two_nodes(campaign: Callable[..., Campaign], tmp_path: Path) -> Iterator[Callable[..., Campaign]]:
    """Two nodes of one rank each, which keep a snapshot of every step in RAM and with each other."""
    rams: list[Path] = []

    def make(name: str, step_s: float, steps: int) -> Campaign:
        rams.append(Path(f"/dev/shm/resilient-test-{os.getpid()}-{random.randrange(1 << 30)}"))
        directory = tmp_path / name
        tiers = [
            {"name": "ram", "path": str(rams[-1]), "every_steps": 1, "keep_last": 2, "replicas": 1},
            {"name": "durable", "path": str(directory / "durable"), "keep_last": 3},
        ]
        config: dict[str, Any] = {"run_dir": str(directory / "run"), "args": {"step_s": step_s}, "train": {"steps": steps}}
        return campaign(
            directory,
            entrypoint="keeping:train",
            cluster={"nodes": 2, "procs_per_node": 1, "device": "cpu"},
            checkpoint={"every_steps": 50, "tiers": tiers},
            resilience={"max_restarts_per_hour": 1000},
            **config,
        )

    yield make
    for each in rams:
        shutil.rmtree(each, ignore_errors=True)


def test_a_run_on_one_machine_listens_at_the_loopback_alone_and_shows_its_secret_on_no_command_line(
    two_nodes: Callable[..., Campaign],
):
    run = two_nodes("quiet", STEP_S, 10**6).start()
    reach_patiently(run, 3)
    assert run.process is not None
    family = list(descendants(run.process.pid))
    found = {pid: listeners(pid) for pid in family}
    everywhere = set().union(*found.values())
    assert len(found[run.process.pid]) == 1, "the driver's server"
    assert len(everywhere) >= 4, "and a snapshot daemon on each node, and the store of the generation"
    assert {address for address, _ in everywhere} == {"127.0.0.1"}

    secrets = {found for pid in family for found in re.findall(rb"RESILIENT_TOKEN=([0-9a-f]+)\.", _read(pid, "environ"))}
    assert secrets, "agents that were not started ahead have it in their environment"
    lines = b"\n".join(_read(pid, "cmdline") for pid in family)
    assert not [secret for secret in secrets if secret in lines]
    run.signal(signal.SIGINT)
    assert run.wait() == 75, run.output + run.logs()


def _read(pid: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("kills", "attack_s"), [soaked(1, 10.0), soaked(5, 120.0)])
def test_an_attack_costs_a_campaign_neither_a_recovery_nor_a_bit_nor_memory(
    two_nodes: Callable[..., Campaign], kills: int, attack_s: float
):
    run = two_nodes("attacked", STEP_S, 10**6).start()
    reach_patiently(run, 2)
    assert run.process is not None
    driver = run.process.pid
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("attacks.py")), str(driver), str(HELLOS_PER_S)]
    between_kills = int(attack_s / (2 * kills) / STEP_S)  # steps
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as attack:
        assert attack.stdout is not None and attack.stdout.readline() == "ready\n"
        for number in range(kills):
            reach_patiently(run, run.step() + between_kills)
            if number % 2:
                run.agents()[number // 2 % 2].kill()
            else:
                os.kill(run.workers()[number // 2 % 2], signal.SIGKILL)
            wait_for(lambda number=number: len(recovered(run)) > number, f"recovery {number + 1}\n{run.logs()}")
            reach_patiently(run, run.step() + between_kills)
        told = json.loads(attack.communicate("")[0])
        assert attack.returncode == 0
    peak_bytes = 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{driver}/status").read_text())[0])
    run.signal(signal.SIGINT)
    assert run.wait() == 75, run.output + run.logs()

    assert told["targets"] >= 4 and min(told["done"].values()) >= 20, told
    faults = {event["fault_id"]: event["kind"] for event in run.events("fault") if event["kind"] != "straggler"}  # a busy machine
    assert len(faults) == kills, faults
    assert [event["fault_id"] for event in recovered(run)] == list(faults)
    assert not run.events("checkpoint_rejected")
    assert [event["tier"] for event in run.events("generation_started")[1:]] == ["ram"] * kills
    assert peak_bytes < RSS_BYTES
    lines = (run.output + everything_logged(run)).splitlines()
    said = [line for line in lines if ABOUT_IT.search(line) and "[rank " not in line]  # ranks tell of peers that were killed
    print(told, f"driver: {peak_bytes >> 20} MiB at most", *said, sep="\n")
    assert len(said) <= LINES

    twin = two_nodes("quiet", 0.0, max(run.losses()))  # the last line may be of an agent that was killed
    assert twin.run() == 0, twin.output + twin.logs()
    assert run.losses() == twin.losses()


def reach_patiently(run: Campaign, step: int) -> None:
    wait_for(lambda: run.step() >= step, lambda: f"step {step}\n{run.logs()}", 600.0)


def recovered(run: Campaign) -> list[dict[str, Any]]:
    """The recoveries from what stopped the run; a busy machine has stragglers besides."""
    return [event for event in run.events("recovered") if "straggler" not in event["fault_id"]]


def everything_logged(run: Campaign) -> str:
    return "\n".join(path.read_text() for path in sorted(run.run_dir.glob("logs/**/*.log")))
