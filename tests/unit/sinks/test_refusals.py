"""What a receiver refuses for good is passed over, and what comes after it is taken: real packages, a real HTTP server."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from resilient.sinks import pump
from resilient.sinks.base import Campaign, Line, NotTaken, Sink
from resilient.sinks.command import send
from resilient.sinks.following import LineFile
from resilient.sinks.position import Position
from resilient.sinks.process import made
from resilient.sinks.pump import Pump
from resilient.sinks.trackers import mlflow_name
from resilient.sinks.webhook import is_for_good

PATIENCE_S = 60.0

GIVING_UP = """
import sys
from pathlib import Path
from resilient.sinks import command
command.GIVE_UP_S = 2.0
command.send(Path(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "POLL_S", 0.05)
    monkeypatch.setattr(pump, "LONGEST_PAUSE_S", 0.2)


def fed(name: str, written: Any, make: Any = None, **settings: Any) -> Pump:
    """What is there is fed to the end, as at the end of a job."""
    ending = threading.Event()
    ending.set()
    feeding = Pump(name, make or made(name), written.campaign(), settings, began_t=0.0, ending=ending)
    feeding.start()
    feeding.join(PATIENCE_S)
    assert not feeding.is_alive(), "it has not come to the end"
    return feeding


def wait_for(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def history(run_dir: Path, name: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    client = MlflowClient((run_dir / "mlruns").as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("demo").experiment_id])
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]


def test_metrics_whose_names_mlflow_refuses_are_there_by_names_that_it_takes(written):
    written.started()
    for step in (1, 2):
        written.step(step, **{"acc@5": 0.5, "top-1 (%)": 40.0, "loss[0]": 1.0, "../up": 2.0, "x" * 400: 3.0})
    written.step(3)
    fed("mlflow", written)
    assert history(written.run_dir, "train/loss") == [(step, 5.0 / step) for step in (1, 2, 3)]
    assert history(written.run_dir, "train/acc_5") == [(1, 0.5), (2, 0.5)]


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("train/loss", "train/loss"),
        ("train/acc@5", "train/acc_5"),
        ("train/top-1 (%)", "train/top-1 ___"),
        ("train/loss[0]", "train/loss_0_"),
        ("train//a/./../b/", "train/a/_/__/b"),
        ("train/a\nb", "train/a_b"),
        ("train/" + "x" * 300, "train/" + "x" * 244),
        ("/", "_"),
    ],
)
def test_the_names_that_mlflow_takes(name: str, taken: str):
    assert mlflow_name(name) == taken


def test_a_metric_that_the_file_store_cannot_keep_costs_no_other(written, caplog):
    """Its name is that of a directory where there is a file."""
    written.started()
    for step in (1, 2, 3):
        written.step(step, **{"loss/ce": 1.0, "later": 2.0})
    assert fed("mlflow", written).passed_over == 0
    assert sorted(set(history(written.run_dir, "train/later"))) == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert sorted(set(history(written.run_dir, "train/loss"))) == [(step, 5.0 / step) for step in (1, 2, 3)]
    assert caplog.text.count("train/loss/ce at step 1 is passed over") == 1


def test_an_event_that_a_server_refuses_is_passed_over_and_the_alert_behind_it_goes_out(written, receiver, caplog):
    receiver.refuses = lambda body: 400 if b"poison" in body else None
    written.started()
    written.fault(1, kind="poison")
    written.fault(2, generation=2)
    written.finished(70, generation=3)
    assert fed("webhook", written, url=receiver.url).passed_over == 1
    assert [each["type"] for each in receiver.told()] == ["recovered", "fault", "recovered", "gave_up"]
    assert "passed over" in caplog.text and "400" in caplog.text


def test_what_is_too_long_for_a_server_is_sent_by_itself_and_shortened(written, receiver):
    receiver.refuses = lambda body: 413 if len(body) > 4000 else None
    written.started()
    for number in range(1, 9):
        written.fault(number, generation=number)
    long = {"kind": "exception", "ranks": [1], "nodes": [0], "step": 3, "detail": "d" * 3000, "detect_s": 0.1}
    written.event("fault", 9, fault_id="long", evidence="e" * 100_000, more={"stacks": ["s" * 9000] * 9}, **long)
    written.finished(70, generation=9)
    assert fed("webhook", written, url=receiver.url).passed_over == 0
    told = receiver.told()
    assert len(told) == 18
    assert (told[-2]["fault_id"], told[-1]["type"]) == ("long", "gave_up")
    assert told[-2]["evidence"].endswith("…") and json.loads(receiver.bodies[-2])["text"].startswith("demo: fault long")


