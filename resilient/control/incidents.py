"""Incidents: the faults of this job, what was done about each, and which are not over yet.

Faults that meet are one incident: a fault of ranks that stand still already belongs to the incident of the first of them. Its time
is counted once (`resilient.downtime`).
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from resilient.outbox import Outbox
from resilient.recovery.faults import Fault
from resilient.recovery.history import History
from resilient.recovery.policy import Action

RANKS_LISTED = 64  # in a field of an event; of more, `ranks_total` or `nodes_total` says how many


class Incidents:
    """Invariants: no two faults have the same id; what is in `_stopped_ranks` or `_stalls` was written down as a fault and has not
    recovered; `faults` are those that count against the budget, oldest first; `_incident_id` is that of the first fault of those
    in `_stopped_ranks` and `_stalls`, and empty while there is none.
    """

    def __init__(self) -> None:
        self.faults = History()
        self._reported = 0  # also those that stop no rank
        self._stopped_ranks: list[tuple[Fault, float]] = []  # and when each happened
        self._stalls: list[tuple[Fault, float]] = []  # that a link explains, and when they began
        self._incident_id = ""

    def next_id(self, generation: int) -> str:
        """Of the fault that is written down next."""
        return f"g{generation}-{self._reported + 1}"

    def respond(self, fault: Fault, action: Action, happened_t: float, now: float, generation: int, out: Outbox) -> None:
        """A fault of ranks and what is done about it; a stall that is waited for is written down once."""
        if action.name == "wait":
            if self._stalls:
                return
            self._stalls.append((fault, happened_t))
        elif action.name != "report":
            self.faults.append(now, fault)
            self._stopped_ranks.append((fault, happened_t))
        if action.name != "report":
            self._incident_id = self._incident_id or fault.fault_id
        self._report(fault, action, now, generation, out, fault.fault_id if action.name == "report" else self._incident_id)

    def report(self, fault: Fault, action: Action, now: float, generation: int, out: Outbox) -> None:
        """Write down a fault that stops no rank, an incident of its own, and what is done about it."""
        self._report(fault, action, now, generation, out, fault.fault_id)

    def _report(self, fault: Fault, action: Action, now: float, generation: int, out: Outbox, incident_id: str) -> None:
        self._reported += 1
        fields = {
            "fault_id": fault.fault_id,
            "incident_id": incident_id,
            "kind": fault.kind,
            "class": fault.verdict,
            "ranks": list(fault.ranks[:RANKS_LISTED]),
            "nodes": list(fault.nodes[:RANKS_LISTED]),
            "step": fault.step,
            "phase": fault.phase,
            "detail": fault.detail,
            "evidence": fault.evidence,
            "detect_s": round(fault.detect_s, 4),
            **({"files": fault.files} if fault.files is not None else {}),
            **_total("ranks", fault.ranks),
            **_total("nodes", fault.nodes),
        }
        out.event("fault", fields, generation, now)
        done: dict[str, object] = {"fault_id": fault.fault_id, "incident_id": incident_id}
        done |= {"name": action.name, "reason": action.reason}
        if action.roll_back is not None:
            done |= {"step": action.roll_back.step, "skip": [action.roll_back.skip] if action.roll_back.skip else []}
        out.event("action", done, generation, now)

    def follow_up(self, name: str, reason: str, now: float, generation: int, out: Outbox) -> None:
        """An action that follows from the loss of a node, not from a new fault."""
        lost = next((fault.fault_id for _, fault in reversed(self.faults) if fault.kind == "node_lost"), None)
        ids = {"fault_id": lost, "incident_id": self._incident_id or None}
        out.event("action", {**ids, "name": name, "reason": reason}, generation, now)

    def step_finished(self, step: int, beat_t: float, resumed_step: int, generation: int, out: Outbox) -> None:
        """The ranks get on: whatever had stopped them is over.

        Args:
            step: the first that a generation has finished, or that comes after a stall; beat_t: when.
            resumed_step: the one that the generation went on from.
        """
        if not self._stopped_ranks and not self._stalls:
            return
        for fault, t in self._stopped_ranks:
            lost_steps = max(0, (fault.step or 1) - 1 - resumed_step)
            self._recovered(fault.fault_id, self._incident_id, step, beat_t - t, lost_steps, None, generation, out)
        for fault, t in self._stalls:
            self._recovered(fault.fault_id, self._incident_id, step, beat_t - t, 0, None, generation, out)
        self._stopped_ranks, self._stalls = [], []
        self._incident_id = ""

    def recovered(self, fault_id: str, step: int, now: float, generation: int, out: Outbox, *, down_s: float | None = None) -> None:
        """A fault is over that had stopped no rank. Args: down_s: for so long something else did not work."""
        self._recovered(
            fault_id, fault_id, step, 0.0, 0, now, generation, out, {} if down_s is None else {"down_s": round(down_s, 3)}
        )

    def _recovered(
        self,
        fault_id: str,
        incident_id: str,
        step: int,
        downtime_s: float,
        lost_steps: int,
        t: float | None,
        generation: int,
        out: Outbox,
        more: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        ids = {"fault_id": fault_id, "incident_id": incident_id}
        fields = {**ids, "step": step, "downtime_s": round(downtime_s, 3), "lost_steps": lost_steps, **more}
        out.event("recovered", fields, generation, t)

    def hung(self, generation: int) -> str | None:
        """The id of the fault for which a generation ends, if its workers hang and may still say why."""
        fault = self._stopped_ranks[-1][0] if self._stopped_ranks else None
        asked = fault is not None and fault.hung and fault.fault_id.startswith(f"g{generation}-")
        return fault.fault_id if fault is not None and asked else None


def _total(name: str, numbers: Sequence[int]) -> dict[str, int]:
    return {f"{name}_total": len(numbers)} if len(numbers) > RANKS_LISTED else {}
