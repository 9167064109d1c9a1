"""A webhook against a real HTTP server that hangs, fails and comes back: nothing is lost, and nothing is sent too often."""

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import yaml

from resilient.sinks.base import Line
from resilient.sinks.command import send
from resilient.sinks.following import LineFile
from resilient.sinks.position import Position
from resilient.sinks.process import made
from resilient.sinks.pump import Pump
from resilient.sinks.webhook import NotTaken, WebhookSink, type_of


def wait_for(what: Callable[[], Any], patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


class Fed:
    """A pump of the webhook, as the process runs it."""

    def __init__(self, written, receiver, began_t: float = 0.0, **settings: Any) -> None:
        self.ending = threading.Event()
        wanted = {"url": receiver.url, "pause_s": 0.01, "timeout_s": 30.0, **settings}
        self.pump = Pump("webhook", made("webhook"), written.campaign(), wanted, began_t=began_t, ending=self.ending)
        self.pump.start()

    def end(self) -> None:
        self.ending.set()
        self.pump.join(60.0)
        assert not self.pump.is_alive()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resilient.sinks.pump.POLL_S", 0.05)
    monkeypatch.setattr("resilient.sinks.pump.LONGEST_PAUSE_S", 0.2)


def campaign_with(written, faults: int) -> None:
    written.started()
    for number in range(1, faults + 1):
        written.step(number, number)
        written.fault(number, generation=number)
    written.finished(generation=faults + 1)


def expected(faults: int) -> list[str]:
    return [*("fault", "recovered") * faults, "finished"]


def test_what_happens_is_told_once_and_in_order(written, receiver):
    fed = Fed(written, receiver)
    campaign_with(written, 4)
    fed.end()
    told = receiver.told()
    assert [each["type"] for each in told] == expected(4)
    assert [each["fault_id"] for each in told if each["type"] == "fault"] == ["f1", "f2", "f3", "f4"]
    assert len({each["id"] for each in told}) == 9
    body = json.loads(receiver.bodies[0])
    assert body["run"] == "demo" and "fault f1: exit: rank 1 at step 3: it died" in body["text"]


@pytest.mark.parametrize("status", [500, 404, 302])
def test_a_server_that_fails_gets_all_once_it_is_back(written, receiver, status: int):
    receiver.status = status
    fed = Fed(written, receiver)
    campaign_with(written, 3)
    wait_for(lambda: receiver.asked >= 3)
    assert receiver.bodies == []
    receiver.status = 200
    wait_for(lambda: len(receiver.told()) >= 7)
    fed.end()
    assert [each["type"] for each in receiver.told()] == expected(3)


def test_a_server_that_hangs_gets_all_once_it_is_back(written, receiver):
    receiver.open.clear()
    fed = Fed(written, receiver, timeout_s=0.5)
    campaign_with(written, 3)
    wait_for(lambda: receiver.asked >= 2)
    assert receiver.bodies == []
    receiver.open.set()
    wait_for(lambda: "finished" in [each["type"] for each in receiver.told()])
    fed.end()
    once = {each["id"]: each["type"] for each in receiver.told()}  # a request that was given up may have arrived
    assert list(once.values()) == expected(3)


def test_what_one_process_could_not_send_the_next_one_sends(written, receiver):
    """The first one is left behind in the middle of a request, as at a driver's end."""
    fed = Fed(written, receiver)
    written.started()
    written.fault(1)
    wait_for(lambda: len(receiver.told()) == 2)
    receiver.open.clear()
    written.fault(2, generation=2)
    wait_for(lambda: receiver.asked > len(receiver.bodies))
    written.finished(70, generation=3)
    receiver.open.set()
    fed.end()
    again = Fed(written, receiver)
    again.end()
    once = {each["id"]: each["type"] for each in receiver.told()}
    assert list(once.values()) == ["fault", "recovered", "fault", "recovered", "gave_up"]


def test_a_job_in_which_nothing_could_be_sent_leaves_all_of_it_to_the_next_one(written, receiver):
    Position(written.run_dir, "webhook", written.t).close()
    written.started()
    written.fault(1)
    written.t += 100.0
    fed = Fed(written, receiver, began_t=written.t)
    fed.end()
    assert [each["type"] for each in receiver.told()] == ["fault", "recovered"]


def test_nobody_feeds_a_sink_that_somebody_else_feeds(written, receiver):
    other = Position(written.run_dir, "webhook", 0.0)
    fed = Fed(written, receiver)
    written.started()
    written.fault(1)
    time.sleep(0.5)  # several tries
    assert receiver.asked == 0
    other.close()
    wait_for(lambda: len(receiver.told()) == 2)
    fed.end()


def test_what_happened_before_it_was_configured_is_not_told(written, receiver):
    written.started()
    written.fault(1)
    written.t += 10.0
    fed = Fed(written, receiver, began_t=written.t - 5.0)
    written.fault(2, generation=2)
    fed.end()
    assert [each.get("fault_id") for each in receiver.told()] == ["f2", "f2"]


def test_what_happens_after_a_clock_was_ahead_is_told(written, receiver):
    written.started()
    written.t += 7200.0
    fed = Fed(written, receiver, began_t=written.t)
    written.fault(1)
    fed.end()
    written.t -= 7200.0
    Fed(written, receiver, began_t=written.t).end()
    written.fault(2, generation=2)
    Fed(written, receiver, began_t=written.t).end()
    assert [each.get("fault_id") for each in receiver.told()] == ["f1", "f1", "f2", "f2"]


def test_what_comes_once_all_that_was_there_is_read_is_told_whatever_the_clock_says(written, receiver):
    campaign_with(written, 1)
    Fed(written, receiver, began_t=written.t + 7200.0).end()  # its own job has said nothing
    campaign_with(written, 1)
    Fed(written, receiver, began_t=written.t).end()
    assert [each["type"] for each in receiver.told()] == expected(1)


def test_a_process_that_ends_amid_what_happened_before_has_the_next_one_tell_none_of_it(
    written, receiver, monkeypatch: pytest.MonkeyPatch
):
    campaign_with(written, 3)
    monkeypatch.setattr("resilient.past.stream.BLOCK_BYTES", 1000)
    reads, read, back = [0], LineFile.read, threading.Event()

    def stuck(file: LineFile) -> list[Line]:
        reads[0] += 1
        if reads[0] > 1 and not back.is_set():
            raise OSError("the file system has gone away")
        return read(file)

    monkeypatch.setattr(LineFile, "read", stuck)
    fed = Fed(written, receiver, began_t=written.t + 1.0)
    wait_for(lambda: reads[0] > 1)
    kept = msgspec.json.decode((written.run_dir / "sinks" / "webhook.json").read_bytes())
    back.set()
    assert kept["at_bytes"] == {}
    written.t += 2.0
    written.fault(4)
    fed.end()
    assert [each.get("fault_id") for each in receiver.told()] == ["f4", "f4"]


def test_only_what_is_asked_for_is_told(written, receiver):
    fed = Fed(written, receiver, events=["started", "finished"])
    campaign_with(written, 3)
    fed.end()
    assert [each["type"] for each in receiver.told()] == ["started", "finished"]


def test_a_thousand_faults_at_once_are_a_few_requests(written, receiver):
    written.started()
    for number in range(1000):
        written.fault(number)
    fed = Fed(written, receiver, most=500)
    fed.end()
    assert len(receiver.told()) == 2000
    assert len(receiver.bodies) == 4


def test_between_two_requests_there_is_a_pause_in_which_lines_wait(written, receiver):
    fed = Fed(written, receiver, pause_s=3600.0)
    written.started()
    written.fault(1)
    wait_for(receiver.told)
    first = len(receiver.told())
    for number in range(2, 6):
        written.fault(number, generation=number)
    written.finished(generation=6)
    time.sleep(0.5)  # several polls
    assert len(receiver.told()) == first
    fed.end()  # at the end nothing waits
    assert len(receiver.told()) == 11


def test_a_beat_says_how_far_training_is_while_the_driver_gets_on(written, receiver):
    written.started()
    written.step(7)
    alive = [True]
    sink = WebhookSink(written.campaign(alive=lambda: alive[0]), {"url": receiver.url, "beat_s": 0.001})
    sink.refresh()
    beat = json.loads(receiver.bodies[0])["beat"]
    assert (beat["step"], beat["target_step"]) == (7, 100)
    alive[0] = False
    time.sleep(0.01)
    sink.refresh()
    assert len(receiver.bodies) == 1


def test_beats_go_on_where_they_go_elsewhere_than_events_that_are_not_taken(written, receiver):
    """Else the address of alerts that is down would look like a driver that is dead."""
    receiver.refuses = lambda body: 503 if b'"events"' in body else None
    written.started()
    written.fault(1)
    fed = Fed(written, receiver, beat_s=0.001, beat_url=receiver.url)
    wait_for(lambda: len(receiver.bodies) > 3)
    receiver.refuses = lambda body: None
    fed.end()
    assert [each["type"] for each in receiver.told()] == ["fault", "recovered"]


def test_between_two_jobs_what_was_missed_is_sent_and_no_beat(written, receiver, request: pytest.FixtureRequest):
    before = os.umask(0o077)  # which the command sets, too
    request.addfinalizer(lambda: os.umask(before))
    sinks = {"webhook": {"url": receiver.url, "beat_s": 0.001}}
    config = {"name": "demo", "run_dir": str(written.run_dir), "logging": {"sinks": sinks}}
    (written.run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    Position(written.run_dir, "webhook", written.t).close()
    campaign_with(written, 1)
    assert send(written.run_dir) == "all was sent"
    assert [each["type"] for each in receiver.told()] == expected(1)
    assert not any("beat" in json.loads(body) for body in receiver.bodies)


def test_address_and_token_may_come_from_files(written, receiver, tmp_path):
    (tmp_path / "url").write_text(receiver.url + "\n")
    (tmp_path / "token").write_text("secret\n")
    settings = {"url_file": str(tmp_path / "url"), "token_file": str(tmp_path / "token")}
    fault = {"event": "fault", "t": 1.0, "fault_id": "f", "kind": "exit", "nodes": [], "ranks": [], "step": 1, "detail": "d"}
    WebhookSink(written.campaign(), settings).take([Line("events.jsonl", 10, fault)])
    assert receiver.heads[0]["Authorization"] == "Bearer secret"


def test_a_redirection_is_not_followed(written, receiver):
    receiver.status = 302
    with pytest.raises(NotTaken, match="302"):
        WebhookSink(written.campaign(), {"url": receiver.url})._post(receiver.url, {})
    assert receiver.asked == 1


def test_the_types():
    assert type_of({"event": "run_finished", "exit_code": 70}) == "gave_up"
    assert type_of({"event": "run_finished", "exit_code": 75}) == "finished"
    assert type_of({"event": "snapshot"}) is None
