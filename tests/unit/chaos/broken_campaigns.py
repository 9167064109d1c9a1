"""Campaigns that recover as they should, with one thing changed: each breaks invariants of the verdict."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from campaign_tale import KILLED, loss

from chaos.injectors.context import Target
from chaos.verdict.record import Injection
from chaos.verdict.verdict import Observation, Weights
from resilient.account import account


def lines(seen: Observation, which: Callable[[Any], bool], change: dict[str, Any], of: str = "events") -> Observation:
    """With the first line changed that fits."""
    changed = [dict(line) for line in getattr(seen, of)]
    next(line for line in changed if which(line)).update(change)
    return replace(seen, **{of: changed})


def without(seen: Observation, which: Callable[[Any], bool]) -> Observation:
    return replace(seen, events=[line for line in seen.events if not which(line)])


def first(seen: Observation, **changes: Any) -> Observation:
    return replace(seen, injections=[replace(seen.injections[0], **changes), *seen.injections[1:]])


def is_a(what: str) -> Callable[[Any], bool]:
    return lambda line: line["event"] == what


def damaged(step: int) -> Callable[[Observation], Observation]:
    def change(seen: Observation) -> Observation:
        return replace(seen, checkpoints=[replace(each, damage="c/0 is missing") if each.step == step else each
                                          for each in seen.checkpoints])  # fmt: skip

    return change


def never_again(seen: Observation) -> Observation:
    """Nothing is computed after the second fault, and nobody says that it did."""
    t = seen.injections[1].t or 0.0
    kept = [line for line in seen.events if not (line["event"] == "recovered" and line["t"] > t)]
    return replace(seen, metrics=[line for line in seen.metrics if line["t"] < t], events=kept, reference=None)


BREAKS: dict[str, tuple[set[str], Callable[[Observation], Observation]]] = {
    "one was not injected": ({"injected"}, lambda seen: replace(
        seen,
        injections=[*seen.injections, Injection("f3", "worker_kill", {}, Target(rank=0), 1100.0, failed="rank 0 does not run")],
        expected={**seen.expected, "f3": KILLED},
    )),
    "there is no evidence of one": ({"injected"}, lambda seen: first(seen, evidence={})),
    "it never went on": ({"recovered", "reached"}, never_again),
    "one was reported as something else": ({"reported"}, lambda seen: lines(seen, is_a("fault"), {"kind": "hang"})),
    "nobody reported one": ({"reported"}, lambda seen: without(seen, lambda line: line.get("fault_id") == first_id(seen))),
    "another rank was blamed": ({"culprit"}, lambda seen: lines(seen, is_a("fault"), {"ranks": [0]})),
    "nobody was blamed": ({"culprit"}, lambda seen: lines(seen, is_a("fault"), {"ranks": [], "nodes": []})),
    "a node was replaced": ({"action"}, lambda seen: lines(seen, is_a("action"), {"name": "replace_node"})),
    "an older snapshot was gone on from": ({"lost steps"}, lambda seen: lines(
        seen, lambda line: line["event"] == "generation_started" and line["resumed_step"] == 25, {"resumed_step": 20}
    )),
    "the last job ended badly": ({"reached"}, lambda seen: replace(seen, jobs=[replace(seen.jobs[0], code=70)])),
    "a job ended early": ({"exits"}, lambda seen: replace(seen, jobs=[replace(seen.jobs[0], code=70), *seen.jobs])),
    "a fault was reported that nobody injected": ({"false alarms"}, lambda seen: replace(
        seen, injections=seen.injections[:1], expected={"f1": KILLED}
    )),
    "a checkpoint was refused that nobody damaged": ({"false alarms"}, lambda seen: replace(
        seen, events=[*seen.events, {"t": 1009.0, "event": "checkpoint_rejected", "generation": 2, "step": 5, "reason": "damaged"}]
    )),
    "a loss is off by the last bit": ({"losses"}, lambda seen: lines(
        seen, lambda line: line["step"] == 26, {"loss": loss(26) * (1 + 2**-52)}, "metrics"
    )),
    "a loss has no reference": ({"losses"}, lambda seen: replace(
        seen, reference=[line for line in seen.reference or () if line["step"] != 9])),
    "a step was never computed": ({"losses"}, lambda seen: replace(
        seen, metrics=[line for line in seen.metrics if line["step"] != 17], account=account(seen.events, [
            line for line in seen.metrics if line["step"] != 17])
    )),
    "bytes without a distance differ": ({"weights"}, lambda seen: replace(seen, weights=Weights(("generator",), 0.0))),
    "a weight differs": ({"weights"}, lambda seen: replace(seen, weights=Weights(("model/norm.weight",), 1e-7))),
    "the newest checkpoint is damaged": ({"checkpoints"}, damaged(40)),
    "an older one is damaged": ({"checkpoints"}, damaged(35)),
    "the last checkpoint is missing": ({"checkpoints"}, lambda seen: replace(seen, checkpoints=seen.checkpoints[:1])),
    "a process is left": ({"processes"}, lambda seen: replace(seen, left={**seen.left, "processes": ["process 77 (python)"]})),
    "a file is left": ({"files"}, lambda seen: replace(seen, left={**seen.left, "files": ["/dev/shm/resilient-0-x-node0"]})),
    "a rule is left": ({"machine"}, lambda seen: replace(seen, left={**seen.left, "machine": ["rule is new: -A INPUT -j DROP"]})),
    "a second is not accounted for": ({"account"}, lambda seen: with_part(seen, "idle", -1.0)),
    "a second is accounted for twice": ({"account"}, lambda seen: with_part(seen, "data", 1.0)),
    "more time than there was is accounted for": ({"account"}, lambda seen: replace(seen, wall_s=10.0)),
    "goodput is not known": ({"goodput", "account"}, lambda seen: replace(seen, account=account([], []))),
}  # fmt: skip


def first_id(seen: Observation) -> str:
    return str(next(line["fault_id"] for line in seen.events if line["event"] == "fault"))


def with_part(seen: Observation, name: str, seconds: float) -> Observation:
    changed = account(seen.events, seen.metrics)
    changed.seconds[name] += seconds
    return replace(seen, account=changed)
