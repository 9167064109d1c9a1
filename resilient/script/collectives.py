"""Collectives as signs of life, of a script that takes no optimizer step of torch's: a hang is found in it, too.

Each process group numbers its collectives. A thread looks once a second whether a number of this process has grown, and says so in
the heartbeat region. It begins once the script has had collectives for a while: at its start it may communicate first and then
read its data for minutes. Numbers of different groups tell nothing of each other, so they are no steps, and nothing is counted by
them.
"""

import sys
import threading
import time
from collections.abc import Callable

from resilient.heartbeat.worker_side import WorkerRegion

LOOK_S = 1.0
REGULAR_S = 60.0  # since the first one that was seen
REGULAR = 30  # looks at which there were new ones


class Collectives:
    """Whether a process has had collectives since it was last looked. `seconds`: a clock.

    Invariant: nothing is told before they are regular.
    """

    def __init__(self, region: WorkerRegion, numbered: Callable[[], int]) -> None:
        self._region, self._numbered = region, numbered
        self._last = numbered()
        self._first_s: float | None = None
        self._looks = 0

    def look(self, now_s: float) -> None:
        """Tell of new ones, if there are any."""
        number = self._numbered()
        if number == self._last:
            return
        self._last = number
        self._looks += 1
        if self._first_s is None:
            self._first_s = now_s
        if self._looks >= REGULAR and now_s - self._first_s >= REGULAR_S:
            self._region.observe(True)
            self._region.touch()


def numbered() -> int:
    """The numbers of the newest collectives of all process groups of this process, added up."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    total = 0
    for group in list(c10d._world.pg_map) if c10d is not None else ():
        try:
            total += group._get_sequence_number_for_group()
        except RuntimeError:
            continue  # of a group that has not communicated yet, or is being taken down
    return total


def watch(region: WorkerRegion, needed: Callable[[], bool]) -> None:
    """Look at the collectives of this process as long as that is needed, in a thread of its own."""
    seen = Collectives(region, numbered)

    def look() -> None:
        while needed():
            seen.look(time.monotonic())
            time.sleep(LOOK_S)

    threading.Thread(target=look, name="collectives", daemon=True).start()
