"""Health of tiers: their troubles, and the faults that the ledger is told of. Training goes on through all of them.

One cause may concern thousands of nodes at the same time. At most eight of them get an event each; the others are counted.
"""

from dataclasses import dataclass, field

from checkpoint.protocol import TierTrouble, TierWell
from resilient.outbox import Outbox

NAMED = 8
"""Nodes that are named of those with the same fault."""


@dataclass
class _Troubles:
    """The nodes on which a tier does not work.

    Attributes:
        named: those with a fault of their own, and its id.
        others: those that share the fault `others_id`, which is over when none of them is left.
    """

    named: dict[int, str] = field(default_factory=dict)
    others: set[int] = field(default_factory=set)
    others_id: str = ""


@dataclass
class _Crowd:
    """Nodes with the same fault. Attributes: named: of those that had no event of their own, the first ones."""

    count: int = 0
    named: list[int] = field(default_factory=list)


class Faults:
    """Faults of storage. Invariant: every fault has an id of its own within the job."""

    def __init__(self) -> None:
        self._count = 0
        self._crowds: dict[str, _Crowd] = {}

    def report(
        self,
        nodes: list[int],
        tier: str,
        detail: str,
        generation: int,
        out: Outbox,
        *,
        step: int | None = None,
        evidence: str = "",
    ) -> str:
        """Write a fault; its id."""
        self._count += 1
        fault_id = f"s{self._count}"
        fields = {**_ids(fault_id), "kind": "storage", "ranks": [], "nodes": nodes, "step": step}
        what = {"detail": f"tier {tier}: {detail}", "evidence": evidence, "detect_s": 0.0}
        out.event("fault", {**fields, **what}, generation)
        return fault_id

    def report_one_of_many(self, cause: str, node: int, tier: str, detail: str, generation: int, out: Outbox, *, step: int) -> None:
        """Write the fault of a node where it is one of the first with this cause; else count it, until `close`."""
        crowd = self._crowds.setdefault(cause, _Crowd())
        crowd.count += 1
        if crowd.count <= NAMED:
            self.report([node], tier, detail, generation, out, step=step)
        elif len(crowd.named) < NAMED:
            crowd.named.append(node)

    def close(self, cause: str, tier: str, detail: str, generation: int, out: Outbox, *, step: int) -> None:
        """There will be no more faults of this cause: write those that were only counted."""
        crowd = self._crowds.pop(cause, None)
        if crowd is not None and crowd.count > NAMED:
            more = crowd.count - NAMED
            names = ", ".join(map(str, crowd.named)) + (", ..." if more > len(crowd.named) else "")
            self.report(crowd.named, tier, f"{detail}, on {more} more nodes: {names}", generation, out, step=step)


class TierHealth:
    """The troubles that there are at present. Invariant: of a tier, at most `NAMED` + 1 faults are not over."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._troubles: dict[str, _Troubles] = {}

    def troubled(self, tier: str) -> bool:
        """Whether a tier does not work on some node."""
        found = self._troubles.get(tier)
        return found is not None and bool(found.named or found.others)

    def on_trouble(self, node: int, news: TierTrouble, generation: int, out: Outbox) -> None:
        """A node cannot write a tier."""
        troubles = self._troubles.setdefault(news.tier, _Troubles())
        if node in troubles.named or node in troubles.others:
            return
        crowded = len(troubles.named) >= NAMED
        if crowded and troubles.others:
            troubles.others.add(node)
            return
        detail = f"{news.detail} (and on more nodes)" if crowded else news.detail
        evidence = f"errno {news.errno}" if news.errno else ""
        fault_id = self._faults.report([node], news.tier, detail, generation, out, evidence=evidence)
        if crowded:
            troubles.others, troubles.others_id = {node}, fault_id
        else:
            troubles.named[node] = fault_id
        reason = f"{news.tier} is tried again; training goes on"
        out.event("action", {**_ids(fault_id), "name": "degrade_tier", "reason": reason}, generation)

    def on_silence(self, node: int, tier: str, detail: str, action: str, generation: int, out: Outbox) -> None:
        """A node's daemon does not answer. Args: action: what is done about it."""
        fault_id = self._faults.report([node], tier, detail, generation, out)
        self._troubles.setdefault(tier, _Troubles()).named.setdefault(node, fault_id)
        out.event("action", {**_ids(fault_id), "name": "degrade_tier", "reason": action}, generation)

    def on_well(self, node: int, news: TierWell, generation: int, step: int, out: Outbox) -> None:
        """A node can write a tier again. Args: step: the newest that is complete in memory."""
        self._over(node, news.tier, generation, step, out)

    def gone(self, node: int, generation: int, step: int, out: Outbox) -> None:
        """The daemon that had trouble is gone; if the next one has trouble too, it says so."""
        for tier in self._troubles:
            self._over(node, tier, generation, step, out)

    def _over(self, node: int, tier: str, generation: int, step: int, out: Outbox) -> None:
        troubles = self._troubles.get(tier)
        if troubles is None:
            return
        fault_id = troubles.named.pop(node, None)
        if node in troubles.others:
            troubles.others.remove(node)
            fault_id = None if troubles.others else troubles.others_id
        if fault_id is not None:
            fields = {**_ids(fault_id), "step": step, "downtime_s": 0.0, "lost_steps": 0}
            out.event("recovered", fields, generation)


def _ids(fault_id: str) -> dict[str, str]:
    """Of a fault that stops no rank: it is an incident of its own."""
    return {"fault_id": fault_id, "incident_id": fault_id}
