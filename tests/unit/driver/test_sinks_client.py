"""The end of the process of the sinks, as the driver sees it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resilient.config import Config
from resilient.driver.sinks_client import SinksClient, unsent
from resilient.ledger import Ledger
from resilient.sinks.settings import Settings


async def closed(run_dir: Path, sinks: dict[str, Any], patience_s: float, begun: str = "sinks") -> bool:
    """Whether all was sent. Args: begun: the file by which the process is known to have begun."""
    client = SinksClient(Config.model_validate({"name": "demo", "run_dir": str(run_dir), "logging": {"sinks": sinks}}))
    client.start()
    while not (run_dir / begun).exists():
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
    assert asyncio.run(closed(run_dir, {"prometheus": {"file": str(run_dir / "out.prom")}}, 300.0, "out.prom"))
    assert (run_dir / "out.prom").exists()


@pytest.mark.parametrize("answers", [True, False])
def test_the_process_of_the_sinks_ends_well_only_if_all_was_sent_in_its_time(run_dir: Path, tmp_path: Path, answers: bool):
    with socket.create_server(("127.0.0.1", 0)) as server:
        sinks: dict[str, Any] = {"prometheus": {"file": str(run_dir / "out.prom")}}
        if not answers:
            sinks["webhook"] = {"url": f"http://127.0.0.1:{server.getsockname()[1]}/", "events": ["started"], "timeout_s": 60.0}
        config = Config.model_validate({"name": "demo", "run_dir": str(run_dir), "logging": {"sinks": sinks}})
        (tmp_path / "settings").write_bytes(msgspec.json.encode(Settings("demo", str(run_dir), 0.0, config.logging.sinks.wanted)))
        sooner = f"from resilient.sinks import process\nprocess.ENDING_S = {300.0 if answers else 1.0}\nprocess.main()"
        with (tmp_path / "settings").open("rb") as settings:
            command = [sys.executable, "-c", sooner, str(settings.fileno())]
            done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, pass_fds=[settings.fileno()])
    assert done.returncode == (0 if answers else 1)


def test_what_was_not_sent_is_told_with_the_command_that_sends_it():
    words = unsent(Path("/runs/my run"))
    assert "/runs/my run/logs/sinks.log" in words and "`resilient sinks '/runs/my run'`" in words
