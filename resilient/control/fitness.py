"""What the health check of a node comes to: the agent's findings, and its clock, which only the driver can compare."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
        ill: why it should not go on taking part for long; None where nothing says so.
        dead: devices that are not to be used any more, where nothing else keeps the node from taking part.
    """

    event: Mapping[str, Any] | None
    unfit: str | None
    ill: str | None = None
    dead: frozenset[int] = frozenset()


def judge(name: str, health: Health, skew_s: float) -> Fitness:
    """Whether a node can take part.

    Args:
        name: what to call it.
        skew_s: how far its clock is ahead of the driver's.
    """
    findings = [{key: value for key, value in structs.asdict(each).items() if value is not None} for each in health.findings]
    clock = judge_skew(Skew(skew_s, 0.0), name)
    if not clock.good:
        findings.append(clock.as_json())
    failed = [finding for finding in findings if finding["verdict"] == "fail"]
    ill = [finding for finding in findings if finding["verdict"] != "fail" and finding.get("device") is not None]
    whole = any(finding.get("device") is None for finding in failed)
    event = {"ok": not failed, "took_s": round(health.took_s, 3), "findings": findings} if findings else None
    return Fitness(
        event,
        unfit=f"{name} failed its health check: {_words(failed)}" if failed else None,
        ill=f"{name} has a device that is not to be used any more: {_words(ill)}" if ill else None,
        dead=frozenset(finding["device"] for finding in (*failed, *ill) if not whole),
    )


def _words(failed: Iterable[Mapping[str, Any]]) -> str:
    return "; ".join(f"{finding['check']}: {finding['text']}" for finding in failed)
