"""Findings of health checks, and the report that they make. Plain data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """What one check has found.

    Attributes:
        check: what was looked at, as in `tier scratch`.
        verdict: `warn`: a run goes on with it; `fail`: it must not start; `skip`: nothing here to look at.
        text: a sentence: what is wrong and where, what is allowed, what to do.
        measured: numbers by name; names end in their unit (`_bytes`, `_bytes_per_s`, `_s`).
        device: that does not work, where it is that of one rank alone: by local rank.
    """

    check: str
    verdict: Verdict
    text: str
    measured: Mapping[str, float | int | str] = field(default_factory=dict)
    device: int | None = None

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @property
    def good(self) -> bool:
        return self.verdict in ("ok", "skip")


@dataclass(frozen=True)
class Report:
    """What was found on one node.

    Attributes:
        took_s: seconds from the first check to the last.
        left_behind: processes of checks that not even SIGKILL ends, for as long as the kernel holds them.
    """

    findings: tuple[Finding, ...]
    took_s: float
    left_behind: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not any(finding.verdict == "fail" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        findings = [finding.as_json() for finding in self.findings]
        return {"ok": self.ok, "took_s": round(self.took_s, 3), "findings": findings}


def size(count: float) -> str:
    """Bytes as a person reads them."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
