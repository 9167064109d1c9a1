"""Whether what the sinks of a config need is installed."""

from importlib.metadata import entry_points
from importlib.util import find_spec

from resilient.config import Config, Problem
from resilient.sinks.settings import GROUP

_PACKAGES = {
    "prometheus": "prometheus_client",
    "otlp": "opentelemetry.exporter.otlp.proto.http",
    "wandb": "wandb",
    "mlflow": "mlflow",
}


def missing(config: Config) -> list[Problem]:
    """A problem for each sink that cannot be made on this machine."""
    found = []
    for name in config.logging.sinks.wanted:
        package = _PACKAGES.get(name)
        if package is not None and not _installed(package):
            message = f"needs a package that is not installed: pip install 'resilient[{name}]'"
            found.append(Problem(f"logging.sinks.{name}", None, message))
    for name in config.logging.sinks.others:
        if not entry_points(group=GROUP, name=name):
            found.append(
                Problem(f"logging.sinks.others.{name}", None, f"no installed package has an entry point in {GROUP} for it")
            )
    return found


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of a package around it
        return False
