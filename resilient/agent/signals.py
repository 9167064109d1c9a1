"""Signals as a descriptor to wait for. The agent takes none of them for itself: they are news for the driver."""

import signal
import socket

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Signals:
    """From now on the signals of this process that are for the driver come here. There is one in a process."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        for sig in FORWARDED:
            signal.signal(sig, lambda *_: None)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def fileno(self) -> int:
        """Readable when a signal has come."""
        return self._reader.fileno()

    def take(self) -> list[str]:
        """Names of those that have come, as `SIGTERM`."""
        forwarded = {int(sig) for sig in FORWARDED}
        try:
            numbers = self._reader.recv(256)
        except BlockingIOError:
            return []
        return [signal.Signals(number).name for number in numbers if number in forwarded]
