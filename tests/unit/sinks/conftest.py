"""Run directories that are written as the driver writes them, and servers that can hang, fail and come back."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from resilient import ledger
from resilient.sinks.base import Campaign
from resilient.sinks.following import TotalsReader


class Written:
    """A run directory whose two files grow. `t` is the time of the next line."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(exist_ok=True)
        self.run_dir = run_dir
        self.t = 1_000_000.0
        self._ledger = ledger.Ledger(run_dir)

    def event(self, name: str, generation: int = 1, /, **fields: Any) -> None:
        self._ledger.event(name, fields, generation=generation, t=self.t, host="here")

    def started(self, ranks: int = 2) -> None:
        self.event("run_started", name="demo", target_step=100)
        self.t += 2.0
        self.event("generation_started", nodes=["here"], world_size=ranks, resumed_step=None)

    def step(self, step: int, generation: int = 1, step_s: float = 0.5, **more: Any) -> None:
        self.t += step_s
        fields = {"step": step, "loss": 5.0 / step, "step_s": step_s, "tokens_per_s": 100.0, **more}
        self._ledger.metrics(fields, generation=generation, t=self.t)

    def fault(self, number: int, kind: str = "exit", generation: int = 1, lost: int = 2) -> None:
        """A fault that costs three seconds, and its recovery."""
        name = f"f{number}"
        fields = {"ranks": [1], "nodes": [0], "step": 3, "detail": "it died", "evidence": "", "detect_s": 0.5}
        self.event("fault", generation, fault_id=name, kind=kind, **fields)
        self.event("action", generation, fault_id=name, name="restart_workers", reason="it died")
        self.t += 3.0
        self.event("generation_started", generation + 1, nodes=["here"], world_size=2, resumed_step=1)
        self.event("recovered", generation + 1, fault_id=name, step=3, downtime_s=3.0, lost_steps=lost)

    def finished(self, code: int = 0, generation: int = 1) -> None:
        self.event("run_finished", generation, exit_code=code, step=3)

    def campaign(self, alive: Callable[[], bool] = lambda: True) -> Campaign:
        return Campaign("demo", "abc", self.run_dir, TotalsReader(self.run_dir, alive), alive)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "run")


class Receiver:
    """A real HTTP server.

    Attributes:
        status: what it answers.
        refuses, refuses_path: what it answers to a body, or at a path, in place of that, if anything.
        open: cleared: it takes requests and does not answer until it is set again.
        asked: how many requests have come.
        bodies: those that it took, to answer them with 200; `heads` and `paths` belong to them.
    """

    def __init__(self) -> None:
        self.status = 200
        self.refuses: Callable[[bytes], int | None] = lambda body: None
        self.refuses_path: Callable[[str], int | None] = lambda path: None
        self.open = threading.Event()
        self.open.set()
        self.asked = 0
        self.bodies: list[bytes] = []
        self.heads: list[dict[str, str]] = []
        self.paths: list[str] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.asked += 1
                receiver.open.wait()
                status = receiver.refuses(body) or receiver.refuses_path(self.path) or receiver.status
                if status == 200:
                    receiver.bodies.append(body)
                    receiver.heads.append(dict(self.headers))
                    receiver.paths.append(self.path)
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", "0")
                    self.send_header("Location", "/elsewhere")
                    self.end_headers()
                except OSError:
                    return  # nobody waited for the answer

            def do_GET(self) -> None:
                receiver.asked += 1
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def told(self) -> list[dict[str, Any]]:
        """The events that were taken, in order."""
        return [event for body in list(self.bodies) for event in json.loads(body).get("events", [])]

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()
