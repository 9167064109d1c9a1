"""The next batch, read by a thread while the step before it runs.

What is read follows from sample numbers alone, and a batch is taken by them: what was read ahead for a step that does not come
next, since a batch is computed again or left out, is thrown away. There is a thread for each batch, which ends with its read, and
none before the first step, so that processes that fork have none.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

LAST_WAIT_S = 1.0  # for a read that nobody needs any more; behind a disk that hangs it is left to the process's end


class Ahead(Generic[T]):
    """Reads one batch ahead.

    Args:
        read: from the first sample's number and the number of samples; called from the training thread and from one other.
    """

    def __init__(self, read: Callable[[int, int], T]) -> None:
        self._read = read
        self._pending: _Reading[T] | None = None

    def take(self, first: int, size: int) -> T:
        """A batch. Waits for it, and raises what reading it raises."""
        pending, self._pending = self._pending, None
        if pending is None or pending.which != (first, size):
            return self._read(first, size)
        return pending.result()

    def begin(self, first: int, size: int) -> None:
        """Start to read a batch, in place of any that was read ahead."""
        self._pending = _Reading(self._read, (first, size))
        self._pending.start()

    def close(self) -> None:
        """Throw away what was read ahead."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.join(LAST_WAIT_S)


class _Reading(threading.Thread, Generic[T]):
    """A batch that is being read."""

    def __init__(self, read: Callable[[int, int], T], which: tuple[int, int]) -> None:
        super().__init__(name="next-batch", daemon=True)
        self.which = which
        self._read_batch = read
        self._batch: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._batch.append(self._read_batch(*self.which))
        except BaseException as error:  # noqa: BLE001 - raised by `result`, in the thread that wants the batch
            self._error = error

    def result(self) -> T:
        """What was read. Waits until it is there."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._batch.pop()
