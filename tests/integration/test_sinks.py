"""Sinks of a real campaign: what hangs, fails, is killed or stopped costs training nothing, and nothing is lost."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from campaigns import ROOT, Campaign, wait_for
from prometheus_client.parser import text_string_to_metric_families

STEPS = 60


class Receiver:
    """A server that takes requests and answers them while it is `open`."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.asked = 0
        self.events: dict[str, dict[str, Any]] = {}
        self.beats: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.asked += 1
                receiver.open.wait()
                receiver.events.update((event["id"], event) for event in body.get("events", []))
                receiver.beats += [body["beat"]] if "beat" in body else []
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # whoever has asked does not wait any more

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def types(self) -> list[str]:
        """In the order in which they stand in the ledger."""
        return [each["type"] for _, each in sorted(self.events.items(), key=lambda item: int(item[0].rpartition("-")[2]))]

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def webhook(receiver: Receiver, **more: Any) -> dict[str, Any]:
    events = ["started", "fault", "recovered", "gave_up", "finished"]
    settings = {"url": receiver.url, "events": events, "pause_s": 0.1, "timeout_s": 2.0, **more}
    return {"tensorboard": False, "sinks": {"webhook": settings, "prometheus": {"every_s": 0.5}}}


def sink_processes(run: Campaign) -> list[psutil.Process]:
    return [each for each in run.processes() if "resilient.sinks.process" in each.cmdline()]


def feed(run: Campaign, *packages: Path) -> str:
    """`resilient sinks`. Args: packages: where Python finds more."""
    command = [sys.executable, "-m", "resilient", "sinks", str(run.run_dir)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*packages, ROOT]))}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environ, timeout=120).stdout


def prometheus(run_dir: Path) -> dict[str, float]:
    """The values without a label of their own, by name."""
    families = text_string_to_metric_families((run_dir / "metrics.prom").read_text())
    return {sample.name: sample.value for family in families for sample in family.samples if len(sample.labels) == 1}


Counting = Callable[..., Campaign]


@pytest.mark.soak
def test_a_receiver_that_hangs_holds_up_nothing_and_gets_all_once_it_is_back_but_not_by_a_config_that_others_may_write(
    counting: Counting, receiver: Receiver
):
    run = counting(steps=STEPS, args={"holds": STEPS - 10}, logging=webhook(receiver)).start()
    run.reach(10)
    os.kill(run.workers()[1], signal.SIGKILL)
    log = run.run_dir / "logs/sinks.log"  # of a process that gets a busy processor last
    wait_for(lambda: log.exists() and "webhook: TimeoutError" in log.read_text(), "a request in vain")
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    assert receiver.asked >= 1 and receiver.events == {}
    assert [event["kind"] for event in run.events("fault")] == ["exit"]
    assert run.step() == STEPS and all(len(values) == 1 for values in run.losses().values())
    wait_for(lambda: not sink_processes(run), "the process of the sinks ends by itself")
    receiver.open.set()
    config, asked = run.run_dir / "config.yaml", receiver.asked
    mode = config.stat().st_mode
    config.chmod(0o666)
    with pytest.raises(subprocess.CalledProcessError) as refused:
        feed(run)
    assert refused.value.returncode == 69 and "config.yaml" in refused.value.stderr
    assert receiver.asked == asked
    config.chmod(mode)
    assert "all was sent" in feed(run)
    assert receiver.types() == ["started", "fault", "recovered", "finished"]
    numbers = prometheus(run.run_dir)
    assert (numbers["resilient_step"], numbers["resilient_up"], numbers["resilient_recoveries_total"]) == (STEPS, 0, 1)


@pytest.mark.soak
def test_a_process_that_is_killed_is_replaced_and_one_that_is_stopped_left_behind(counting: Counting, receiver: Receiver):
    receiver.open.set()
    run = counting(steps=400, args={"holds": 300}, logging=webhook(receiver, beat_s=0.2)).start()
    wait_for(lambda: receiver.types() == ["started"], "the first event")
    wait_for(lambda: receiver.beats and receiver.beats[-1]["step"], "a beat of a campaign that trains")
    [first] = sink_processes(run)
    first.kill()
    second = wait_for(lambda: [each for each in sink_processes(run) if each.pid != first.pid], "another process")[0]
    os.kill(run.workers()[0], signal.SIGKILL)
    wait_for(lambda: receiver.types() == ["started", "fault", "recovered"], lambda: f"a recovery: {receiver.types()}")
    second.suspend()
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    second.kill()
    assert "all was sent" in feed(run)
    assert receiver.types() == ["started", "fault", "recovered", "finished"]


PLUGIN = """
from resilient.sinks.base import Sink

class Plugin(Sink):
    files = ("metrics.jsonl",)

    def __init__(self, campaign, settings):
        self.path = campaign.run_dir / settings["file"]

    def take(self, lines):
        with self.path.open("a") as file:
            file.writelines(f"{line.entry['step']}\\n" for line in lines)
"""


@pytest.mark.soak
def test_a_sink_of_another_package_is_fed(counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "package"
    (package / "plugin-1.0.dist-info").mkdir(parents=True)
    (package / "plugin.py").write_text(PLUGIN)
    (package / "plugin-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (package / "plugin-1.0.dist-info/entry_points.txt").write_text("[resilient.sinks]\nsteps = plugin:Plugin\n")
    run = counting(steps=20, args={"holds": 10}, logging={"sinks": {"others": {"steps": {"file": "steps.txt"}}}})
    run.within = ["env", f"PYTHONPATH={package}{os.pathsep}{Path(__file__).parent}{os.pathsep}{ROOT}"]
    run.start()
    told = run.run_dir / "steps.txt"
    wait_for(lambda: told.exists() and len(told.read_text().split()) >= 10, "the steps until it stands still")
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    wait_for(lambda: not sink_processes(run), "the process of the sinks ends by itself")
    feed(run, package)  # what a busy processor did not let that process take at the end
    assert [int(line) for line in told.read_text().split()] == [each["step"] for each in run.metrics()]


def test_a_sink_that_is_not_installed_is_refused_before_anything_starts(counting: Counting):
    run = counting(steps=20, logging={"sinks": {"others": {"steps": {}}}})
    assert run.run() == 78
    assert "logging.sinks.others.steps: no installed package has an entry point in resilient.sinks for it" in run.output
    assert not run.run_dir.exists()
