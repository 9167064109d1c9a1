"""Ranks that have not finished a step for long after their start: they are inspected, and it is told what they do.

Nothing is done about it: how long a script takes until its first step nobody knows. It may read a large dataset, compile, or wait
for a file that never comes, and a person who is told can say which.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from resilient.control.inspection import Case, Inspector
from resilient.control.judgement import doing, innermost, main_thread
from resilient.control.liveness import NO_STEP, Rank, Suspicion
from resilient.outbox import Outbox
from resilient.protocol.messages import Inspection
from resilient.recovery.faults import listed
from resilient.recovery.frames import place

FIRST_S = 60.0  # after the start of a generation; told again after twice as long, four times as long, and so on
GROUPS = 8  # of ranks that do the same, told at most


class FirstStep:
    """Invariant: at most one inspection is under way.

    Args:
        node_rank_of: a rank.
    """

    def __init__(self, node_rank_of: Callable[[int], int]) -> None:
        self._inspector = Inspector(node_rank_of)
        self._began_s = self._due_s = math.inf

    def begin(self, now_s: float) -> None:
        """A generation begins."""
        self._inspector.drop()
        self._began_s, self._due_s = now_s, now_s + FIRST_S

    def ask(self, alive: Mapping[int, Rank], members: Sequence[int], now_s: float, generation: int, out: Outbox) -> None:
        """Have the agents inspect their ranks, if no step was finished for so long. Args: members: nodes by node rank."""
        if now_s < self._due_s or not self._inspector.idle(now_s):
            return
        waited_s = now_s - self._began_s
        self._due_s = self._began_s + 2 * waited_s
        ranks = Suspicion("hang", tuple(sorted(alive)), waited_s, NO_STEP)
        self._inspector.begin(ranks, alive, members, now_s, generation, out, early=True)

    def on_inspected(self, node: int, found: Mapping[int, Inspection]) -> None:
        """A node has answered."""
        self._inspector.on_inspected(node, found)

    def told(self, now_s: float) -> dict[str, object] | None:
        """What the ranks do, once, when all nodes have answered or have had their time: fields of the event `no_step_yet`."""
        case = self._inspector.finished(now_s)
        return _fields(case) if case is not None else None


def _fields(case: Case) -> dict[str, object]:
    groups: dict[tuple[bool, str], list[int]] = {}
    for rank, found in sorted(case.found.items()):
        does = doing(found)
        at = place(main_thread(found.stacks))
        text = f"{does.text}, at {at}" if at else does.text
        groups.setdefault((does.waiting == "collective", text), []).append(rank)
    first = sorted(groups, key=lambda key: (key[0], groups[key][0]))  # those that others may wait for
    parts = [f"rank{'s' * (len(groups[key]) > 1)} {listed(groups[key])}: {key[1]}" for key in first]
    left = [f"{len(parts) - GROUPS} more groups of ranks do other things"] if len(parts) > GROUPS else []
    silent = [f"node {listed(sorted(case.waiting))} does not answer"] if case.waiting else []
    return {
        "waited_s": round(case.suspicion.silent_s, 1),
        "detail": "; ".join([*parts[:GROUPS], *left, *silent]) or "no rank has begun",
        "evidence": innermost(case.found[groups[first[0]][0]].stacks) if first else "",
    }
