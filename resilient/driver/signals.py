"""The signals of the driver's process: which of them is a word of the terminal, and which a wish of a person or of Slurm.

A terminal that goes away is no reason to stop: SIGHUP is noted, and only a config that asks for it makes it a drain. Under `nohup`
it stays ignored. Ctrl-Z stops this process and none other of the campaign; the terminal is left as others expect it meanwhile.
"""

import asyncio
import os
import signal
from collections.abc import Callable

from resilient.driver.display import Display
from resilient.driver.hangup import HUNG_UP, Hangup

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Signals:
    """Handlers of the event loop.

    Args:
        drains: whether SIGHUP asks for a stop.
        stop: told of a signal that does.
        display: of the terminal.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, stop: Callable[[signal.Signals], None], display: Display, *, drains: bool
    ) -> None:
        self._loop = loop
        self._stop = stop
        self._display = display
        self._drains = drains
        self._hung_up = False

    def install(self) -> None:
        for sig in STOPS:
            self._loop.add_signal_handler(sig, self._stop, sig)
        before = signal.getsignal(signal.SIGHUP)
        if before is not signal.SIG_IGN:
            self._loop.add_signal_handler(signal.SIGHUP, self._hang_up)
            if isinstance(before, Hangup) and before.came:
                self._hang_up()
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            self._loop.add_signal_handler(signal.SIGTSTP, self._suspend)

    def _hang_up(self) -> None:
        """Once: the kernel and the shell both say so, and a second word of a stop would be one at once."""
        if self._hung_up:
            return
        self._hung_up = True
        if self._drains:
            self._stop(signal.SIGHUP)
        else:
            self._display.note(HUNG_UP)

    def _suspend(self) -> None:
        """Stop as the kernel does without a handler: not at all where no shell could continue this process."""
        self._display.suspend()
        self._loop.remove_signal_handler(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGTSTP)
        self._loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        self._display.go_on()
