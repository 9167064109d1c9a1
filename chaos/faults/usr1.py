"""The run is told that its time is nearly over."""

import signal

import psutil

from chaos.primitives.stopping import Stop, send


class Usr1(Stop):
    """The driver gets a SIGUSR1, as by a scheduler some time before a job's end, and `grace_s` later a SIGKILL."""

    def ask(self, driver: psutil.Process) -> None:
        send(driver, signal.SIGUSR1)
