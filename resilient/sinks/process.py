"""The process of the sinks: a pump for each. It belongs to a driver, which tells it every second that it gets on.

Ends with 0 when the driver has closed the pipe and all was sent, or with 1 a little later without; what was not sent by then is
sent by the next job's process.
"""

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import msgspec

from checkpoint.typed import built
from resilient.lifeline import name_process
from resilient.sinks.base import Campaign, Factory, Sink
from resilient.sinks.following import TotalsReader
from resilient.sinks.position import identity_of
from resilient.sinks.pump import Pump
from resilient.sinks.settings import GROUP, LOG, Settings

OWN = {
    "prometheus": "resilient.sinks.prometheus:PrometheusSink",
    "otlp": "resilient.sinks.otlp:OTLPSink",
    "wandb": "resilient.sinks.wandb_run:WandBSink",
    "mlflow": "resilient.sinks.mlflow_run:MLflowSink",
    "webhook": "resilient.sinks.webhook:WebhookSink",
}
ENDING_S = 12.0  # after the driver's end
SILENT_S = 15.0  # of a driver that does not get on

log = logging.getLogger(__name__)


class Pulse:
    """Whether the driver gets on."""

    def __init__(self) -> None:
        self._heard_t = time.monotonic()

    def beat(self) -> None:
        self._heard_t = time.monotonic()

    def end(self) -> None:
        """There is no driver, or none any more."""
        self._heard_t = -math.inf

    def alive(self) -> bool:
        return time.monotonic() - self._heard_t < SILENT_S


def made(name: str) -> Factory:
    """Makes the sink of this name, which is looked up only then: a package that is slow to import, or broken, holds up no other."""

    def make(campaign: Campaign, settings: Mapping[str, Any]) -> Sink:
        own = [EntryPoint(name, OWN[name], GROUP)] if name in OWN else []
        points = own or list(entry_points(group=GROUP, name=name))
        if not points:
            raise LookupError(f"no installed package has an entry point {name} in the group {GROUP}")
        factory: Factory = points[0].load()
        return factory(campaign, settings)

    return make


def pumps(settings: Settings, pulse: Pulse, ending: threading.Event) -> list[Pump]:
    """A pump for each sink, not yet started. Raises OSError: the run directory cannot be used."""
    run_dir = Path(settings.run_dir)
    campaign = Campaign(settings.name, identity_of(run_dir), run_dir, TotalsReader(run_dir, pulse.alive), pulse.alive)
    return [
        Pump(name, made(name), campaign, values, began_t=settings.began_t, ending=ending) for name, values in settings.sinks.items()
    ]


def feed(settings: Settings, pulse: Pulse, ending: threading.Event) -> bool:
    """Start the pumps, and return once the job has ended and they have, or have had their time. Whether they have sent all."""
    while True:
        try:
            all_pumps = pumps(settings, pulse, ending)
            break
        except OSError as error:
            log.warning("%s cannot be used: %s", settings.run_dir, error)
            if ending.wait(5.0):
                return False
    for pump in all_pumps:
        pump.start()
    ending.wait()
    deadline = time.monotonic() + ENDING_S
    for pump in all_pumps:
        pump.join(max(0.0, deadline - time.monotonic()))
    late = [pump.name for pump in all_pumps if pump.is_alive()]
    for name in late:
        log.warning("%s: has not taken all; the rest is for the next job", name)
    return not late


def _listen(pulse: Pulse, ending: threading.Event) -> None:
    """Until the driver is gone."""
    while os.read(0, 64):
        pulse.beat()
    pulse.end()
    ending.set()


def _log_into(path: Path) -> None:
    """Whatever is printed, too."""
    path.parent.mkdir(exist_ok=True)
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o666)  # as the run's umask has it
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")


def _stand_back() -> None:
    """Computing comes first, and where memory runs out, this process goes."""
    os.nice(19)
    try:
        Path("/proc/self/oom_score_adj").write_text("800")
    except OSError:
        log.debug("the kernel does not take a score")


def main() -> None:
    """Args: a descriptor that the settings can be read from. Standard input: a byte for each sign of life of the driver."""
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sig, lambda *_: None)  # the driver decides what they mean
    name_process("res-sinks")
    _stand_back()
    with open(int(sys.argv[1]), "rb") as file:  # noqa: PTH123 - a descriptor
        settings = msgspec.json.decode(file.read(), type=built(Settings))
    pulse, ending, sent = Pulse(), threading.Event(), threading.Event()
    threading.Thread(target=_listen, args=(pulse, ending), name="listen", daemon=True).start()
    feeding = threading.Thread(target=_feed_logged, args=(settings, pulse, ending, sent), name="feed", daemon=True)
    feeding.start()
    ending.wait()
    feeding.join(ENDING_S + 1.0)
    os._exit(0 if sent.is_set() else 1)  # whatever its threads are waiting for


def _feed_logged(settings: Settings, pulse: Pulse, ending: threading.Event, sent: threading.Event) -> None:
    """In a thread: the run directory may not answer."""
    try:
        _log_into(Path(settings.run_dir) / LOG)
    except OSError:
        logging.basicConfig(level=logging.CRITICAL)
    if feed(settings, pulse, ending):
        sent.set()


if __name__ == "__main__":
    main()
