"""SIGHUP while no event loop runs: before the driver's begins, and after its end. It ends nothing."""

import signal
from types import FrameType

from resilient.driver.terminal import Notes

HUNG_UP = "SIGHUP: the terminal may be gone; the campaign goes on"


class Hangup:
    """A handler that says so, and remembers it for the driver."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self.came = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self.came = True
        self._notes.note(HUNG_UP)

    def install(self) -> None:
        """Leaves it ignored where it is, as under `nohup`."""
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self)
