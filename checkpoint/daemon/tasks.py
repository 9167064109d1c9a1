"""Background tasks of the daemon: an exception in one is a defect and ends the process."""

import asyncio
import logging
import os
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

    async def wait(self) -> None:
        """Until none runs, those that are started meanwhile among them."""
        while self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("the snapshot daemon ends: a defect", exc_info=task.exception())
            os._exit(1)
