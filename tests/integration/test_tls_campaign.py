"""A campaign of two nodes over TLS with a pre-shared key, and what a Python without that says."""

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from campaigns import Campaign, wait_for

from checkpoint import tls

why = tls.why_not()


@pytest.fixture
def over_tls(campaign: Callable[..., Campaign], tmp_path: Path) -> Iterator[Campaign]:
    ram = Path(f"/dev/shm/resilient-test-{os.getpid()}-{random.randrange(1 << 30)}")
    tiers = [
        {"name": "ram", "path": str(ram), "every_steps": 1, "keep_last": 2, "replicas": 1},
        {"name": "durable", "path": str(tmp_path / "durable"), "keep_last": 3},
    ]
    yield campaign(
        tmp_path,
        run_dir=str(tmp_path / "run"),
        entrypoint="keeping:train",
        args={"step_s": 0.05},
        train={"steps": 10**6},
        cluster={"nodes": 2, "procs_per_node": 1, "device": "cpu", "tls": "psk"},
        checkpoint={"every_steps": 50, "tiers": tiers},
    )
    shutil.rmtree(ram, ignore_errors=True)


@pytest.mark.skipif(why is not None, reason=str(why))
def test_a_campaign_over_tls_recovers_from_a_kill_in_ram(over_tls: Campaign):
    run = over_tls.start()
    wait_for(lambda: run.step() >= 20, run.logs)
    os.kill(run.workers()[1], signal.SIGKILL)
    wait_for(lambda: run.events("recovered"), run.logs)
    run.reach(run.step() + 10)
    run.signal(signal.SIGINT)
    assert run.wait() == 75, run.output + run.logs()
    assert [event["tier"] for event in run.events("generation_started")[1:]] == ["ram"]
    assert not run.events("checkpoint_rejected")


@pytest.mark.skipif(why is None, reason="this Python has TLS with pre-shared keys")
def test_a_python_without_it_refuses_the_config(over_tls: Campaign):
    assert over_tls.run() == 78
    assert "cluster.tls" in over_tls.output and "needs Python 3.13 or newer" in over_tls.output
    assert "allowed: off" in over_tls.output and "Traceback" not in over_tls.output
