"""Hangs where collectives are asynchronous, as NCCL's: a rank enqueues them and waits elsewhere, spinning in the driver.

A world is played: every rank runs the same program of a training step on groups of a mesh, each group's collectives finish in order
once all members have enqueued them, and one rank stops getting on somewhere. Out of it come flight recorders and main threads.
"""

import random
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest

from resilient.control.judgement import culprit
from resilient.control.liveness import Rank, Suspicion
from resilient.protocol.messages import Heartbeat, Inspection
from resilient.recovery.faults import Fault
from resilient.recovery.standing import standing

Manner = Literal["spins", "sleeps", "reads", "keeps the interpreter", "stuck in the kernel", "stopped"]
MANNERS: tuple[Manner, ...] = ("spins", "sleeps", "reads", "keeps the interpreter", "stuck in the kernel", "stopped")
SYNC = "found.tolist()"
STACKS = 'Current thread 0x1 (most recent call first):\n  File "{}", line 7 in {}\n  File "/y/train.py", line 90 in main\n'
WAITER = STACKS.format("/y/trainer/gradients.py", "agree")


@dataclass(frozen=True)
class Op:
    """A collective of a group ("tp", "dp", "all"), or None: the rank needs a number of the GPU."""

    group: str | None
    name: str = ""


def groups_of(rank: int, tp: int, world: int) -> dict[str, tuple[int, ...]]:
    first = rank - rank % tp
    return {"tp": tuple(range(first, first + tp)), "dp": tuple(range(rank % tp, world, tp)), "all": tuple(range(world))}


def program(chance: random.Random) -> list[Op]:
    """A step: gathers ahead of use, sums inside tensor parallelism, and at its end a number that the CPU needs."""
    step = [Op("dp", "all_gather")]
    for _ in range(chance.randint(1, 3)):
        step += [Op("dp", "all_gather"), *[Op("tp", "all_reduce")] * chance.randint(1, 3)]
    step += [*[Op("dp", "reduce_scatter")] * chance.randint(1, 2), Op("all", "all_reduce"), Op(None)]
    return step * 4


def play(chance: random.Random, ops: list[Op], tp: int, world: int, guilty: int) -> tuple[list[int], dict[tuple[int, ...], int]]:
    """How far each rank enqueues, and how many collectives of each group are finished, when one never gets past some place."""
    last = chance.choice([place for place in range(len(ops) * 3 // 4, len(ops)) if ops[place].group is not None])
    places, finished = [0] * world, dict[tuple[int, ...], int]()
    members = [groups_of(rank, tp, world) for rank in range(world)]
    while True:
        moved = False
        for rank in range(world):
            while places[rank] < (last if rank == guilty else len(ops)):
                op = ops[places[rank]]
                if op.group is None and any(
                    sum(each.group == name for each in ops[: places[rank]]) > finished.get(ranks, 0)
                    for name, ranks in members[rank].items()
                ):
                    break
                places[rank] += 1
                moved = True
        for rank in range(world):
            for name, ranks in members[rank].items():
                finished[ranks] = min(sum(op.group == name for op in ops[: places[each]]) for each in ranks)
        if not moved:
            return places, finished


def record(rank: int, ops: list[Op], place: int, finished: dict[tuple[int, ...], int], tp: int, world: int) -> dict[str, Any]:
    """What torch's flight recorder would say."""
    groups, numbers, entries = groups_of(rank, tp, world), dict[str, int](), []
    for op in ops[:place]:
        if op.group is not None:
            number = numbers[op.group] = numbers.get(op.group, 0) + 1
            done = number <= finished[groups[op.group]]
            entries.append(
                {
                    "process_group": (op.group, f"mesh_{op.group}"),
                    "collective_seq_id": number,
                    "p2p_seq_id": 0,
                    "profiling_name": f"nccl:{op.name}",
                    "input_sizes": [[1024]],
                    "retired": done and number < finished[groups[op.group]],
                    "state": "completed" if done else "scheduled",
                    "is_p2p": False,
                }
            )
    return {"entries": entries, "pg_config": {name: {"ranks": str(list(ranks))} for name, ranks in groups.items()}}


def inspected(rank: int, its: dict[str, Any], manner: Manner | None) -> Inspection:
    """What its agent finds. Args: manner: how the guilty rank hangs; None: it waits for the GPU, spinning."""
    stands = standing(its)
    if manner is None:
        held = replace(stands, held=SYNC) if stands is not None else None
        return Inspection(state="R", cpu=0.99, stacks=WAITER, standing=held)
    where = STACKS.format("/y/data.py", "read")
    match manner:
        case "spins":
            return Inspection(state="R", cpu=1.0, stacks=where, standing=stands)
        case "sleeps" | "reads":
            return Inspection(state="S", cpu=0.0, stacks=where, standing=stands)
        case "keeps the interpreter":
            return Inspection(state="R", cpu=1.0, stacks=where)
        case "stuck in the kernel":
            return Inspection(state="D", cpu=0.0, stacks="")
        case "stopped":
            return Inspection(state="T", cpu=0.0, stacks=where)


def judged(seed: int) -> tuple[int, Fault | None]:
    """A random hang: the guilty rank, and the fault that is found."""
    chance = random.Random(seed)
    tp, dp = chance.choice([(1, 2), (2, 2), (2, 4), (4, 2), (1, 8), (4, 4)])
    world, ops = tp * dp, program(chance)
    guilty, manner = chance.randrange(world), chance.choice(MANNERS)
    places, finished = play(chance, ops, tp, world, guilty)
    inspections = {
        rank: inspected(rank, record(rank, ops, places[rank], finished, tp, world), manner if rank == guilty else None)
        for rank in range(world)
    }
    waits = [rank for rank in range(world) if rank != guilty and inspections[rank].standing is not None]
    assert waits, "somebody waits, or it was no hang"
    beat = Heartbeat(step=10, phase="step", beat_t=1.0, activity_t=1.0, silent_s=9.0, state="R", phased=True)
    alive = {rank: Rank(beat, first_step=0, active_s=1.0) for rank in range(world)}
    suspicion = Suspicion("hang", tuple(waits), 9.0, 10)
    return guilty, culprit("g1-1", suspicion, inspections, range(world), alive, lambda rank: rank // tp, 100.0)


@pytest.mark.parametrize("seed", range(100))
def test_the_rank_that_hangs_is_named_where_collectives_are_asynchronous(seed: int):
    guilty, fault = judged(seed)
    assert fault is not None
    assert fault.ranks == (guilty,)
