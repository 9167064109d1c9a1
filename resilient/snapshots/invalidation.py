"""Invalidation: what roll-backs have invalidated, whoever holds it, and whether all have been told."""

from checkpoint.protocol import Discard, SnapshotKey
from resilient.outbox import Outbox
from resilient.recovery.rollback import InvalidationRule, without_implied
from resilient.snapshots.catalog import Catalog


class Invalidation:
    """The rules by which snapshots are invalid.

    No worker runs between the quarantine on the durable tier and the next start, so there will be no more of it; nor a commit,
    behind the fence. Invariant: as long as something is due, no generation may start.
    """

    def __init__(self, invalidated: tuple[InvalidationRule, ...], catalog: Catalog) -> None:
        self._catalog = catalog
        self._rules = without_implied(invalidated)
        self._due = bool(invalidated)
        self._asked: list[InvalidationRule] = []  # what was last handed out to be quarantined

    def covers(self, key: SnapshotKey) -> bool:
        """Whether a snapshot is invalid."""
        return any(rule.covers(key.step, key.generation) for rule in self._rules)

    def add(self, generation: int, step: int) -> None:
        """What generations up to this one computed beyond a step is invalid."""
        self._rules = without_implied([*self._rules, InvalidationRule(generation, step)])
        self._due = True

    def reappeared(self) -> None:
        """A daemon still holds something of it: it was not there to be told, or died over it."""
        self._due = True

    def due(self) -> tuple[InvalidationRule, ...]:
        """What is to be quarantined before the next start; nothing where all was done."""
        if not self._due:
            return ()
        self._asked = self._rules
        return tuple(self._rules)

    def done(self, generation: int, out: Outbox) -> None:
        """The durable tier has quarantined what was due; daemons discard theirs. What was added since is still due."""
        for rule in self._asked:
            request = Discard(generation=generation, step=rule.step, invalid_generation=rule.generation)
            for node in self._catalog.addresses:
                out.request(node, request)
        if self._asked == self._rules:
            self._due = False
        self._asked = []