@pytest.mark.parametrize(
    ("status", "for_good"),
    [(400, True), (413, True), (422, True), *((status, False) for status in (302, 401, 403, 404, 408, 410, 429, 500, 503))],
)
def test_what_a_server_refuses_for_good_is_told_by_its_answer(status: int, for_good: bool):
    assert is_for_good(status) is for_good


class Fussy(Sink):
    """Takes lines one by one or together, but for one that makes it raise what nobody knows."""

    files = ("metrics.jsonl",)

    def __init__(self, bad: int) -> None:
        self.bad = bad
        self.steps: list[int] = []

    def __call__(self, campaign: Campaign, settings: Mapping[str, Any]) -> Sink:
        return self

    def take(self, lines: Sequence[Line]) -> None:
        steps = [line.entry["step"] for line in lines]
        if self.bad in steps:
            raise LookupError(f"no room for {steps}")
        self.steps += steps


@pytest.mark.parametrize("most", [1, 2, 1000])
def test_a_line_that_alone_makes_a_sink_fail_is_passed_over_while_it_takes_others(written, most: int):
    for step in range(1, 8):
        written.step(step)
    sink = Fussy(bad=2)
    sink.most = most
    assert fed("fussy", written, sink).passed_over == 1
    assert sink.steps == [1, 3, 4, 5, 6, 7]


def test_what_fails_last_waits_for_lines_that_are_taken(written):
    """Until then it may be the sink that does not work."""
    written.step(1)
    ending, sink = threading.Event(), Fussy(bad=2)
    feeding = Pump("fussy", sink, written.campaign(), {}, began_t=0.0, ending=ending)
    feeding.start()
    written.step(2)
    while feeding.failing_s == 0.0:
        time.sleep(0.01)
    assert (feeding.passed_over, feeding.is_alive()) == (0, True)
    for step in (3, 4, 5):
        assert (feeding.passed_over, feeding.is_alive()) == (0, True)
        written.step(step)
        wait_for(lambda step=step: step in sink.steps)
    ending.set()
    feeding.join(PATIENCE_S)
    assert not feeding.is_alive()
    assert (sink.steps, feeding.passed_over) == ([1, 3, 4, 5], 1)


class Flapping(Sink):
    """Is up and down as it is told, call by call of a single line, and up from then on."""

    files = ("metrics.jsonl",)

    def __init__(self, up: Sequence[bool]) -> None:
        self.up = list(up)
        self.steps: list[int] = []

    def __call__(self, campaign: Campaign, settings: Mapping[str, Any]) -> Sink:
        return self

    def take(self, lines: Sequence[Line]) -> None:
        if self.up and (len(lines) > 1 or not self.up.pop(0)):
            raise LookupError("down")
        self.steps += [line.entry["step"] for line in lines]


@pytest.mark.parametrize(
    "up",
    [
        (False, True, False),
        (False, False, True, False),
        (False, True, False, True),
        (False, True, False, False, False, False, False),
    ],
)
def test_no_line_is_passed_over_for_a_receiver_that_comes_and_goes(written, up: Sequence[bool]):
    for step in range(1, 7):
        written.step(step)
    sink = Flapping(up)
    assert fed("flapping", written, sink).passed_over == 0
    assert sorted(sink.steps) == [1, 2, 3, 4, 5, 6]


def test_what_is_kept_of_the_position_is_before_every_line_that_was_not_taken(written):
    """Those behind it that were taken come again, rather than that it is lost."""
    for step in (1, 2, 3):
        written.step(step)
    sink = Fussy(bad=2)
    ending = threading.Event()
    feeding = Pump("fussy", sink, written.campaign(), {}, began_t=0.0, ending=ending)
    feeding.start()
    kept = written.run_dir / "sinks" / "fussy.json"
    wait_for(lambda: sink.steps == [1, 3] and json.loads(kept.read_text())["at_bytes"])
    first = (written.run_dir / "metrics.jsonl").read_bytes().index(b"\n") + 1
    assert json.loads(kept.read_text())["at_bytes"] == {"metrics.jsonl": first}
    sink.bad = 0
    wait_for(lambda: sink.steps == [1, 3, 2])
    ending.set()
    feeding.join(PATIENCE_S)
    assert not feeding.is_alive()


