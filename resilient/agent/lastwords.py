"""The last words of workers that are about to be killed because they do not get on: what is left in the incident's folder.

The driver leaves there what an inspection of all ranks has found (`resilient.agent.inspection`). Here comes what is asked for only
once it is certain that they will be killed: the flight recorder of each rank, and the stacks of a process that is stopped, which
must be continued for it.
"""

import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from resilient.agent import inspection, recorder
from resilient.driver.lease import must_be_there
from resilient.logs import archive

WINDOW_S = 1.0  # in which a rank says where it stands, if it can say anything: the machine may be busy
RECORD_S = 3.0  # in which one that has said so leaves its record: 2,000 collectives with stacks take a tenth of a second
FRESH_S = 60.0  # what a rank has said in the inspection before this is not asked for again: it may be at it still
APART = 64  # ranks of a world up to which each has files of its own in the folder; in a larger one a node has one file


@dataclass(frozen=True)
class Witness:
    """A worker that may be asked: its process, and where it leaves its record, and its stacks if they are not known yet."""

    pid: int
    record: Path
    stacks: Path | None


def take(witnesses: Mapping[int, Witness], folder: Path, node: int, *, world: int) -> None:
    """Leave in the folder what the workers of a node have to say, and a list of it: `node<n>.txt`.

    The folder is made if need be, with the one that it is in; where the run directory is gone, nothing is.

    Args:
        folder: of the incident, `RUN_DIR/incidents/<incident>`.
        world: ranks of all nodes; where they are many, all that a node leaves is one file, `node<n>.tar.zst`.

    Raises:
        OSError: the folder cannot be written.
    """
    must_be_there(folder.parents[1])
    for each in (folder.parent, folder):
        each.mkdir(exist_ok=True)
    if world <= APART:
        _take(witnesses, folder, f"node{node}.txt")
        return
    with tempfile.TemporaryDirectory() as name:
        apart = Path(name) / f"node{node}"
        apart.mkdir()
        _take(witnesses, apart, f"node{node}.txt")
        archive.add(folder / f"node{node}.tar.zst", [apart])


def _take(witnesses: Mapping[int, Witness], folder: Path, name: str) -> None:
    stopped = {rank for rank, each in witnesses.items() if inspection.state_of(each.pid) == "T"}
    awake = {rank: each for rank, each in witnesses.items() if rank not in stopped}
    for each in awake.values():
        if not recorder.stands(each.record, FRESH_S):
            recorder.ask(each.pid, each.record)
    asked_t = time.monotonic()
    lines: dict[int, str] = {}
    unknown = {rank: (each.pid, each.stacks) for rank in stopped if (each := witnesses[rank]).stacks is not None}
    for rank, stacks in inspection.stacks_of_stopped(unknown).items():
        (folder / f"rank{rank}.stopped.txt").write_text(stacks, encoding="utf-8")
        lines[rank] = f"where it was stopped: rank{rank}.stopped.txt; "
    for rank in stopped:
        lines[rank] = lines.get(rank, "") + "flight recorder: not asked, the process is stopped"
    recorder.wait_for_standings([each.record for each in awake.values()], asked_t + WINDOW_S)
    able = [each.record for each in awake.values() if recorder.stands(each.record)]
    recorder.wait_for_answers(able, asked_t + RECORD_S)
    for rank, each in awake.items():
        lines[rank] = _record(rank, each.record, folder)
    (folder / name).write_text("".join(f"rank {rank}: {line}\n" for rank, line in sorted(lines.items())), encoding="utf-8")


def _record(rank: int, record: Path, folder: Path) -> str:
    if not record.exists():
        window_s = RECORD_S if recorder.stands(record) else WINDOW_S
        return f"flight recorder: none, it did not answer within {window_s:g} s"
    for backend, file in recorder.answers(record).items():
        shutil.copyfile(file, folder / f"{backend}_trace_rank_{rank}")
    said = record.read_text(encoding="utf-8")
    return f"flight recorder: {'; '.join(said.splitlines())}"
