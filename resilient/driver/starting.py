"""What the start of a job is waiting for, in words. Pure.

Each node goes through the same stages until it is ready; the preparation of the entry point runs beside them on one node.
"""

from collections import Counter
from collections.abc import Mapping
from enum import Enum

NAMED = 4  # nodes of a stage; of more, only the number is said


class Stage(Enum):
    """What a node has still to do before it can take part."""

    STARTS = "start"
    IMPORTS = "import the entry point"
    CHECKS = "pass the health check"


class Starting:
    """Invariant: a node is in a stage from its launch until it is ready or lost; nothing is waited for once `over`."""

    def __init__(self) -> None:
        self._stages: dict[int, Stage] = {}
        self._over = False

    def reached(self, node: int, stage: Stage) -> None:
        self._stages[node] = stage

    def ready(self, node: int) -> None:
        """Also of one that is lost: nobody waits for it here."""
        self._stages.pop(node, None)

    def over(self) -> None:
        """The first generation has started."""
        self._over = True

    def text(self, hosts: Mapping[int, str], prepared: bool) -> str | None:
        """What is waited for; None if nothing is.

        Args:
            hosts: names of nodes that have one.
            prepared: whether the preparation has come to its end.
        """
        if self._over:
            return None
        counts = Counter(self._stages.values())
        parts = [f"for {self._part(stage, hosts, counts[stage])}" for stage in Stage if counts[stage]]
        if not prepared:
            parts.append("and for the entry point to be prepared" if parts else "for the entry point to be prepared")
        return f"waiting {', '.join(parts)}" if parts else None

    def _part(self, stage: Stage, hosts: Mapping[int, str], count: int) -> str:
        if count > NAMED:
            return f"{count} nodes to {stage.value}"
        nodes = sorted(node for node, each in self._stages.items() if each is stage)
        return f"{', '.join(hosts.get(node, f'node {node}') for node in nodes)} to {stage.value}"
