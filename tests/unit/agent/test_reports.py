"""What an agent reports, in which order and how often; with real heartbeat regions."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from parts import FakeWorkers

from checkpoint.framing import Decoder, encode
from checkpoint.protocol import Held, NodeShard, SnapshotKey
from resilient.agent import reports as reports_module
from resilient.agent.limits import QUIET_S, REGION_POLL_S
from resilient.agent.reports import Reports
from resilient.heartbeat.layout import PHASES
from resilient.heartbeat.region import salvage
from resilient.protocol.messages import AgentMessage, Report

SHARD = NodeShard(tier="ram", directory="/dev/shm/a", key=SnapshotKey(5, 1), shard=0, shards=1, size_bytes=10)
NEWS = Held(generation=1, shard=SHARD)
SMALL, LARGE = 0.2, 1.0


class Setting:
    def __init__(self, directory: Path, ranks: int = 2) -> None:
        self.now = 100.0
        self.sent: list[tuple[Report, bool]] = []
        self.takes = True
        self.workers = FakeWorkers(directory, ranks)
        self.reports = Reports(self._send, lambda: 7, clock=lambda: self.now)

    def _send(self, report: Report, droppable: bool) -> bool:
        if self.takes or not droppable:
            self.sent.append((report, droppable))
            return True
        return False

    def begin(self, report_s: float) -> None:
        self.reports.begin(self.workers, report_s)  # type: ignore[arg-type]

    def taken(self) -> list[Report]:
        found, self.sent = [report for report, _ in self.sent], []
        return found


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(tmp_path)
    yield made
    made.workers.close()


def test_a_report_has_all_that_is_new_and_the_present_generation(setting: Setting):
    setting.begin(LARGE)
    setting.workers.workers[1].report("resumed", {"step": 4})
    setting.workers.workers[0].beat(5)
    setting.reports.add_news([NEWS])
    setting.reports.report()
    (report,) = setting.taken()
    assert (report.generation, report.heartbeats[0].step, report.heartbeats[1].step) == (7, 5, -1)
    assert [(record.rank, record.event, record.fields) for record in report.records] == [(1, "resumed", {"step": 4})]
    assert report.news == (NEWS,)


def test_a_step_is_never_reported_before_the_records_that_came_before_it(setting: Setting):
    """The records are read after the heartbeats: what a rank reports between the two goes along."""
    setting.begin(SMALL)
    heartbeats = setting.workers.heartbeats

    def then_it_resumes():  # type: ignore[no-untyped-def]
        found = heartbeats()
        setting.workers.workers[0].report("resumed", {"step": 4})
        return found

    setting.workers.workers[0].beat(5)
    setting.workers.heartbeats = then_it_resumes  # type: ignore[method-assign]
    setting.reports.report()
    (report,) = setting.taken()
    assert [record.event for record in report.records] == ["resumed"]


def test_in_a_small_world_news_goes_at_once_with_the_records_before_it(setting: Setting):
    setting.begin(SMALL)
    setting.workers.workers[0].report(None, {"step": 5, "loss": 0.5})
    setting.reports.add_news([NEWS])
    (report,) = setting.taken()
    assert (len(report.records), report.news, dict(report.heartbeats)) == (1, (NEWS,), {})


def test_in_a_large_world_news_and_records_wait_for_the_next_report(setting: Setting):
    setting.begin(LARGE)
    for _ in range(20):  # seconds; a step, a record and a snapshot in each
        for _ in range(10):
            setting.now += 0.1
            if setting.reports.due_in_s() < 1e-6:
                setting.reports.report()
            setting.reports.tick()
        setting.workers.workers[0].beat(round(setting.now))
        setting.workers.workers[0].report(None, {"step": round(setting.now)})
        setting.reports.add_news([NEWS])
    sent = setting.taken()
    assert len(sent) <= 21
    assert sum(len(report.news) for report in sent) == sum(len(report.records) for report in sent) == 19


def test_a_look_is_due_as_often_as_the_driver_wants_reports_but_no_oftener_than_a_look_is_worth(setting: Setting):
    for report_s, look_s in ((SMALL, REGION_POLL_S), (LARGE, LARGE), (60.0, QUIET_S)):
        setting.begin(report_s)
        assert setting.reports.due_in_s() == 0
        setting.reports.report()
        assert setting.reports.due_in_s() == pytest.approx(look_s)


def test_without_workers_news_is_reported_all_the_same(setting: Setting):
    setting.begin(LARGE)
    setting.reports.report()
    setting.reports.end()
    setting.taken()
    setting.reports.add_news([NEWS])
    setting.reports.tick()
    assert not setting.taken()
    setting.now += LARGE
    setting.reports.tick()
    (report,) = setting.taken()
    assert report.news == (NEWS,)


def test_heartbeats_that_have_not_changed_are_reported_seldom(setting: Setting):
    setting.begin(SMALL)
    setting.workers.workers[0].enter(PHASES.index("step"))
    setting.reports.report()
    setting.now += REGION_POLL_S
    setting.reports.report()
    assert len(setting.taken()) == 1
    setting.now += QUIET_S
    setting.reports.report()
    assert len(setting.taken()) == 1


def test_heartbeats_alone_may_be_dropped_and_are_reported_again_once_the_driver_reads(setting: Setting):
    setting.begin(SMALL)
    setting.takes = False
    setting.workers.workers[0].beat(5)
    setting.reports.report()
    assert not setting.taken()
    setting.takes = True
    setting.now += REGION_POLL_S
    setting.reports.report()
    (report,) = setting.taken()
    assert report.heartbeats[0].step == 5


def test_what_has_records_or_news_is_never_dropped(setting: Setting):
    setting.begin(SMALL)
    setting.workers.workers[0].report("note", {})
    setting.workers.workers[0].beat(1)
    setting.reports.report()
    assert [droppable for _, droppable in setting.sent] == [False]


def test_the_last_records_go_before_the_workers_are_forgotten_and_nothing_is_sent_where_there_is_nothing(setting: Setting):
    setting.begin(SMALL)
    setting.workers.workers[0].report("note", {"n": 1})
    setting.reports.end()
    (report,) = setting.taken()
    assert len(report.records) == 1
    setting.reports.flush()
    assert not setting.taken()


def test_records_keep_their_room_until_the_driver_has_written_them(setting: Setting):
    setting.begin(SMALL)
    for number in range(3):
        setting.workers.workers[0].report("note", {"n": number})
    setting.reports.flush()
    setting.reports.written(2)
    path = setting.workers.regions[0].path
    assert [record.fields for record in salvage(path)] == [{"n": 2}]
    assert [record.fields for record in setting.reports.unwritten[7]] == [{"n": 2}]
    setting.reports.written(99)
    assert not salvage(path) and not setting.reports.unwritten


def test_an_agent_that_has_not_looked_for_long_does_not_hold_the_silence_against_anybody(setting: Setting):
    setting.begin(SMALL)
    setting.reports.report()
    setting.now += REGION_POLL_S
    setting.reports.report()
    assert not setting.workers.watched_anew
    setting.now += 5.0
    setting.reports.report()
    assert setting.workers.watched_anew == 1


def test_many_records_are_sent_in_parts_and_in_order(setting: Setting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reports_module, "RECORDS_BYTES", 500)
    setting.begin(SMALL)
    for number in range(100):
        setting.workers.workers[0].report("note", {"n": number})
    setting.workers.workers[0].beat(9)
    setting.reports.report()
    sent = setting.taken()
    assert len(sent) > 3
    assert all(len(encode(report)) < 1500 for report in sent)
    assert [record.fields["n"] for report in sent for record in report.records] == list(range(100))
    assert [bool(report.heartbeats) for report in sent] == [False] * (len(sent) - 1) + [True]


@pytest.mark.parametrize(
    "fields", [{"loss": math.nan}, {"losses": [1.0, math.inf]}, {"text": "\ud800"}, {"big": 1 << 70}, {"b": b"x"}, {"loss": 0.5}]
)
def test_a_record_arrives_with_what_it_held(setting: Setting, fields: dict[str, object]):
    setting.begin(SMALL)
    setting.workers.workers[0].report(None, fields)
    setting.reports.flush()
    (report,) = setting.taken()
    (arrived,) = Decoder[AgentMessage](AgentMessage).feed(encode(report))
    assert isinstance(arrived, Report)
    wanted = {"b": "b'x'"} if "b" in fields else fields
    assert repr(dict(arrived.records[0].fields)) == repr(wanted)
