"""Which faults are a node's own, so that the next jobs of a campaign do without it. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resilient.config.timeouts import SILENCE_REPORT_S

REPEATED = 3  # faults of one node, at steps that differ: a bug comes again at the same step, or on any node

_WORKERS_FAIL = frozenset({"exit", "exception", "stopped", "hang", "collective_timeout"})


@dataclass(frozen=True)
class Verdict:
    """A fault, what was done about it, and the faults before it: lines of the ledger."""

    fault: Mapping[str, Any]
    action: str
    earlier: Sequence[Mapping[str, Any]]

    @property
    def times(self) -> int:
        """At how many steps workers of this node, and of no other, have failed."""
        same = [each for each in (*self.earlier, self.fault) if each["nodes"] == self.fault["nodes"]]
        return len({each["step"] for each in same if each["kind"] in _WORKERS_FAIL and each["class"] != "deterministic"})


@dataclass(frozen=True)
class Row:
    """When a fault is the node's own, and what to say of it."""

    applies: Callable[[Verdict], bool]
    reason: Callable[[Verdict], str]


TABLE: tuple[Row, ...] = (
    Row(lambda v: v.action == "exclude_node", lambda v: v.fault["detail"]),
    # An agent that ends in mid-sentence may have been killed; a node that is gone says nothing.
    Row(lambda v: v.fault["kind"] == "node_lost" and v.fault["detect_s"] > SILENCE_REPORT_S, lambda v: v.fault["detail"]),
    Row(lambda v: v.fault["kind"] == "straggler" and v.action == "replace_node", lambda v: v.fault["detail"]),
    Row(lambda v: v.fault.get("class") == "node", lambda v: v.fault["detail"]),
    Row(
        lambda v: v.fault["kind"] in _WORKERS_FAIL and v.times >= REPEATED,
        lambda v: f"workers failed there at {v.times} steps, the last time: {v.fault['detail']}",
    ),
)


def nodes_at_fault(fault: Mapping[str, Any], action: str, earlier: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """The nodes whose own fault a fault is, each with the reason; none where it happened while the job was ending.

    Args:
        fault: a line of the ledger.
        action: the name of what was done about it.
        earlier: the faults of this job before it.
    """
    verdict = Verdict(fault, action, earlier)
    row = None if action == "finish_drain" else next((row for row in TABLE if row.applies(verdict)), None)
    return {} if row is None else dict.fromkeys(fault["nodes"], row.reason(verdict))
