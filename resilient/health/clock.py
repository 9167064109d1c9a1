"""How far two clocks are apart, and what that means. Pure."""

from dataclasses import dataclass

from resilient.health.report import Finding

GRAIN_S = 0.02  # file systems stamp with a clock that is a tick or two behind
WARN_S = 1.0  # times of different hosts stand side by side in the ledger
FAIL_S = 300.0  # munge, and with it Slurm, refuses credentials that are so far off


@dataclass(frozen=True)
class Skew:
    """Another clock is so many seconds ahead of this machine's; `uncertain_s` is how well that is known."""

    seconds: float
    uncertain_s: float

    @classmethod
    def between(cls, before: float, stamped: float, after: float) -> "Skew":
        """From a time of the other clock that was taken between two of this one."""
        early, late = before - GRAIN_S, after
        ahead = stamped - late if stamped > late else min(0.0, stamped - early)
        return cls(ahead, after - before)


def judge_skew(skew: Skew | None, whose: str) -> Finding:
    """What it means that the clock of `whose`, which is not this machine, is so far off."""
    if skew is None:
        return Finding("clock", "skip", f"{whose} does not tell the time")
    measured = {"skew_s": round(skew.seconds, 3)}
    off = abs(skew.seconds)
    if off < WARN_S:
        return Finding("clock", "ok", f"{whose} has the same time as this machine", measured)
    order = "ahead of" if skew.seconds > 0 else "behind"
    text = f"{whose} is {off:,.1f} s {order} this machine; have chrony or ntpd set the clocks"
    return Finding("clock", "fail" if off >= FAIL_S else "warn", text, measured)
