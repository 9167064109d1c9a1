"""A look at a campaign from outside: the ends of its files, its lease, and Slurm's queue. Reads little, however long it was."""

import asyncio
import math
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from resilient import entries, ledger
from resilient.driver.lease import ahead_s, holder
from resilient.exits import ForeseenError
from resilient.processes import must_be_run_directory
from resilient.slurm.succession import Succession
from resilient.watch.judgement import Judgement, Seen, judge

TAIL_BYTES = 256 << 10
READ_BYTES = TAIL_BYTES  # at once
LOOK_S = 90.0  # for one campaign, Slurm's answer included
TURN_S = 2.0  # after which the next one is looked at meanwhile
_STEPS = 64
_STARTED, _FINISHED = b'"event": "run_started"', b'"event": "run_finished"'  # as the ledger's writer spells it


def look(run_dir: Path, now: float) -> Seen:
    """What is seen of a campaign at a time, in unix seconds. Raises ForeseenError, OSError."""
    succession = Succession.found(run_dir)
    if succession is None:
        must_be_run_directory(run_dir)
    steps = [line for line in _tail(run_dir / ledger.METRICS) if entries.is_metrics(line) and "step" in line]
    last = steps[-1] if steps else {}
    loss = last.get("loss")
    started, finished = _ends(run_dir / ledger.EVENTS)
    owner = holder(run_dir)
    jobs = asyncio.run(succession.inspect(run_dir.stat().st_uid)) if succession is not None else None
    chain = succession.chain if succession is not None else None
    if chain is not None and chain.begun_t is not None and chain.begun_t > finished.get("t", 0.0):
        finished = {}  # somebody has submitted it again since
    return Seen(
        name=str(started.get("name") or (succession.name if succession is not None else run_dir.absolute().name)),
        now=now + ahead_s(owner),
        step=int(last.get("step", 0)),
        target_step=started.get("target_step"),
        loss=float(loss) if loss is not None and math.isfinite(loss) else None,
        steps_t=tuple(float(line["t"]) for line in steps[-_STEPS:]),
        started_t=float(started["t"]) if started else None,
        exit_code=finished.get("exit_code"),
        driver=None if owner is None else str(owner) if owner.pid else "its driver is on this machine",
        jobs=jobs,
        chain=chain is not None and chain.over is None,
        silent=succession is not None and jobs is None,
    )


def without_last_word(run_dir: Path) -> bool:
    """Whether the driver of the newest job has ended without one, and may have left things behind. Raises OSError."""
    started, finished = _ends(run_dir / ledger.EVENTS)
    return bool(started) and not finished


def judged(
    run_dirs: Sequence[Path], now: float, patience_s: float | None, limit_s: float = LOOK_S
) -> list[tuple[Seen | None, Judgement]]:
    """How each campaign is; unknown where it cannot be seen in time, as on a file system that does not answer.

    They are looked at one after the other, so that Slurm is not asked about all of them at once; one that takes long is waited for
    at the end, and all that do together take no longer than one.
    """
    looks = []
    for run_dir in run_dirs:
        looks.append(_Look(run_dir, now, limit_s))
        looks[-1].wait(TURN_S)
    found = [each.seen() for each in looks]
    return [(None, Judgement("unknown", seen)) if isinstance(seen, str) else (seen, judge(seen, patience_s)) for seen in found]


class _Look:
    """A look in a thread of its own, which may be abandoned."""

    def __init__(self, run_dir: Path, now: float, limit_s: float) -> None:
        self._run_dir, self._now, self._limit_s = run_dir, now, limit_s
        self._until = time.monotonic() + limit_s
        self._found: list[Seen | str] = []
        self._thread = threading.Thread(target=self._see, daemon=True)
        self._thread.start()

    def _see(self) -> None:
        try:
            self._found.append(look(self._run_dir, self._now))
        except ForeseenError as error:
            self._found.append(str(error))
        except OSError as error:
            self._found.append(f"{error.filename or self._run_dir} cannot be read: {error.strerror or error}")

    def wait(self, most_s: float) -> None:
        """Until it is over, or its limit, or so long."""
        self._thread.join(max(0.0, min(most_s, self._until - time.monotonic())))

    def seen(self) -> Seen | str:
        """What is seen by the limit, or why nothing is."""
        self.wait(self._limit_s)
        return self._found[0] if self._found else f"{self._run_dir} was not read in {self._limit_s:g} s"


def _tail(path: Path) -> list[dict[str, Any]]:
    """The whole lines at the end of a file, in order."""
    found: list[dict[str, Any]] = []
    size = 0
    for line in _backwards(path):
        size += len(line) + 1
        if size > TAIL_BYTES:
            break
        if (entry := ledger.parsed(line)) is not None:
            found.append(entry)
    return found[::-1]


def _ends(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The newest `run_started`, and the `run_finished` behind it; empty where there is none."""
    finished: dict[str, Any] = {}
    for line in _backwards(path):
        if _STARTED in line or (_FINISHED in line and not finished):
            found = ledger.parsed(line)
            if found is None or not entries.is_event(found):
                continue
            if found["event"] == "run_started":
                return found, finished
            if found["event"] == "run_finished":
                finished = found
    return {}, finished


def _backwards(path: Path) -> Iterator[bytes]:
    """The lines of a file and of its parts that were moved aside, the last one first."""
    for part in reversed(ledger.parts(path)):
        try:
            file = part.open("rb")
        except FileNotFoundError:
            continue
        with file:
            end, rest = file.seek(0, 2), b""
            while end > 0:
                start = max(0, end - READ_BYTES)
                file.seek(start)
                first, *lines = (file.read(end - start) + rest).split(b"\n")
                yield from reversed(lines)
                end, rest = start, first if len(first) <= ledger.LINE_BYTES else b""
            yield rest
