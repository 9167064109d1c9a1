"""What `resilient logs` does."""

import sys
import time
from datetime import datetime
from pathlib import Path

from resilient import ledger
from resilient.exits import EnvironmentUnusable
from resilient.logs.paths import DIRECTORY
from resilient.logs.reading import Follower, Wanted, follow, generations, lines
from resilient.processes import must_be_run_directory

POLL_S = 0.5
LOOKED_AT = 20  # generations; as many are files, and not packed
LOOK_BYTES = 8 << 20  # that are read of one that was not asked for


def show(run_dir: Path, wanted: Wanted, generation: int | None, *, following: bool) -> None:
    """Print lines of the newest generation that has such, or of this one; with those that come, until Ctrl-C.

    Where the newest generation of all has none, as right after a restart, standard error says which one is shown.

    Raises:
        EnvironmentUnusable: this is no run directory, or there are no such logs.
    """
    must_be_run_directory(run_dir)
    if following:
        try:
            follow(Follower(run_dir, wanted, generation), _print_at_once, lambda: time.sleep(POLL_S))
        except KeyboardInterrupt:
            return
    chosen = _newest(run_dir) if generation is None else generation
    if _print(run_dir, chosen, wanted):
        return
    other, without = _other(run_dir, chosen, wanted)
    none = f"resilient: generation {chosen} has no such lines{_beyond(run_dir, chosen, wanted)}"
    if other is None:
        others = "one other" if without == 1 else f"{without} others"
        looked = f", nor were any found in the {others} that {'was' if without == 1 else 'were'} looked at" if without else ""
        sys.stderr.write(f"{none}{looked}\n")
    elif generation is not None:
        sys.stderr.write(f"{none}; generation {other} has some: --generation {other}\n")
    else:
        sys.stderr.write(f"{none}; these are of generation {other}\n")
        _print(run_dir, other, wanted)


def _beyond(run_dir: Path, generation: int, wanted: Wanted) -> str:
    """Which ranks a generation has, where the one that is wanted is none of them."""
    for line in ledger.read_events(run_dir / ledger.EVENTS) if wanted.rank is not None else ():
        if line["event"] == "generation_started" and line["generation"] == generation and wanted.rank >= line["world_size"]:
            return f", for its ranks are 0 to {line['world_size'] - 1}"
    return ""


def _newest(run_dir: Path) -> int:
    found = generations(run_dir)
    if not found:
        raise EnvironmentUnusable(f"there are no logs of ranks in {run_dir / DIRECTORY}: nothing has been started yet")
    return found[-1]


def _print(run_dir: Path, generation: int, wanted: Wanted) -> int:
    """Print the wanted lines of a generation; how many there were."""
    shown = 0
    for line in lines(run_dir, generation, wanted):
        sys.stdout.write(f"{line}\n")
        shown += 1
    return shown


def _other(run_dir: Path, chosen: int, wanted: Wanted) -> tuple[int | None, int]:
    """The newest generation but this one in which wanted lines are found, and in how many that were looked at none were.

    One that cannot be read is left out, and so is one that is packed and large.
    """
    without = 0
    for each in [each for each in reversed(generations(run_dir)) if each != chosen][: LOOKED_AT - 1]:
        try:
            if next(lines(run_dir, each, wanted, LOOK_BYTES), None) is not None:
                return each, without
        except EnvironmentUnusable:
            continue
        without += 1
    return None, without


def since(text: str | None) -> str | None:
    """A point in time as lines have it. Raises ValueError."""
    from resilient.logs.since import point

    return None if text is None else f"{point(text, datetime.now()):%Y-%m-%d %H:%M:%S.%f}"[:-3]


def _print_at_once(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
