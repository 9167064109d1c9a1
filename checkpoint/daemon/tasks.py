"""Background tasks of the daemon: an exception in one is a defect and ends the process."""

import asyncio
import logging
import math
import os
import time
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Tasks:
    """Owns the tasks that nobody awaits. The agent starts another daemon, which finds on the disk what this one has done."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it until it ends."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    async def wait(self, limit_s: float = math.inf) -> bool:
        """Until none runs, those that are started meanwhile among them, or so long; whether none does."""
        deadline = time.monotonic() + limit_s
        while self._running:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            await asyncio.wait(self._running, timeout=None if math.isinf(left_s) else left_s)
        return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("the snapshot daemon ends: a defect", exc_info=task.exception())
            os._exit(1)