def test_a_sink_that_takes_lines_one_by_one_is_not_one_at_which_nothing_goes_well(written, monkeypatch: pytest.MonkeyPatch):
    """Or the command would give up on it in the midst of many lines, and begin with the first of them the next time."""
    for step in range(1, 6):
        written.step(step)
    failing_s: list[float] = []
    t = time.monotonic()
    clock = type("Clock", (), {"monotonic": lambda: t + 100.0 * len(failing_s), "sleep": time.sleep})
    monkeypatch.setattr(pump, "time", clock)
    sink = Fussy(bad=2)
    taking = sink.take

    def take(lines: Sequence[Line]) -> None:
        if len(lines) == 1:
            failing_s.append(feeding.failing_s)
        taking(lines)

    monkeypatch.setattr(sink, "take", take)
    ending = threading.Event()
    ending.set()
    feeding = Pump("fussy", sink, written.campaign(), {}, began_t=0.0, ending=ending)
    feeding.start()
    feeding.join(PATIENCE_S)
    assert not feeding.is_alive()
    assert len(failing_s) > 5
    assert max(failing_s) <= 200.0


def test_an_mlflow_server_that_is_down_refuses_nothing(written, monkeypatch: pytest.MonkeyPatch):
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

    written.started()
    written.step(1)
    written.finished()
    sink = made("mlflow")(written.campaign(), {})
    read = [LineFile(written.run_dir / name, 0).read() for name in sink.files]

    def down(*_: Any, **__: Any) -> None:
        raise MlflowException("API request failed with exception: connection refused")

    def names(*_: Any, **__: Any) -> None:
        raise MlflowException("Invalid metric name", error_code=INVALID_PARAMETER_VALUE)

    for call in ("log_batch", "get_run", "set_terminated", "log_metric"):
        monkeypatch.setattr(MlflowClient, call, down)
    for lines in read:
        with pytest.raises(NotTaken, match="connection refused"):
            sink.take(lines)
        with pytest.raises(NotTaken, match="connection refused"):
            sink.take(lines[-1:])
    monkeypatch.setattr(MlflowClient, "log_batch", names)
    with pytest.raises(NotTaken, match="connection refused"):
        sink.take(read[1])


def configured(written: Any, url: str, request: pytest.FixtureRequest) -> None:
    before = os.umask(0o077)  # which the command sets, too
    request.addfinalizer(lambda: os.umask(before))
    config = {"name": "demo", "run_dir": str(written.run_dir), "logging": {"sinks": {"webhook": {"url": url}}}}
    (written.run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    Position(written.run_dir, "webhook", written.t).close()


def test_the_command_gives_up_on_a_receiver_that_is_down_and_keeps_what_was_not_sent(
    written, receiver, request: pytest.FixtureRequest
):
    configured(written, receiver.url, request)
    written.started()
    written.fault(1)
    receiver.status = 503
    # In a process of its own, whose end is that of the thread which still tries.
    done = subprocess.run([sys.executable, "-c", GIVING_UP, str(written.run_dir)], capture_output=True, text=True, check=False)
    assert re.search(r"EnvironmentUnusable: not all was sent: webhook \(.*503.*\)", done.stderr), done.stderr
    assert receiver.bodies == []
    receiver.status = 200
    assert send(written.run_dir) == "all was sent"
    assert [each["type"] for each in receiver.told()] == ["fault", "recovered"]


def test_ctrl_c_ends_the_command_and_it_does_not_say_that_all_was_sent(written, receiver, request: pytest.FixtureRequest):
    configured(written, receiver.url, request)
    written.started()
    written.fault(1)
    receiver.status = 503
    command = "import sys; from pathlib import Path; from resilient.sinks.command import send; print(send(Path(sys.argv[1])))"
    process = subprocess.Popen([sys.executable, "-c", command, str(written.run_dir)], stdout=subprocess.PIPE, text=True)
    wait_for(lambda: receiver.asked)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_S)[0] == "not all was sent: webhook\n"


def test_failures_that_take_turns_are_told_once_each_until_it_works_again(written, caplog):
    class Turning(Sink):
        files = ("events.jsonl",)
        tries = 0

        def take(self, lines: Sequence[Line]) -> None:
            self.tries += 1
            if self.tries < 6:
                raise OSError(("reset", "broken pipe")[self.tries % 2])

    written.started()
    fed("turning", written, lambda *_: Turning())
    told = [each for each in caplog.messages if "works again" not in each]
    assert told == ["turning: OSError: broken pipe", "turning: OSError: reset"]


def test_an_mlflow_server_that_fails_is_told_at_once(written, receiver):
    """By itself its client tries for minutes, in silence."""
    receiver.status = 500
    from mlflow.exceptions import MlflowException

    began_t = time.monotonic()
    with pytest.raises(MlflowException, match="500"):
        made("mlflow")(written.campaign(), {"uri": receiver.url.removesuffix("/hook")})
    assert time.monotonic() - began_t < 30.0
