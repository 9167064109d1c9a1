"""OpenTelemetry: with the SDK's in-memory exporter, and over HTTP with the protocol's own messages."""

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, LogRecordExportResult
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData

from resilient.sinks.base import Line, NotTaken, Refused
from resilient.sinks.following import LineFile
from resilient.sinks.otlp import OTLPSink
from resilient.sinks.pump import Pump


class Kept(MetricExporter):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.data: list[MetricsData] = []

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_: object) -> MetricExportResult:
        self.data.append(metrics_data)
        return MetricExportResult.SUCCESS

    def shutdown(self, timeout_millis: float = 30_000, **_: object) -> None:
        pass

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True


def lines(written) -> list[Line]:
    return [line for name in OTLPSink.files for line in LineFile(written.run_dir / name).read()]


@pytest.fixture
def campaign(written):
    written.started()
    for step in range(1, 5):
        written.step(step)
    written.step(14, steps=10)
    written.fault(1)
    return written


def test_events_are_log_records_and_measures_are_metrics(campaign):
    logs, metrics = InMemoryLogRecordExporter(), Kept()
    sink = OTLPSink(campaign.campaign(), {}, logs=logs, metrics=metrics)
    sink.take(lines(campaign))
    sink.refresh()
    records = [each.log_record for each in logs.get_finished_logs()]
    assert [each.event_name for each in records] == [
        f"resilient.{name}" for name in ("run_started", "generation_started", "fault", "action", "generation_started", "recovered")
    ]
    fault = records[2]
    assert (fault.severity_text, fault.attributes["kind"], fault.attributes["ranks"]) == ("ERROR", "exit", "[1]")
    assert fault.timestamp == int((campaign.t - 3.0) * 1e9)
    assert "rank 1 at step 3" in fault.body
    resource = logs.get_finished_logs()[0].resource.attributes
    assert (resource["service.name"], resource["resilient.run"], resource["service.instance.id"]) == ("resilient", "demo", "abc")
    found = {
        metric.name: list(metric.data.data_points)
        for scopes in metrics.data[0].resource_metrics[0].scope_metrics
        for metric in scopes.metrics
    }
    assert found["resilient_step"][0].value == 14
    assert [(dict(point.attributes), point.value) for point in found["resilient_faults_total"]] == [({"kind": "exit"}, 1)]
    steps = found["resilient_step_seconds"][0]
    assert (steps.count, steps.sum) == (14, 7.0)  # ten in one line
    assert dict(zip(steps.explicit_bounds, steps.bucket_counts, strict=False))[0.5] == 14


def test_a_batch_that_was_not_taken_is_taken_whole_the_next_time(campaign):
    class Failing(InMemoryLogRecordExporter):
        def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
            return LogRecordExportResult.FAILURE if failing else super().export(batch)

    failing = True
    logs, metrics = Failing(), Kept()
    sink = OTLPSink(campaign.campaign(), {}, logs=logs, metrics=metrics)
    with pytest.raises(NotTaken):
        sink.take(lines(campaign))
    failing = False
    sink.take(lines(campaign))
    sink.refresh()
    assert len(logs.get_finished_logs()) == 6
    points = {
        metric.name: metric.data.data_points[0]
        for scopes in metrics.data[0].resource_metrics[0].scope_metrics
        for metric in scopes.metrics
    }
    assert points["resilient_step_seconds"].count == 14


