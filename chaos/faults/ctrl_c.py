"""Somebody presses Ctrl-C."""

import os
import signal

import psutil
from pydantic import Field

from chaos.fault import CannotInject
from chaos.primitives.stopping import Stop, send


class CtrlC(Stop):
    """A person presses Ctrl-C: the driver's process group gets a SIGINT, once or twice."""

    times: int = Field(1, ge=1, le=2, description="the first asks it to stop, the second ends it at once")

    def ask(self, driver: psutil.Process) -> None:
        for _ in range(self.times):
            if os.getpgid(driver.pid) != driver.pid:
                send(driver, signal.SIGINT)  # the group is somebody else's
                continue
            try:
                os.killpg(driver.pid, signal.SIGINT)
            except ProcessLookupError:
                raise CannotInject(f"the driver (pid {driver.pid}) has ended by itself") from None
