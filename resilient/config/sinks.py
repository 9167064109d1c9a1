"""Where the numbers and events of a campaign go beside its run directory: the section `logging.sinks`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from resilient.config.fields import Count, Seconds, Section

WebAddress = Annotated[str, Field(pattern=r"^https?://[^\s]+$")]


class Prometheus(Section):
    """Gauges and counters in Prometheus's text format, for the textfile collector of node_exporter. Needs prometheus-client."""

    file: Path = Field(Path("${run_dir}/metrics.prom"), description="written at once or not at all; its name ends with .prom")
    every_s: Seconds = Field(15.0, description="between two versions of the file")
    port: Annotated[int, Field(ge=1, le=65535, strict=True)] | None = Field(
        None, description="on the loopback of the driver's host, at which Prometheus may ask for the same"
    )


class OTLP(Section):
    """Measures and events to an OpenTelemetry collector, by OTLP over HTTP. Needs the extra `otlp`."""

    endpoint: WebAddress = Field("http://localhost:4318", description="of the collector; /v1/metrics and /v1/logs are added")
    logs: bool = Field(True, description="false: no events are sent, as to a collector without a pipeline for logs")
    metrics: bool = Field(True, description="false: no measures are sent, as to a collector without a pipeline for metrics")
    headers_file: Path | None = Field(None, description="lines of `Name: value`, as for credentials")
    every_s: Seconds = Field(15.0, description="between two times at which measures are sent")
    timeout_s: Seconds = Field(10.0, description="for an answer, its head as a whole")


class WandB(Section):
    """A run of Weights & Biases, written offline; `wandb sync` uploads it. Needs the extra `wandb`."""

    project: str | None = Field(None, description="null: the campaign's name")
    entity: str | None = Field(None, description="user or team; null: the one that uploads")
    directory: Path = Field(Path("${run_dir}"), description="in which the folder wandb is made")


class MLflow(Section):
    """A run of MLflow, by default in a file store. Needs the extra `mlflow`."""

    uri: str | None = Field(None, description="of a database or a tracking server; null: files in RUN_DIR/mlruns")
    experiment: str | None = Field(None, description="null: the campaign's name")


class Webhook(Section):
    """JSON by POST on what a person should hear of. What could not be sent is kept and sent later."""

    url: WebAddress | None = None
    url_file: Path | None = Field(None, description="in place of url: a file that holds it, where the address is a secret")
    token_file: Path | None = Field(None, description="a file with a token, sent as `Authorization: Bearer`")
    events: list[Literal["started", "fault", "recovered", "gave_up", "finished"]] = Field(
        ["fault", "recovered", "gave_up", "finished"], description="what is told"
    )
    pause_s: Seconds = Field(5.0, description="between two requests; what has happened in the meantime is sent together")
    most: Count = Field(50, description="events in a request")
    timeout_s: Seconds = Field(10.0, description="for an answer, its head as a whole")
    beat_s: Seconds | None = Field(
        None, description="a dead man's beat: so often a request says that the driver is alive, and how far training has come"
    )
    beat_url: WebAddress | None = Field(None, description="where beats go; null: to url")


class Sinks(Section):
    """Receivers of metrics and events. Each is fed by a process of its own, which training never waits for."""

    prometheus: Prometheus | None = None
    otlp: OTLP | None = None
    wandb: WandB | None = None
    mlflow: MLflow | None = None
    webhook: Webhook | None = None
    others: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], dict[str, Any]] = Field(
        {},
        description="those of other packages, by their names in the entry-point group `resilient.sinks`, with their settings",
    )

    @property
    def wanted(self) -> dict[str, dict[str, Any]]:
        """The settings of each sink that is there, as plain values."""
        own = {name: getattr(self, name) for name in SINKS}
        return {**self.others, **{name: each.model_dump(mode="json") for name, each in own.items() if each is not None}}


SINKS: dict[str, type[Section]] = {"prometheus": Prometheus, "otlp": OTLP, "wandb": WandB, "mlflow": MLflow, "webhook": Webhook}
"""The project's own."""
