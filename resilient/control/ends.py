"""How the workers of the present generation have ended so far, and what that comes to."""

from collections.abc import Iterable, Sequence
from typing import Literal

from resilient.recovery.faults import Fault, WorkerEnd, from_ends

SETTLE_S = 0.5  # how long a failure that blames a peer waits for that peer's own failure
ANSWER_S = 6.0  # for an agent to say which of its workers have failed
FAILING_S = 30.0  # and for the loss of a node whose agent has told an error, which ends its workers before it goes

Outcome = Literal["blame", "ask", "all_ended", "wait"]


class WorkerEnds:
    """Invariant: `settling` from the first failure that blames a peer until the fault is found or the generation is over."""

    def __init__(self, files: Sequence[str] = ()) -> None:
        """Args: files: how the paths of the run's own data begin."""
        self._files = files
        self._ends: list[WorkerEnd] = []
        self._world_size = 0
        self._settle_until_s: float | None = None
        self._answers_by_s = 0.0
        self._unanswered: set[int] = set()  # nodes that were asked
        self._lost_by_s = 0.0
        self.stopped = False

    def begin(self, world_size: int) -> None:
        """A generation begins."""
        self._ends, self._world_size, self._settle_until_s, self.stopped = [], world_size, None, False
        self._lost_by_s = 0.0
        self._unanswered.clear()

    def ask(self, nodes: Iterable[int], now_s: float) -> None:
        """These nodes are asked which of their workers have failed: nobody is blamed before they have answered, or `ANSWER_S`."""
        self._unanswered, self._answers_by_s = set(nodes), now_s + ANSWER_S

    def answered(self, node: int) -> None:
        """All that has failed there was told."""
        self._unanswered.discard(node)

    def expect_loss(self, now_s: float) -> None:
        """A node is about to be lost: its workers' peers are blamed only if it is not."""
        self._lost_by_s = now_s + FAILING_S

    @property
    def settling(self) -> bool:
        """Whether a worker has failed in a way that blames a peer, and the peer may still be heard of."""
        return self._settle_until_s is not None

    def on_end(self, end: WorkerEnd, stopped: bool, now_s: float) -> Outcome:
        """A worker has ended: whether somebody is to blame now, or nodes are to be asked for a peer's end, or it was the last one.

        Args:
            stopped: it had been asked to and did.
            now_s: attended seconds.
        """
        self._ends.append(end)
        self.stopped |= stopped
        if end.failed:
            if not end.victim:
                return "blame"
            if self._settle_until_s is None:
                self._settle_until_s = now_s + SETTLE_S
                return "ask"
        return "all_ended" if len(self._ends) == self._world_size and not self.settling else "wait"

    def settled(self, now_s: float) -> bool:
        """Whether the peer that was blamed has had its time."""
        answers_by_s = self._answers_by_s if self._unanswered else 0.0
        return self._settle_until_s is not None and now_s >= max(self._settle_until_s, self._lost_by_s, answers_by_s)

    def over(self) -> None:
        """The generation is over, or its fault is found."""
        self._settle_until_s = None

    def left(self, before_t: float) -> list[WorkerEnd]:
        """Those that have left with status 0 by then, unix seconds, and had not been asked to."""
        return [] if self.stopped else [end for end in self._ends if not end.failed and end.noticed_t <= before_t]

    @property
    def last_step(self) -> int:
        """The furthest that any of them has finished."""
        return max((end.step for end in self._ends), default=0)

    def fault(self, fault_id: str, resumed_step: int | None, now: float, restarted_t: float | None = None) -> Fault:
        """Whose fault it is; unix seconds, see `from_ends`."""
        return from_ends(
            fault_id,
            self._ends,
            resumed_step=resumed_step,
            now=now,
            restarted_t=restarted_t,
            stopped=self.stopped,
            files=self._files,
        )
