"""The agent's event loop: descriptors, what is done when they are ready, and waits that go on answering.

torchelastic calls its agent synchronously, and forking, rendezvous and the end of processes have to be waited for in the middle of
such a call. Whoever must wait runs turns of this loop until it has what it wants: the driver's pings are answered and the daemon's
news passed on meanwhile. Nothing in the agent waits in any other way for longer than a moment.

A handler may itself wait by turns; its own source is left alone until it returns. So a handler must put up with being called
although nothing is there: it reads without blocking.
"""

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from resilient.agent.limits import TURN_S

T = TypeVar("T")


@dataclass(eq=False)
class _Source:
    """A descriptor, and who is called. Invariant: `running` while one of its handlers is."""

    on_readable: Callable[[], None] | None
    on_writable: Callable[[], None] | None
    wants_to_write: Callable[[], bool] | None
    running: bool = False

    @property
    def events(self) -> int:
        """What it waits for now."""
        if self.running:
            return 0
        reads = selectors.EVENT_READ if self.on_readable is not None else 0
        writes = selectors.EVENT_WRITE if self.wants_to_write is not None and self.wants_to_write() else 0
        return reads | writes


class Loop:
    """Invariants: the selector knows the descriptors of the sources that wait for something, and no others outside of a turn's
    `also`. A descriptor is unwatched before it is closed."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._sources: dict[int, _Source] = {}
        self._hooks: list[Callable[[], None]] = []
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch(self._woken, self._take_wake)

    def watch(
        self,
        fd: int,
        on_readable: Callable[[], None] | None,
        *,
        on_writable: Callable[[], None] | None = None,
        wants_to_write: Callable[[], bool] | None = None,
    ) -> None:
        """Call a handler whenever the descriptor is readable; another one whenever it is writable and that is wanted."""
        self._sources[fd] = _Source(on_readable, on_writable, wants_to_write)

    def unwatch(self, fd: int) -> None:
        """Leave a descriptor alone from now on; one that is not watched may be named."""
        self._sources.pop(fd, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def each_turn(self, hook: Callable[[], None]) -> None:
        """Call this at the end of every turn, several times a second. It must not wait, not even by turns."""
        self._hooks.append(hook)

    def turn(self, timeout_s: float, also: Collection[int] = ()) -> set[int]:
        """Wait until something is ready, at most `timeout_s` and never longer than `TURN_S`, and call who deals with it.

        Args:
            also: descriptors that end the wait, too; those that are readable are returned.

        Raises:
            whatever a handler raises.
        """
        self._register(also)
        ready = self._selector.select(max(0.0, min(timeout_s, TURN_S)))
        found = {key.fd for key, events in ready if key.fd in also and events & selectors.EVENT_READ}
        for fd in also:
            if fd not in self._sources:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(fd)
        for key, events in ready:
            source = self._sources.get(key.fd)
            if source is not None and not source.running:
                self._call(source, events)
        for hook in self._hooks:
            hook()
        return found

    def _register(self, also: Collection[int]) -> None:
        """Bring the selector up to date."""
        wanted = {fd: source.events for fd, source in self._sources.items()}
        for fd in also:
            wanted[fd] = wanted.get(fd, 0) | selectors.EVENT_READ
        known = {key.fd: key.events for key in self._selector.get_map().values()}
        for fd, events in wanted.items():
            if not events and fd in known:
                self._selector.unregister(fd)
            elif events and fd not in known:
                self._selector.register(fd, events)
            elif events and events != known[fd]:
                self._selector.modify(fd, events)

    def _call(self, source: _Source, events: int) -> None:
        source.running = True
        try:
            if events & selectors.EVENT_READ and source.on_readable is not None:
                source.on_readable()
            if events & selectors.EVENT_WRITE and source.on_writable is not None:
                source.on_writable()
        finally:
            source.running = False

    def wait_until(self, condition: Callable[[], bool], limit_s: float, *, poll_s: float = TURN_S) -> bool:
        """Run turns until the condition holds, at most `limit_s`; whether it does.

        Args:
            poll_s: between two checks, at the most, where nothing wakes the loop when it comes true.
        """
        deadline = time.monotonic() + limit_s
        while not condition():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self.turn(min(left_s, poll_s))
        return True

    def wait_for_all(self, fds: Callable[[], Collection[int]], limit_s: float) -> bool:
        """Run turns until all of these descriptors have been readable, at most `limit_s`; whether they have.

        Args:
            fds: that are open, as of each turn.
        """
        deadline = time.monotonic() + limit_s
        seen: set[int] = set()
        while left := set(fds()) - seen:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            seen |= self.turn(left_s, left)
        return True

    def wait_readable(self, fd: int, limit_s: float) -> bool:
        """Run turns until a descriptor is readable, at most `limit_s`; whether it is."""
        deadline = time.monotonic() + limit_s
        while fd not in self.turn(left_s := deadline - time.monotonic(), (fd,)):
            if left_s <= 0:
                return False
        return True

    def in_thread(self, function: Callable[[], T], name: str) -> "Future[T]":
        """Call a function that may block in a thread of its own; the loop wakes up when it is done.

        A thread that does not come to its end ends with the process.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
                future.set_exception(error)
            else:
                future.set_result(result)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._woken, 1)

        threading.Thread(target=run, name=name, daemon=True).start()
        return future

    def _take_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._woken)

    def close(self) -> None:
        """No more turns. The descriptor that threads wake it by stays open, for threads that may still run."""
        self._selector.close()
