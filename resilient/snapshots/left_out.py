"""Steps beyond the newest complete one: of which of them a whole snapshot may still come, and which are left out.

A node that finds no buffer skips a step, and then no snapshot of it will ever be whole. Others may hold their shard of it, and wait
with it for the rest, until they are told that it is left out.
"""

from collections.abc import Iterable

SILENT_STEPS = 3
"""Of which a node has reported; those before are sealed, or will never be."""

OPEN_STEPS = 64
"""Of which nodes have reported while none became complete; what is older is given up."""


class LeftOut:
    """The open steps of a generation, those beyond `upto`.

    Invariants: `steps` and what is held are beyond `upto` and have no step in common; there are at most `OPEN_STEPS` of both.

    Attributes:
        decided: the newest step that is complete in memory, or that the generation went on from.
        upto: as far as which no further step can become complete.
        steps: of which some node has no shard.
        again: how often a step was taken again after it was left out, where it was.
    """

    def __init__(self) -> None:
        self.decided = 0
        self.upto = 0
        self.steps: set[int] = set()
        self._held: set[int] = set()  # of which some node holds its shard
        self.again: dict[int, int] = {}
        self._reported: dict[int, set[int]] = {}  # by node the open steps of which it has said what became of them

    def begin(self) -> None:
        """A generation begins."""
        self.decided = self.upto = 0
        self.steps, self._held, self.again, self._reported = set(), set(), {}, {}

    def decide(self, step: int) -> None:
        """No step as far as this one is open any more."""
        self.decided = max(self.decided, step)
        self._close(step)

    def on_skipped(self, node: int, step: int, *, again: int) -> bool:
        """A node has no shard of a step, which was taken so often before; whether a step was left out by that.

        Where others have taken the step again already, what a node says of the time before does not count any more.
        """
        if step <= self.upto:
            return False
        known = self.again.get(step, 0)
        if again < known:
            return self._report(node, step)
        if again > known:
            self.again[step] = again
        new = step not in self.steps
        self.steps.add(step)
        self._held.discard(step)
        return self._report(node, step) or new

    def on_held(self, node: int, step: int, *, again: int) -> bool:
        """A node holds its shard of a step, which was taken so often before; whether a step was left out by that."""
        if step <= self.upto:
            return False
        if again > self.again.get(step, 0):
            self.again[step] = again
            self.steps.discard(step)
        if step not in self.steps:
            self._held.add(step)
        return self._report(node, step)

    def on_absent(self, held: Iterable[int]) -> bool:
        """A node's new daemon has found these alone; whether a step that others hold was left out by that.

        A step that is taken again is not: the node's shard of it may come later.
        """
        absent = self._held.difference(held) - self.again.keys()
        self.steps |= absent
        self._held -= absent
        return bool(absent)

    def _report(self, node: int, step: int) -> bool:
        """A node has said what became of a step. Of one before several such it will say nothing any more."""
        reported = self._reported[node] = {each for each in self._reported.get(node, ()) if each > self.upto}
        reported.add(step)
        silent = {each for each in self._held if each not in reported and sum(later > each for later in reported) >= SILENT_STEPS}
        self.steps |= silent
        self._held -= silent
        if len(self.steps) + len(self._held) > OPEN_STEPS:
            self._close(min(self.steps | self._held))
            return True
        return bool(silent)

    def _close(self, step: int) -> None:
        self.upto = max(self.upto, step)
        self.steps = {each for each in self.steps if each > self.upto}
        self._held = {each for each in self._held if each > self.upto}
        self.again = {each: again for each, again in self.again.items() if each > self.upto}
