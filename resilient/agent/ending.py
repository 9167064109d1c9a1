"""Ends: of workers, of what they print, and of what the driver has not acknowledged. What is waited for, and for how long."""

import logging
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from resilient import spill
from resilient.agent.limits import KILL_S, OUTPUT_END_S, OUTPUT_POLL_S, SPILL_S
from resilient.agent.logs import NodeOutput
from resilient.agent.loop import Loop
from resilient.agent.memory import Salvaged
from resilient.agent.reports import record_of
from resilient.protocol.messages import Record

log = logging.getLogger(__name__)


class Killable(Protocol):
    """What `resilient.agent.workers.Workers` has of it."""

    def kill(self) -> None: ...
    def remaining(self) -> list[int]: ...
    def left_behind(self) -> list[int]: ...


def end_workers(workers: Killable, loop: Loop, limit_s: float = KILL_S) -> bool:
    """Kill workers and run turns of the loop until they are gone; False if one is not within the limit, and is left behind."""
    workers.kill()
    loop.wait_for_all(workers.remaining, limit_s)
    return not workers.left_behind()


def end_output(output: NodeOutput, loop: Loop) -> None:
    """Run turns of the loop until all that workers have printed is read; their pipes beside the heartbeat regions are gone then."""
    output.end_all()
    if not loop.wait_until(lambda: output.over, OUTPUT_END_S, poll_s=OUTPUT_POLL_S):
        log.warning("the output of the workers was not read to its end within %.0f s", OUTPUT_END_S)


def leave_records(run_dir: Path, records: Mapping[int, Sequence[Record]], loop: Loop, limit_s: float = SPILL_S) -> bool:
    """Leave records, by generation, in the run directory; whether they are there for good."""
    if not records:
        return True

    def leave() -> None:
        for generation, found in records.items():
            spill.leave(run_dir, generation, socket.gethostname(), found)

    writing = loop.in_thread(leave, "spill")
    if not loop.wait_until(writing.done, limit_s):
        log.error("%s has taken no records within %.0f s; they stay in memory on this node", run_dir, limit_s)
        return False
    error = writing.exception()
    if isinstance(error, OSError):
        log.error("%s takes no records: %s; they stay in memory on this node", run_dir, error)
        return False
    if error is not None:
        raise error
    return True


def leave_salvaged(run_dir: Path, found: Sequence[Salvaged]) -> None:
    """Leave what a killed agent left, and remove it where it was; for a thread, it waits for the file system."""
    for each in found:
        try:
            spill.leave(run_dir, each.generation, socket.gethostname(), [record_of(each.rank, record) for record in each.records])
        except OSError as error:
            log.error("the records in %s cannot be left in %s: %s; they stay", each.path, run_dir, error)
        else:
            each.path.unlink(missing_ok=True)
