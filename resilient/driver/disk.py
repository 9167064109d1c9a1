"""The disk process: touches files of the run directory and of the durable tier on behalf of the driver, which waits for no disk.

A thread that waits for a file system may not be killed, and keeps its process from ending; so this is a process of its own, whose
end nobody waits for. It ends when the driver does, as soon as what it has is written; it holds the run directory's lock until then.
"""

import logging
import os
import signal
import socket
import sys
import threading

from checkpoint.framing import Decoder, Message, encode
from resilient.driver.calls import answered
from resilient.driver.disk_thread import ORPHAN_S, DiskThread
from resilient.protocol.disk import CloseFiles, DiskRequest, DiskSettings, Serving, TakeInLeft, WriteItems

RECEIVE_BYTES = 1 << 18


class DiskProcess:
    """Args: connection: to the driver."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._thread: DiskThread | None = None

    def run(self) -> None:
        """Serve until the driver is gone, or has had the files closed."""
        decoder: Decoder[DiskRequest] = Decoder(DiskRequest)
        while data := self._receive():
            for request in decoder.feed(data):
                self._serve(request)
        if self._thread is not None:
            self._thread.orphaned()
            self._thread.over.wait(ORPHAN_S)

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(RECEIVE_BYTES)
        except ConnectionError:
            return b""

    def _serve(self, request: DiskRequest) -> None:
        match request:
            case DiskSettings():
                self._settings = request
                self.send(Serving())
                self._thread = DiskThread(request, os.getppid(), self.send)
            case WriteItems(items=items):
                assert self._thread is not None, "settings come first"
                self._thread.put(items)
            case TakeInLeft() | CloseFiles():
                assert self._thread is not None, "settings come first"
                self._thread.call(request)
            case _:
                work = threading.Thread(target=lambda: self.send(answered(request, self._settings.run_dir)), daemon=True)
                work.start()

    def send(self, news: Message) -> None:
        """Send news to the driver; from any thread."""
        try:
            with self._sending:
                self._connection.sendall(encode(news))
        except OSError:
            return  # it is gone, which shows where the connection is read


def _end_with_traceback(failed: threading.ExceptHookArgs) -> None:
    """A defect in a thread: the driver starts another process."""
    sys.excepthook(failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)
    sys.stderr.flush()
    os._exit(1)


def main() -> None:
    """Args: the descriptor of the connection."""
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sig, lambda *_: None)  # the driver decides what they mean
    logging.basicConfig(level=logging.WARNING)
    threading.excepthook = _end_with_traceback
    DiskProcess(socket.socket(fileno=int(sys.argv[1]))).run()
    os._exit(0)  # whatever its threads are waiting for


if __name__ == "__main__":
    main()
