"""Prometheus: a file for the textfile collector of node_exporter, and a loopback port if asked for."""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from resilient.config.sinks import Prometheus
from resilient.sinks.base import Campaign, Sink
from resilient.sinks.measures import STEP_SECONDS, STEP_SECONDS_HELP, measured
from resilient.sinks.totals import STEP_BUCKETS_S, Totals

log = logging.getLogger(__name__)

RUN = "run"  # the label with the campaign's name, which all have


class _Collector:
    """Shows what lines come to at the moment at which it is asked."""

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign

    def describe(self) -> list[Metric]:
        return []  # else the registry would read the whole run directory to learn the names

    def collect(self) -> Iterator[Metric]:
        name = self._campaign.name
        totals = self._campaign.totals()
        for measure, values in measured(totals):
            family = CounterMetricFamily if measure.kind == "counter" else GaugeMetricFamily
            labels = [RUN] if measure.label is None else [RUN, measure.label]
            metric = family(measure.name, measure.help, labels=labels)
            for label, value in values.items():
                metric.add_metric([name] if measure.label is None else [name, label], value)
            yield metric
        yield _steps(name, totals)


def _steps(name: str, totals: Totals) -> Metric:
    metric = HistogramMetricFamily(STEP_SECONDS, STEP_SECONDS_HELP, labels=[RUN])
    below, buckets = 0, []
    for bound, count in zip([*map(str, STEP_BUCKETS_S), "+Inf"], totals.step_counts, strict=True):
        below += count
        buckets.append((bound, below))
    metric.add_metric([name], buckets, totals.step_sum_s)
    return metric


class PrometheusSink(Sink):
    """Writes the file, and has the port from when it is free. Args: settings: of `resilient.config.sinks.Prometheus`."""

    def __init__(self, campaign: Campaign, settings: Mapping[str, Any]) -> None:
        wanted = Prometheus(**settings)
        self._file, self._every_s = wanted.file, wanted.every_s
        self._shared = not wanted.file.is_relative_to(campaign.run_dir)
        self._written_t = -float("inf")
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(campaign))
        self._port, self._alive = wanted.port, campaign.alive
        self._server: Any = None
        self._told = False

    def refresh(self) -> None:
        """Write the file if it is time. Raises OSError."""
        if self._port is not None and self._server is None and self._alive():  # between two jobs nobody asks for it
            self._serve(self._port)
        if time.monotonic() - self._written_t >= self._every_s:
            self._write()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        self._write()

    def _serve(self, port: int) -> None:
        """Open the port, if it is free: another campaign on this host may have it, or the job before for some seconds more."""
        try:
            self._server, _ = start_http_server(port, addr="127.0.0.1", registry=self._registry)
        except OSError as error:
            if not self._told:
                self._told = True
                log.warning("prometheus: port %d cannot be opened, which is tried again; the file is written: %s", port, error)

    def _write(self) -> None:
        replace(self._file, generate_latest(self._registry), shared=self._shared)
        self._written_t = time.monotonic()


def replace(file: Path, text: bytes, *, shared: bool) -> None:
    """Make a file whole with this text, at once. Raises OSError: it is as it was.

    Args:
        shared: everybody may read it: node_exporter is another user. Else who may is as in the rest of the run directory.
    """
    new = file.with_name(f".{file.name}.{os.getpid()}.new")  # does not end with .prom: the collector leaves it alone
    fd = os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(fd, "wb") as out:
            if shared:
                os.fchmod(fd, 0o644)
            out.write(text)
        new.replace(file)
    except OSError:
        new.unlink(missing_ok=True)
        raise
