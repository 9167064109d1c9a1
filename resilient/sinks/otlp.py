"""OpenTelemetry: measures and events to a collector, by the SDK's own exporters."""

import io
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import requests
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExporter, LogRecordExportResult
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    InMemoryMetricReader,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from resilient import strict_json
from resilient.config.sinks import OTLP
from resilient.driver.display import describe
from resilient.ledger import EVENTS
from resilient.sinks.base import Campaign, Line, NotTaken, Refused, Sink
from resilient.sinks.in_time import in_time
from resilient.sinks.measures import MEASURES, STEP_SECONDS, STEP_SECONDS_HELP, Values, measured
from resilient.sinks.totals import STEP_BUCKETS_S, Totals
from resilient.sinks.webhook import is_for_good

log = logging.getLogger(__name__)

_SEVERITIES = {
    "fault": SeverityNumber.ERROR,
    "checkpoint_missed": SeverityNumber.WARN,
    "checkpoint_rejected": SeverityNumber.WARN,
    "link": SeverityNumber.WARN,
}
_SCOPE = InstrumentationScope("resilient")


class Answers(requests.Session):
    """Sends for an exporter, which says only whether it went well, and keeps what the last answer was.

    A body is not read, however long it is. A redirection, which exporters take for success, is a failure.

    Args:
        timeout_s: for the whole of an answer's head.

    Attributes:
        status: of the last answer; None: there was none.
        last: the last failure, in words.
    """

    status: int | None = None
    last = ""

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s

    def request(self, method: str, url: str | bytes, *args: Any, **more: Any) -> requests.Response:
        """Raises requests.RequestException."""
        self.status = None
        try:
            with in_time(self._timeout_s), super().request(method, url, *args, **{**more, "stream": True}) as answer:
                self.status, self.last = answer.status_code, f"{url!s} answers {answer.status_code} {answer.reason}"
                if 300 <= answer.status_code < 400:
                    raise requests.HTTPError(self.last)
        except requests.HTTPError:
            raise
        except TimeoutError as error:
            self.last = f"{url!s}: {error}"
            raise requests.Timeout(self.last) from error
        except requests.RequestException as error:
            self.last = f"{url!s}: {_cause(error)}"
            raise
        seen = requests.Response()
        seen.status_code, seen.reason, seen.headers, seen.raw = answer.status_code, answer.reason, answer.headers, io.BytesIO()
        return seen


