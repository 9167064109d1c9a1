"""The phases of a loop that tells an adapter where it is by calling it: each one lasts until the next."""

from typing import Any

from resilient import worker


class Phases:
    """One per loop. What raises leaves its phase in the heartbeat region: it is where the worker failed."""

    def __init__(self) -> None:
        self._present: Any = None

    def enter(self, name: str) -> None:
        """A phase of `resilient.worker.phase` begins."""
        if self._present is not None:
            self._present.__exit__(None, None, None)
        self._present = worker.phase(name)
        self._present.__enter__()
