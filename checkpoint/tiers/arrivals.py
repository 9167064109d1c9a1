"""Copies that a GPU makes while training goes on: somebody waits until they are there, and says so then.

Owns the thread that waits. What it says is said once the GPU has passed the mark, and never where it fails before that: a process
that dies meanwhile has said nothing of a copy that is not whole.
"""

import logging
import queue
import threading
from collections.abc import Callable

from checkpoint.device import Device

log = logging.getLogger(__name__)


class Arrivals:
    """For one rank. At most one copy is under way at a time.

    Args:
        device: that copies.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._given: queue.SimpleQueue[tuple[object, Callable[[], None]] | None] = queue.SimpleQueue()
        self._done = threading.Event()
        self._done.set()
        self._error: RuntimeError | None = None
        self._mark: object | None = None
        # A process that ends by an exception must not wait for a GPU that hangs.
        self._thread = threading.Thread(target=self._run, name="arrivals", daemon=True)
        self._thread.start()

    def expect(self, mark: object, say: Callable[[], None]) -> None:
        """Have something said once the GPU has passed a mark. Raises RuntimeError like `wait`."""
        self.wait()
        self._mark = mark
        self._done.clear()
        self._given.put((mark, say))

    def before_change(self) -> None:
        """The tensors that are being copied are about to change: the GPU does that behind the copies."""
        if not self._done.is_set():
            self._device.hold_back(self._mark)

    def wait(self) -> None:
        """Until everything is said. Raises RuntimeError where the GPU has failed."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Say what is to be said, and end the thread; what a GPU that has failed has not copied is never said."""
        self._given.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._device.beside_recordings()
        while (given := self._given.get()) is not None:
            mark, say = given
            try:
                self._device.wait(mark)
            except RuntimeError as error:  # what the training thread gets to see at its next call
                log.error("a snapshot was not copied: %s", error)
                self._error = error
            else:
                say()
            self._done.set()
