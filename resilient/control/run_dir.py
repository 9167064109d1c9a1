"""The run directory as a resource that may fail: since when it cannot be written, and for how long that is borne."""

from resilient.recovery.faults import Fault

CULPRIT = "run directory"


class RunDir:
    """Invariant: one fault from the first report of trouble until it is well."""

    def __init__(self) -> None:
        self._since_s: float | None = None  # attended seconds
        self._fault_id = ""
        self._detail = ""

    def trouble(self, fault_id: str, detail: str, silent_s: float, now_s: float) -> Fault | None:
        """It cannot be written; None where that is known.

        Args:
            silent_s: for how long already.
            now_s: attended seconds.
        """
        self._detail = detail
        if self._since_s is not None:
            return None
        self._since_s, self._fault_id = now_s - silent_s, fault_id
        what = f"{CULPRIT}: {detail}"
        return Fault(fault_id, "storage", CULPRIT, (), (), None, what, "", silent_s)

    def well(self) -> str | None:
        """It can be written again: the id of the fault that is over, if there was one."""
        over = self._fault_id if self._since_s is not None else None
        self._since_s = None
        return over

    def unbearable(self, now_s: float, patience_s: float) -> str | None:
        """What a person should know, once it could not be written for too long."""
        if self._since_s is None or now_s - self._since_s <= patience_s:
            return None
        return f"the {CULPRIT} could not be written for {patience_s:.0f} s: {self._detail}"
