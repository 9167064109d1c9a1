"""The text file and the port, read by prometheus-client's own parser; and the dashboard, which asks for nothing else."""

import json
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from resilient.sinks.measures import MEASURES, STEP_SECONDS
from resilient.sinks.prometheus import PrometheusSink
from resilient.sinks.settings import Settings
from resilient.status import overview

ROOT = Path(__file__).parents[3]


def samples(text: str) -> dict[tuple[str, str], float]:
    """Value by name and by the label that is not the campaign's."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type in ("gauge", "counter", "histogram")
        for sample in family.samples:
            assert sample.labels["run"] == "demo"
            rest = [value for name, value in sample.labels.items() if name != "run"]
            assert len(rest) <= 1
            found[sample.name, *rest or [""]] = sample.value
    return found


@pytest.fixture
def campaign(written):
    written.started()
    for step in range(1, 20):
        written.step(step, mfu=0.4, grad_norm=1.5, lr=1e-3, tokens=step * 100, samples=step, memory_bytes=5)
    written.event("snapshot", step=19, tier="ram", stall_s=0.25, bytes=1)
    written.event("committed", step=5, tier="durable")
    written.event("committed", step=10, tier="durable")
    written.event("link", node=0, interface="ib0", state="down", detail="no carrier", down_s=None)
    written.event("checkpoint_rejected", step=10, tier="durable", reason="it is damaged")
    written.event("validation", step=19, val_loss=2.5)
    written.fault(1)
    written.fault(2, kind="hang", generation=2, lost=0)
    written.finished(70, generation=3)
    return written


def test_the_file_says_what_the_status_says(campaign):
    PrometheusSink(campaign.campaign(), {"file": str(campaign.run_dir / "metrics.prom")}).refresh()
    found = samples((campaign.run_dir / "metrics.prom").read_text())
    shown = overview(campaign.run_dir)
    assert found["resilient_step", ""] == shown.step == 19
    assert found["resilient_loss", ""] == shown.loss
    assert found["resilient_goodput_ratio", ""] == pytest.approx(shown.goodput)
    assert found["resilient_faults_total", "exit"] == found["resilient_faults_total", "hang"] == 1
    assert found["resilient_recoveries_total", ""] == shown.recovered == 2
    assert found["resilient_lost_steps_total", ""] == shown.lost_steps == 2
    assert found["resilient_downtime_seconds_total", ""] == shown.downtime_s == 6
    assert found["resilient_step_seconds_count", ""] == 19
    assert found["resilient_step_seconds_sum", ""] == pytest.approx(9.5)
    assert found["resilient_step_seconds_bucket", "0.25"] == 0
    assert found["resilient_step_seconds_bucket", "0.5"] == found["resilient_step_seconds_bucket", "+Inf"] == 19
    assert found["resilient_exit_code", ""] == 70 and found["resilient_up", ""] == 0
    assert found["resilient_checkpoint_step", "durable"] == shown.checkpoint_step == 5
    assert found["resilient_checkpoints_committed_total", "durable"] == 2


def test_of_a_driver_that_is_gone_without_a_word_no_job_runs_and_no_time_counts(written):
    written.started()
    for step in range(1, 20):
        written.step(step)
    file = written.run_dir / "metrics.prom"
    PrometheusSink(written.campaign(alive=lambda: False), {"file": str(file)}).refresh()
    found, shown = samples(file.read_text()), overview(written.run_dir)
    assert found["resilient_up", ""] == 0 and ("resilient_exit_code", "") not in found
    assert found["resilient_goodput_ratio", ""] == pytest.approx(shown.goodput)
    assert sum(value for (name, _), value in found.items() if name == "resilient_rank_seconds") == pytest.approx(2 * shown.wall_s)


def test_the_last_file_of_a_driver_that_was_killed_says_that_no_job_runs(written):
    """The process of the sinks, whose pipe the kernel closes then. A busy processor comes to it last: it is waited for first."""
    written.started()
    file = written.run_dir / "metrics.prom"
    settings = Settings("demo", str(written.run_dir), 0.0, {"prometheus": {"file": str(file)}})
    with tempfile.TemporaryFile() as wanted:
        wanted.write(msgspec.json.encode(settings))
        wanted.seek(0)
        words = [sys.executable, "-m", "resilient.sinks.process", str(wanted.fileno())]
        with subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[wanted.fileno()]) as process:
            assert process.stdin is not None
            deadline = time.monotonic() + 200.0
            while not file.exists():
                assert time.monotonic() < deadline, "no file is written"
                process.stdin.write(b".")
                process.stdin.flush()
                time.sleep(0.05)
            process.stdin.close()
    assert samples(file.read_text())["resilient_up", ""] == 0


def test_every_measure_is_there_once_there_is_something_to_say(campaign):
    PrometheusSink(campaign.campaign(), {"file": str(campaign.run_dir / "metrics.prom")}).refresh()
    found = {name for name, _ in samples((campaign.run_dir / "metrics.prom").read_text())}
    assert {measure.name for measure in MEASURES} <= found


def test_a_label_of_any_text_is_read_back(written):
    written.started()
    written.fault(1, kind='odd "kind"\\ of\nfault')
    PrometheusSink(written.campaign(), {"file": str(written.run_dir / "metrics.prom")}).refresh()
    assert samples((written.run_dir / "metrics.prom").read_text())["resilient_faults_total", 'odd "kind"\\ of\nfault'] == 1


def test_nobody_ever_reads_half_a_file(campaign, tmp_path: Path):
    """And the directory never has another file that the collector would take."""
    directory = tmp_path / "textfile"
    directory.mkdir()
    sink = PrometheusSink(campaign.campaign(), {"file": str(directory / "a.prom"), "every_s": 1e-9})
    sink.refresh()
    whole, seen = (directory / "a.prom").read_text(), set()
    reading, over = threading.Event(), threading.Event()

    def read() -> None:
        while not over.is_set():
            seen.update(path.read_text() for path in directory.glob("*.prom"))
            reading.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert reading.wait(120.0)
    for _ in range(200):
        sink.refresh()
    over.set()
    reader.join()
    assert seen == {whole}
    assert [path.name for path in directory.iterdir()] == ["a.prom"]


def test_what_lies_outside_of_the_run_directory_may_be_read_by_the_collector(
    written, tmp_path: Path, request: pytest.FixtureRequest
):
    before = os.umask(0o027)
    request.addfinalizer(lambda: os.umask(before))
    for file, mode in ((tmp_path / "a.prom", 0o644), (written.run_dir / "a.prom", 0o640)):
        PrometheusSink(written.campaign(), {"file": str(file)}).refresh()
        assert stat.S_IMODE(file.stat().st_mode) == mode


def test_a_directory_that_is_gone_is_an_error_and_comes_back(written, tmp_path: Path):
    file = tmp_path / "textfile" / "a.prom"
    sink = PrometheusSink(written.campaign(), {"file": str(file)})
    with pytest.raises(OSError, match="textfile"):
        sink.refresh()
    file.parent.mkdir()
    sink.refresh()
    assert file.exists()


def test_the_port_is_on_the_loopback_and_says_the_same(campaign):
    with socket.socket() as held:  # until the sink listens, so that no other process gets the port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        PrometheusSink(campaign.campaign(), {"file": str(campaign.run_dir / "metrics.prom"), "port": port}).refresh()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120.0) as answer:
        assert samples(answer.read().decode()) == samples((campaign.run_dir / "metrics.prom").read_text())


def test_a_port_that_is_taken_is_told_once_costs_no_file_and_is_opened_when_it_is_free(written, caplog: pytest.LogCaptureFixture):
    file = written.run_dir / "metrics.prom"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        sink = PrometheusSink(written.campaign(), {"file": str(file), "port": port, "every_s": 1e-9})
        for _ in range(3):
            file.unlink(missing_ok=True)
            sink.refresh()
            assert file.exists()
    (told,) = caplog.messages
    assert f"port {port} cannot be opened" in told
    sink.refresh()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120.0) as answer:
        assert b"resilient_up" in answer.read()
    sink.close()
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.1", port))


def test_between_two_jobs_no_port_is_opened(written):
    file = written.run_dir / "metrics.prom"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        other.listen()
        sink = PrometheusSink(written.campaign(alive=lambda: False), {"file": str(file), "port": port})
    sink.refresh()
    assert file.exists()
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.1", port))


def test_the_dashboard_asks_only_for_what_is_there():
    board = json.loads((ROOT / "docs/grafana.json").read_text())
    asked = {target["expr"] for panel in board["panels"] for target in panel.get("targets", [])}
    names = {name for expression in asked for name in re.findall(r"resilient_\w+", expression)}
    known = {measure.name for measure in MEASURES} | {f"{STEP_SECONDS}_{part}" for part in ("bucket", "sum", "count")}
    assert names and names <= known
    assert all('run="$run"' in expression for expression in asked)


def test_every_measure_is_documented():
    text = (ROOT / "docs/metrics.md").read_text()
    assert {measure.name for measure in MEASURES if f"`{measure.name}`" not in text} == set()
