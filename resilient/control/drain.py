"""A drain: a stop that is asked for, until when it may take, and how the job ends with it. How ranks stop is `control.hold`'s."""

from resilient.exits import Exit


class Drain:
    """One drain; times in unix seconds.

    Args:
        code: with which the job ends when it is done; `why` is put before what there is to say of its end, else empty.
    """

    def __init__(self, signal: str, asked_t: float, deadline_t: float, code: Exit = Exit.STOPPED, why: str = "") -> None:
        self.signal, self.asked_t, self.deadline_t, self.code, self.why = signal, asked_t, deadline_t, code, why

    @property
    def budget_s(self) -> float:
        """How long it may take in all."""
        return self.deadline_t - self.asked_t

    def explained(self, message: str) -> str:
        """What a person should know of the end."""
        return f"{self.why}; {message}" if self.why else message

    def hurry(self, until_t: float) -> None:
        """It must be over by then."""
        self.deadline_t = min(self.deadline_t, until_t)


def fits(remaining_s: float, *, step_s: float, stall_s: float, size_bytes: int, rate_bytes_per_s: float) -> bool:
    """Whether there is time to finish a step, take a snapshot of it, and make that durable.

    Args:
        step_s: a whole step may still have to be computed.
        stall_s: for copying the state.
        rate_bytes_per_s: of the durable tier, as it was measured last. It may be half as fast this time.
    """
    return step_s + stall_s + 2 * size_bytes / rate_bytes_per_s <= remaining_s
