"""The end of the process of the sinks, as the driver sees it."""

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from resilient.config import Config
from resilient.driver.sinks_client import SinksClient, unsent
from resilient.ledger import Ledger


async def closed(run_dir: Path, sinks: dict[str, Any], patience_s: float) -> bool:
    client = SinksClient(Config.model_validate({"name": "demo", "run_dir": str(run_dir), "logging": {"sinks": sinks}}))
    client.start()
    while not (run_dir / "sinks").exists():
        await asyncio.sleep(0.02)
    sent = await client.close(patience_s)
    process = client._process
    if process is not None and process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    return sent


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    Ledger(tmp_path).event("run_started", {"name": "demo", "target_step": 1}, generation=1, t=2e9, host="here")
    return tmp_path


def test_the_end_of_a_job_tells_that_a_sink_has_not_taken_all(run_dir):
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections and never answers
        webhook = {"url": f"http://127.0.0.1:{server.getsockname()[1]}/", "events": ["started"]}
        assert not asyncio.run(closed(run_dir, {"webhook": webhook}, 0.5))


def test_the_end_of_a_job_whose_sinks_have_taken_all_tells_nothing(run_dir):
    assert asyncio.run(closed(run_dir, {"prometheus": {"file": str(run_dir / "out.prom")}}, 30.0))
    assert (run_dir / "out.prom").exists()


def test_what_was_not_sent_is_told_with_the_command_that_sends_it():
    words = unsent(Path("/runs/my run"))
    assert "/runs/my run/logs/sinks.log" in words and "`resilient sinks '/runs/my run'`" in words
