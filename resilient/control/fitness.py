"""What the health check of a node comes to: the agent's findings, and its clock, which only the driver can compare."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from msgspec import structs

from resilient.health.clock import Skew, judge_skew
from resilient.protocol.messages import Health


@dataclass(frozen=True)
class Fitness:
    """One node's.

    Attributes:
        event: what the ledger is to know; None if all is well.
        unfit: why the node cannot take part; None if it can.
    """

    event: Mapping[str, Any] | None
    unfit: str | None


def judge(name: str, health: Health, skew_s: float) -> Fitness:
    """Whether a node can take part.

    Args:
        name: what to call it.
        skew_s: how far its clock is ahead of the driver's.
    """
    findings = [structs.asdict(finding) for finding in health.findings]
    clock = judge_skew(Skew(skew_s, 0.0), name)
    if not clock.good:
        findings.append(asdict(clock))
    failed = [finding for finding in findings if finding["verdict"] == "fail"]
    event = {"ok": not failed, "took_s": round(health.took_s, 3), "findings": findings} if findings else None
    return Fitness(event, f"{name} failed its health check: {_words(failed)}" if failed else None)


def _words(failed: Iterable[Mapping[str, Any]]) -> str:
    return "; ".join(f"{finding['check']}: {finding['text']}" for finding in failed)