def test_over_http_the_protocols_own_messages_arrive(campaign, receiver, tmp_path):
    (tmp_path / "headers").write_text("X-Key: secret\n")
    settings = {"endpoint": receiver.url.removesuffix("/hook"), "headers_file": str(tmp_path / "headers")}
    sink = OTLPSink(campaign.campaign(), settings)
    sink.take(lines(campaign))
    sink.refresh()
    assert receiver.paths == ["/v1/logs", "/v1/metrics"]
    assert {name.lower(): value for name, value in receiver.heads[0].items()}["x-key"] == "secret"
    logs = ExportLogsServiceRequest.FromString(receiver.bodies[0]).resource_logs[0].scope_logs[0].log_records
    assert [each.event_name for each in logs][2] == "resilient.fault"
    found = ExportMetricsServiceRequest.FromString(receiver.bodies[1]).resource_metrics[0].scope_metrics[0].metrics
    metrics = {each.name: each for each in found}
    assert "resilient_goodput_ratio" in metrics
    steps = metrics["resilient_step_seconds"]
    assert (steps.unit, steps.histogram.data_points[0].count, steps.histogram.data_points[0].HasField("min")) == ("s", 14, False)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(302, NotTaken), (307, NotTaken), (401, NotTaken), (404, NotTaken), (501, NotTaken), (400, Refused), (413, Refused)],
)
def test_an_answer_that_is_no_success_is_told_with_its_address_and_loses_nothing(campaign, receiver, status: int, kind: type):
    """The exporters take redirections for success, as of a proxy that wants a login."""
    receiver.status = status
    sink = OTLPSink(campaign.campaign(), {"endpoint": receiver.url.removesuffix("/hook")})
    with pytest.raises(kind, match=rf"log records: {receiver.url.removesuffix('/hook')}/v1/logs answers {status} "):
        sink.take(lines(campaign))
    with pytest.raises(NotTaken, match=f"measures: .*/v1/metrics answers {status} "):
        sink.refresh()


def pumped(campaign, receiver, ending: threading.Event, **settings: object) -> Pump:
    """A pump, under way, that sends to the receiver."""
    wanted = {"endpoint": receiver.url.removesuffix("/hook"), "every_s": 0.01, **settings}
    pump = Pump("otlp", OTLPSink, campaign.campaign(), wanted, began_t=1.0, ending=ending)
    pump.start()
    return pump


@pytest.mark.parametrize(
    ("missing", "setting", "paths"),
    [("logs", {"logs": False}, {"/v1/metrics"}), ("metrics", {"metrics": False}, {"/v1/logs"}), ("metrics", {}, {"/v1/logs"})],
    ids=["no logs", "no metrics", "no metrics, not said"],
)
def test_a_collector_that_lacks_a_pipeline_gets_the_rest_and_the_sink_ends(
    campaign, receiver, missing: str, setting: dict[str, bool], paths: set[str]
):
    receiver.refuses_path = lambda path: 404 if missing in path else None
    ending = threading.Event()
    ending.set()
    pump = pumped(campaign, receiver, ending, **setting)
    pump.join(30.0)
    assert not pump.is_alive()
    assert set(receiver.paths) == paths and pump.passed_over == 0


def test_events_that_a_collector_does_not_take_hold_up_no_measure(campaign, receiver, caplog: pytest.LogCaptureFixture):
    receiver.refuses_path = lambda path: 404 if "logs" in path else None
    ending = threading.Event()
    pump = pumped(campaign, receiver, ending)
    while len(receiver.bodies) < 2:
        assert pump.is_alive()
        pump.join(0.01)
    sent = ExportMetricsServiceRequest.FromString(receiver.bodies[-1]).resource_metrics[0].scope_metrics[0].metrics
    assert [each.histogram.data_points[0].count for each in sent if each.name == "resilient_step_seconds"] == [14]
    assert "/v1/logs answers 404 Not Found (a collector that takes none: logging.sinks.otlp.logs=false)" in caplog.text
    receiver.refuses_path = lambda path: None
    ending.set()
    pump.join(30.0)
    assert not pump.is_alive() and "/v1/logs" in receiver.paths


def test_a_collector_that_is_down_is_told_with_the_cause(campaign, receiver):
    receiver.close()
    sink = OTLPSink(campaign.campaign(), {"endpoint": receiver.url.removesuffix("/hook"), "timeout_s": 0.5})
    with pytest.raises(NotTaken, match=r"/v1/logs: \[Errno 111\] Connection refused$"):
        sink.take(lines(campaign))


def test_an_answer_without_end_is_not_read(campaign):
    """An exporter reads a body to its end, into memory."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as connection, suppress(OSError):
                connection.recv(1 << 20)
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    connection.sendall(bytes(1 << 16))

        threading.Thread(target=serve, daemon=True).start()
        sink = OTLPSink(campaign.campaign(), {"endpoint": f"http://127.0.0.1:{server.getsockname()[1]}"})
        taking = threading.Thread(target=sink.take, args=(lines(campaign),), daemon=True)
        taking.start()
        taking.join(10.0)
        assert not taking.is_alive(), "it reads on and on"
