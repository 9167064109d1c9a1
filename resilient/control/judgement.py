"""Whose fault a silence is: that of whoever does not wait for others, but is stopped, stuck in the kernel, spinning, asleep, or a
step behind. What ranks are doing, their agents have found out (`Inspected`).
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from resilient.control.liveness import NO_STEP, Rank, Suspicion
from resilient.protocol.messages import Heartbeat, Inspection
from resilient.recovery.faults import Fault, Kind, listed
from resilient.recovery.standing import Standing, astray

Waiting = Literal["collective", "compiling"]

# Files of the innermost Python frames of a thread that waits for other ranks, and of one that compiles.
# torch.distributed.checkpoint writes files; where it waits for others, the collective's own frames are further in.
_COLLECTIVE = re.compile(r"torch/distributed/(?!checkpoint/)|torch/_C/_distributed")
# (What is compiled, or kept from it as FSDP's hooks are, runs through other files of the same packages.)
_COMPILING = (
    *("torch/_dynamo/convert_frame", "torch/_inductor/compile_fx", "torch/_inductor/codecache", "torch/_inductor/async_compile"),
    "triton/compiler",
)
_BACKWARD = "torch/autograd/"  # whose hooks wait for collectives without a frame of Python
_DEPTH = 4
TOLD_S = 0.1  # between a rank's last step and what it did then: less is not told
ALONE = 6.0  # ranks that all evaluate a model for an hour harm nobody, and their peers' collectives do not time out
COMPUTING = ("step", "eval", "start")  # phases in which whoever spins may compute


@dataclass(frozen=True)
class Doing:
    """What a rank does: in a word, in a few, and whether it is something that may take long."""

    what: str
    text: str
    waiting: Waiting | None


_NO_HEARTBEAT = Doing("silent", "without a heartbeat since its start", None)
_NO_ANSWER = Doing("silent", "silent, and its agent does not answer", None)


def culprit(
    fault_id: str,
    suspicion: Suspicion,
    inspections: Mapping[int, Inspection],
    asked: Collection[int],
    alive: Mapping[int, Rank],
    node_rank_of: Callable[[int], int],
    ceiling_s: float,
) -> Fault | None:
    """The fault behind a silence, with node ranks for nodes; None if a rank does what may take long, or the job is suspended.

    Args:
        inspections: of those ranks whose agents have answered.
        asked: the ranks whose agents were asked; those of the others are neither guilty nor cleared.
        alive: the ranks that have not ended.
        node_rank_of: a rank.
        ceiling_s: nothing may take longer for which others wait; `ALONE` times as long where nobody does.
    """
    doings = {rank: doing(each) for rank, each in inspections.items() if rank in alive}
    asked = [rank for rank in asked if rank in alive]
    if not asked:
        return None
    longest_s = ceiling_s if any(each.waiting == "collective" for each in doings.values()) else ALONE * ceiling_s
    may_take_long = suspicion.kind == "hang" and suspicion.silent_s < longest_s
    if may_take_long and any(_takes_long(alive[rank], each, rank in suspicion.ranks) for rank, each in doings.items()):
        return None
    found = [rank for rank, each in doings.items() if each.what == "stopped"]
    if len(found) == len(asked) > 1:
        return None
    if not found:
        found = [rank for rank in asked if rank not in doings]  # not even its agent answers
    if not found:
        found = [rank for rank, each in doings.items() if each.waiting != "collective"]
    if not found or len(found) == len(asked) > 1:
        behind = min(rank.heartbeat.step for rank in alive.values())
        last = [number for number, rank in alive.items() if rank.heartbeat.step == behind]
        found = last if len(last) < len(alive) else found or _astray(inspections, asked) or list(suspicion.ranks)
        if any(rank not in alive for rank in found):  # it has ended well meanwhile: it was not stuck, and its peers end by that
            return None
    return _fault(fault_id, sorted(found), suspicion, inspections, doings, alive, node_rank_of)


def waiting_and_others(inspections: Mapping[int, Inspection]) -> tuple[set[int], set[int]]:
    """Of ranks that live and are not stopped, those that wait for others, and those that do something else."""
    doings = {rank: doing(each) for rank, each in inspections.items()}
    waits = {rank for rank, each in doings.items() if each.waiting == "collective"}
    return waits, {rank for rank, each in doings.items() if each.what not in ("stopped", "dead")} - waits


def _takes_long(rank: Rank, its: Doing, suspected: bool) -> bool:
    """Whether a rank may be doing what takes long.

    It compiles; or it evaluates, and others wait for it before its own time is over. Where its phase is inferred, so does a rank
    that writes a checkpoint, and one that computes may be in a validation. Whoever waits for others does none of this.
    """
    heartbeat = rank.heartbeat
    if its.waiting is not None:
        return its.waiting == "compiling"
    if heartbeat.phase == "eval" and not suspected:
        return True
    if not heartbeat.inferred:
        return False
    computing = heartbeat.phase in COMPUTING or not heartbeat.phased or rank.by_collectives
    return (heartbeat.phase == "snapshot" and not suspected) or (computing and its.what == "spinning")


def _fault(
    fault_id: str,
    culprits: list[int],
    suspicion: Suspicion,
    inspections: Mapping[int, Inspection],
    doings: Mapping[int, Doing],
    alive: Mapping[int, Rank],
    node_rank_of: Callable[[int], int],
) -> Fault:
    first, guilty = culprits[0], set(culprits)
    heartbeat = alive[first].heartbeat
    mine = doings.get(first, _NO_ANSWER if heartbeat.activity_t else _NO_HEARTBEAT)
    waiting = sorted(rank for rank, each in doings.items() if rank not in guilty and each.waiting == "collective")
    kind: Kind = "stopped" if mine.what == "stopped" else "collective_timeout" if mine.waiting == "collective" else "hang"
    step = heartbeat.step + 1
    wait = f"rank {waiting[0]} waits" if len(waiting) == 1 else f"ranks {listed(waiting)} wait"
    waited = f"; {wait} for others" if waiting else ""
    stands = inspections[first].standing if first in inspections else None
    where = f": {stands}" if stands is not None and mine.waiting == "collective" else ""
    who = f"rank {first} is" if len(culprits) == 1 else f"ranks {listed(culprits)} are"
    at = f" at step {step}, phase {heartbeat.phase}" if not alive[first].by_collectives else ""
    silent = f"silent for {suspicion.silent_s:.1f} s{_no_step(heartbeat, suspicion.silent_s) if first in suspicion.ranks else ''}"
    return Fault(
        fault_id=fault_id,
        kind=kind,
        cause=mine.what,
        ranks=tuple(culprits),
        nodes=tuple(sorted({node_rank_of(rank) for rank in culprits})),
        step=step,
        detail=f"{who} {mine.text}{at}, {silent}{where}{waited}",
        evidence=(innermost(inspections[first].stacks) if first in inspections else "") or mine.text,
        detect_s=suspicion.silent_s,
        phase=heartbeat.phase,
    )


def _no_step(heartbeat: Heartbeat, silent_s: float) -> str:
    """For how long a rank has finished no step, where it has done something since the last one."""
    since_s = heartbeat.activity_t - heartbeat.beat_t
    return f" and without a step for {silent_s + since_s:.1f} s" if heartbeat.step != NO_STEP and since_s >= TOLD_S else ""


def _astray(inspections: Mapping[int, Inspection], asked: Collection[int]) -> list[int]:
    """Of ranks that all wait, those that are in another collective than the others, where all say in which they are."""
    standings: dict[int, Standing] = {}
    for rank in asked:
        stands = inspections[rank].standing if rank in inspections else None
        if stands is None:
            return []
        standings[rank] = stands
    return astray(standings)


def doing(inspection: Inspection) -> Doing:
    """What a rank does, from its process and its stacks."""
    state, stacks = inspection.state, inspection.stacks
    frames = innermost(stacks)
    if state == "T":
        return Doing("stopped", "stopped (state T)", None)
    if not state or state == "Z":
        return Doing("dead", "dead", None)
    if any(name in thread for thread in _threads(stacks) for name in _COMPILING):
        return Doing("compiling", "compiling", "compiling")
    if any(_COLLECTIVE.search(frame) for thread in _threads(stacks) for frame in thread.splitlines()[:_DEPTH]):
        return Doing("waiting", "waiting in a collective", "collective")
    if inspection.standing is not None and _BACKWARD in frames.partition("\n")[0]:
        return Doing("waiting", "waiting in a collective", "collective")
    # NCCL's are asynchronous: a rank waits, or spins, wherever it next needs the GPU.
    if inspection.standing is not None and inspection.standing.held is not None:
        return Doing("waiting", "waiting in a collective", "collective")
    if state == "D":
        return Doing("io", "stuck in the kernel (state D)", None)
    where = f" in {frames.splitlines()[0].strip()}" if frames else ""
    if inspection.cpu >= 0.5:
        return Doing("spinning", f"spinning{where}", None)
    return Doing("blocked", f"blocked{where}", None)


def _threads(stacks: str) -> list[str]:
    """The frames of each thread, most recent call first."""
    parts = stacks.replace("Current thread ", "Thread ").split("Thread ")
    return [part.partition("\n")[2] for part in parts[1:]]


def innermost(stacks: str) -> str:
    """The most recent calls of the main thread, which faulthandler tells last."""
    return "\n".join(main_thread(stacks).splitlines()[: 2 * _DEPTH]).strip()


def main_thread(stacks: str) -> str:
    """The frames of the main thread, the most recent call first."""
    threads = _threads(stacks)
    return threads[-1] if threads else ""