def _cause(error: BaseException) -> str:
    """The first cause, in words: what wraps it names addresses of objects, which are others each time."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return f"{type(error).__name__}: {error}" if not isinstance(error, OSError) else str(error)


class OTLPSink(Sink):
    """Events go as log records, each until the collector has taken it; measures as they are when they are sent, steps included.

    Args:
        settings: of `resilient.config.sinks.OTLP`.
        logs, metrics: exporters; None: to the endpoint of the settings.
    """

    files = (EVENTS,)
    history = False

    def __init__(
        self,
        campaign: Campaign,
        settings: Mapping[str, Any],
        *,
        logs: LogRecordExporter | None = None,
        metrics: MetricExporter | None = None,
    ) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # what fails is told by whoever tries again
        wanted = OTLP(**settings)
        headers = _headers(wanted.headers_file)
        base, timeout_s = wanted.endpoint.rstrip("/"), wanted.timeout_s
        self._answers = Answers(timeout_s)
        self._logs = logs or OTLPLogExporter(f"{base}/v1/logs", headers=headers, timeout=timeout_s, session=self._answers)
        self._metrics = metrics or OTLPMetricExporter(
            f"{base}/v1/metrics", headers=headers, timeout=timeout_s, session=self._answers
        )
        self._campaign = campaign
        self._wants_logs, self._wants_metrics = wanted.logs, wanted.metrics
        self._every_s = wanted.every_s
        self._began_ns = time.time_ns()
        self._sent_t = -float("inf")
        self._values: Mapping[str, Values] = {}
        attributes = {"service.name": "resilient", "service.instance.id": campaign.identity, "resilient.run": campaign.name}
        self._resource = Resource.create(attributes)
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider([self._reader], self._resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("resilient")
        for measure in MEASURES:
            make = meter.create_observable_counter if measure.kind == "counter" else meter.create_observable_gauge
            make(measure.name, [self._observe(measure.name, measure.label)], description=measure.help)

    def _observe(self, name: str, label: str | None) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for value, number in self._values.get(name, {}).items():
                yield Observation(number, {} if label is None else {label: value})

        return observe

    def wants(self, line: Line) -> bool:
        return self._wants_logs

    def take(self, lines: Sequence[Line]) -> None:
        """Send events. Raises NotTaken or Refused."""
        if self._logs.export([self._record(line) for line in lines]) is not LogRecordExportResult.SUCCESS:
            kind = Refused if is_for_good(self._answers.status or 0) else NotTaken
            raise kind(f"the collector has not taken the log records: {self._answers.last}{self._hint('logs')}")

    def _record(self, line: Line) -> ReadableLogRecord:
        entry = line.entry
        name = str(entry["event"])
        known = {key: value for key, value in entry.items() if value is not None}
        plain = {
            key: value if isinstance(value, str | bool | int | float) else strict_json.dumps(value) for key, value in known.items()
        }
        severity = _SEVERITIES.get(name, SeverityNumber.INFO)
        record = LogRecord(
            timestamp=int(entry["t"] * 1e9),
            observed_timestamp=time.time_ns(),
            severity_number=severity,
            severity_text=severity.name,
            body=describe(entry) or name,
            attributes={**plain, "resilient.line": line.end_bytes},
            event_name=f"resilient.{name}",
        )
        return ReadableLogRecord(record, self._resource, _SCOPE)

    def refresh(self) -> None:
        """Send measures, if it is time. Raises NotTaken or OSError."""
        if self._wants_metrics and time.monotonic() - self._sent_t >= self._every_s:
            self._send()

    def close(self) -> None:
        """Measures are sent once more. They are no lines, and the end waits for none."""
        try:
            if self._wants_metrics:
                self._send()
        except (NotTaken, OSError) as error:
            log.warning("otlp: the last measures were not sent: %s", error)
        self._provider.shutdown()
        self._logs.shutdown()
        self._metrics.shutdown()

    def _send(self) -> None:
        self._sent_t = time.monotonic()
        totals = self._campaign.totals()
        self._values = {measure.name: values for measure, values in measured(totals)}
        data = self._reader.get_metrics_data()
        if data is None:
            return
        if self._metrics.export(_with(data, self._steps(totals))) is not MetricExportResult.SUCCESS:
            raise NotTaken(f"the collector has not taken the measures: {self._answers.last}{self._hint('metrics')}")

    def _steps(self, totals: Totals) -> Metric:
        point = HistogramDataPoint(
            attributes={},
            start_time_unix_nano=self._began_ns,
            time_unix_nano=time.time_ns(),
            count=sum(totals.step_counts),
            sum=totals.step_sum_s,
            bucket_counts=totals.step_counts,
            explicit_bounds=STEP_BUCKETS_S,
            min=None,  # optional in the protocol, as max
            max=None,
        )
        return Metric(STEP_SECONDS, STEP_SECONDS_HELP, "s", Histogram([point], AggregationTemporality.CUMULATIVE))

    def _hint(self, key: str) -> str:
        return f" (a collector that takes none: logging.sinks.otlp.{key}=false)" if self._answers.status == 404 else ""


def _with(data: MetricsData, metric: Metric) -> MetricsData:
    """What a reader has collected, and one more of the same scope."""
    resource, *others = data.resource_metrics
    scope, *more = resource.scope_metrics
    scope = replace(scope, metrics=[*scope.metrics, metric])
    return replace(data, resource_metrics=[replace(resource, scope_metrics=[scope, *more]), *others])


def _headers(file: Path | None) -> dict[str, str]:
    """Those that a file names, one a line. Raises OSError."""
    if file is None:
        return {}
    pairs = [line.partition(":") for line in file.read_text().splitlines() if ":" in line]
    return {name.strip(): value.strip() for name, _, value in pairs}
