"""The run is asked to end, and gets some time for it."""

import signal

import psutil

from chaos.primitives.stopping import Stop, send


class Sigterm(Stop):
    """The driver gets a SIGTERM, and `grace_s` later a SIGKILL, as by a scheduler that wants the nodes back."""

    def ask(self, driver: psutil.Process) -> None:
        send(driver, signal.SIGTERM)
