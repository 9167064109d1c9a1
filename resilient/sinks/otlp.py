"""OpenTelemetry: measures and events to a collector, by the SDK's own exporters."""

import io
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExporter, MetricExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from resilient import strict_json
from resilient.config.sinks import OTLP
from resilient.driver.display import describe
from resilient.ledger import EVENTS, METRICS
from resilient.sinks.base import Campaign, Line, NotTaken, Refused, Sink
from resilient.sinks.in_time import in_time
from resilient.sinks.measures import MEASURES, STEP_SECONDS, STEP_SECONDS_HELP, Values, measured
from resilient.sinks.totals import STEP_BUCKETS_S, steps_of
from resilient.sinks.webhook import is_for_good

MOST_STEPS = 100_000  # of a line: it is written every 0.3 s

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
    """Events go as log records, each until the collector has taken it; measures as they are when they are sent.

    Args:
        settings: of `resilient.config.sinks.OTLP`.
        logs, metrics: exporters; None: to the endpoint of the settings.
    """

    files = (EVENTS, METRICS)
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
        self._every_s = wanted.every_s
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
        self._steps = meter.create_histogram(
            STEP_SECONDS, "s", STEP_SECONDS_HELP, explicit_bucket_boundaries_advisory=list(STEP_BUCKETS_S)
        )

    def _observe(self, name: str, label: str | None) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for value, number in self._values.get(name, {}).items():
                yield Observation(number, {} if label is None else {label: value})

        return observe

    def take(self, lines: Sequence[Line]) -> None:
        """Send events. Raises NotTaken or Refused."""
        records = [self._record(line) for line in lines if line.file == EVENTS]
        if records and self._logs.export(records) is not LogRecordExportResult.SUCCESS:
            kind = Refused if is_for_good(self._answers.status or 0) else NotTaken
            raise kind(f"the collector has not taken the log records: {self._answers.last}")
        for line in lines:
            step_s = line.entry.get("step_s") if line.file == METRICS else None
            if step_s is not None:
                for _ in range(min(steps_of(line.entry), MOST_STEPS)):  # a histogram of the SDK takes one value at a time
                    self._steps.record(step_s)

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
        if time.monotonic() - self._sent_t >= self._every_s:
            self._send()

    def close(self) -> None:
        self._send()
        self._provider.shutdown()
        self._logs.shutdown()
        self._metrics.shutdown()

    def _send(self) -> None:
        self._sent_t = time.monotonic()
        self._values = {measure.name: values for measure, values in measured(self._campaign.totals())}
        data = self._reader.get_metrics_data()
        if data is not None and self._metrics.export(data) is not MetricExportResult.SUCCESS:
            raise NotTaken(f"the collector has not taken the measures: {self._answers.last}")


def _headers(file: Path | None) -> dict[str, str]:
    """Those that a file names, one a line. Raises OSError."""
    if file is None:
        return {}
    pairs = [line.partition(":") for line in file.read_text().splitlines() if ":" in line]
    return {name.strip(): value.strip() for name, _, value in pairs}
