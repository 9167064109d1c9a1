"""What `resilient logs` does."""

import sys
import time
from datetime import datetime
from pathlib import Path

from resilient.exits import EnvironmentUnusable
from resilient.logs.paths import DIRECTORY
from resilient.logs.reading import Follower, Wanted, follow, generations, lines
from resilient.processes import must_be_run_directory

POLL_S = 0.5


def show(run_dir: Path, wanted: Wanted, generation: int | None, *, following: bool) -> None:
    """Print lines of the newest generation, or of this one; with those that come, until Ctrl-C.

    Raises:
        EnvironmentUnusable: this is no run directory, or there are no such logs.
    """
    must_be_run_directory(run_dir)
    if following:
        try:
            follow(Follower(run_dir, wanted, generation), _print_at_once, lambda: time.sleep(POLL_S))
        except KeyboardInterrupt:
            return
    if generation is None:
        found = generations(run_dir)
        if not found:
            raise EnvironmentUnusable(f"there are no logs of ranks in {run_dir / DIRECTORY}: nothing has been started yet")
        generation = found[-1]
    shown = 0
    for line in lines(run_dir, generation, wanted):
        sys.stdout.write(f"{line}\n")
        shown += 1
    if not shown:
        sys.stderr.write(f"resilient: generation {generation} has no such lines\n")


def since(text: str | None) -> str | None:
    """A point in time as lines have it. Raises ValueError."""
    from resilient.logs.since import point

    return None if text is None else f"{point(text, datetime.now()):%Y-%m-%d %H:%M:%S.%f}"[:-3]


def _print_at_once(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
