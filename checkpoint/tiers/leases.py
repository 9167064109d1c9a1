"""Which leases one rank uses, and for which snapshot, so that all ranks of its node copy the same snapshot into the same buffer.

Owns the rank's reading of the control page. What has become of a lease is the daemon's to know: see `checkpoint.tiers.daemon_link`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from checkpoint.tiers import blueprint
from checkpoint.tiers.daemon_link import DaemonLink
from checkpoint.tiers.lease import LINK, Lease, LeaseWord, NodeAgreement, buffer_path, layout_of
from checkpoint.tiers.session import CONTROL, Session
from checkpoint.worker_news import LeasePassed

_POLL_S = 0.001


class Leases:
    """Of one rank, in one session. A lease is used or passed once, and none of another generation is.

    Args:
        rank: of the whole world.
        daemon: is told of leases that are passed.

    Attributes:
        used: number of the last lease that was used or passed; -1 before the first.
    """

    def __init__(self, session: Session, rank: int, daemon: DaemonLink) -> None:
        self._generation, self._rank, self._daemon = session.generation, rank, daemon
        self._buffers = session.directory / LINK
        self._page = LeaseWord(session.directory / CONTROL)
        self._node = NodeAgreement(self._page, session.generation)
        self._digest = ""  # of the arrays that were announced last
        self._stopped = False
        self.used = -1
        self.layout_changed = False  # what is leased may be laid out for what was announced before

    def announced(self, digest: str, *, anew: bool) -> None:
        """What is to be copied from now on. Args: anew: it was something else before, for which a buffer may be leased yet."""
        self._digest, self.layout_changed = digest, anew

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Nobody waits for a lease in here, in whatever thread."""
        self._stopped = True
        try:
            yield
        finally:
            self._stopped = False

    def look(self, wait_s: float) -> int | None:
        """The buffer that is leased next, which stays so; None where none is in time."""
        lease = self._wait(wait_s)
        return None if lease is None else lease.buffer

    def acquire(self, attempt: int, wait_s: float) -> int | None:
        """The buffer for an attempt to take a step, whose lease is used from now on; None where there is none in time.

        Nor is there one where another rank of this node has left the attempt out.
        """
        lease = self._wait(wait_s, attempt)
        if lease is None:
            return None
        self.used = lease.number
        return lease.buffer

    def leave_out(self, attempt: int) -> None:
        """This rank takes no part in an attempt."""
        self._node.leave_out(attempt)

    def pass_what_others_use(self) -> None:
        """This rank has left something out: a lease that others use for it does not wait for this one."""
        lease = self._page.read()
        if self._is_unused(lease) and self._node.used_for(lease.number) is not None:
            self.pass_on(lease.number)

    def pass_on(self, number: int) -> None:
        """This rank does without a lease that others have used."""
        self.used = number
        self._daemon.report_lease(LeasePassed(generation=self._generation, rank=self._rank, lease=number))

    def _wait(self, wait_s: float, attempt: int | None = None) -> Lease | None:
        """A lease that this rank has not used yet. Args: attempt: that it is to be used for; None: it is only looked at."""
        deadline = time.monotonic() + wait_s
        while True:
            lease = self._page.read()
            unused = self._is_unused(lease)
            found = unused and lease.buffer is not None and self._fits(lease.buffer)
            if attempt is not None and unused and self._node.used_for(lease.number) not in (None, attempt):
                self.pass_on(lease.number)  # others use it for another one, and the daemon waits for this rank
                found = False
            if attempt is not None and self._node.is_left_out(attempt):
                return None
            if found:
                if attempt is not None:
                    self._node.use(lease.number, attempt)
                return lease
            if self._stopped or time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)

    def _is_unused(self, lease: Lease) -> bool:
        return lease.generation == self._generation and lease.buffer is not None and lease.number > self.used

    def _fits(self, index: int) -> bool:
        """Whether a buffer that is leased is for what was announced last: the daemon may not have heard of that yet."""
        if self.layout_changed:
            self.layout_changed = not blueprint.is_of(layout_of(buffer_path(self._buffers, index)), self._digest)
        return not self.layout_changed
