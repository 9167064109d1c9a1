"""The agent's conversation with its driver: what is answered at once, what waits its turn, and when the driver counts as gone.

Owns the inbox and the fence: an agent that has not heard from its driver for `fence_s` ends.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from resilient.agent.limits import QUIET_S
from resilient.agent.loop import Loop
from resilient.protocol.connection import Connection, Disconnected
from resilient.protocol.messages import AgentFailed, AgentMessage, Alive, DriverMessage, Ping

log = logging.getLogger(__name__)


def gone(why: str) -> RendezvousGracefulExitError:
    """The end of this agent for a reason that somebody may look for in its log."""
    log.warning("%s; ending the workers", why)
    return RendezvousGracefulExitError(why)


class Driver:
    """The driver, as its agent knows it.

    Invariants: messages are dealt with in the order in which they came, except those that have a handler, which are dealt with as
    they come. No handler waits.

    Args:
        fence_s: silence after which the driver is given up.
        handlers: by class of message, what is done at once; all other messages wait in the inbox.
        clock: seconds, any origin.

    Attributes:
        generation: the present one, which stands in all that is sent; 0 before the first.
        fenced: the driver was given up for its silence.
        gone: it was given up, for its silence or because it has closed the connection without a word.
    """

    def __init__(
        self,
        loop: Loop,
        connection: Connection,
        *,
        fence_s: float,
        handlers: Mapping[type[DriverMessage], Callable[[Any], None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop, self._connection = loop, connection
        self._fence_s, self._handlers, self._clock = fence_s, handlers, clock
        self._inbox: deque[DriverMessage] = deque()
        self._last_message_t = clock()
        self._sent_t = float("-inf")
        self._hung_up = False
        self.generation = 0
        self.fenced = False
        self.gone = False
        loop.watch(
            connection.fileno(),
            self._receive,
            on_writable=self._flush,
            wants_to_write=lambda: connection.queued_bytes > 0,
        )
        loop.each_turn(self._mind_the_fence)

    @property
    def inbox(self) -> deque[DriverMessage]:
        """Messages that wait to be dealt with, oldest first."""
        return self._inbox

    def awaits(self, *kinds: type[DriverMessage]) -> bool:
        """Whether a message of one of these classes waits in the inbox."""
        return any(isinstance(message, kinds) for message in self._inbox)

    def next(self) -> DriverMessage | None:
        """The oldest message that waits, if there is one."""
        return self._inbox.popleft() if self._inbox else None

    def send(self, message: AgentMessage | AgentFailed, *, droppable: bool = False) -> bool:
        """See `Connection.send`; after `hang_up` nothing is sent.

        Raises:
            RendezvousGracefulExitError: the driver is gone.
        """
        if self._hung_up:
            return False
        try:
            sent = self._connection.send(message, droppable=droppable)
        except Disconnected as error:
            raise self._given_up(f"the driver is gone: {error}") from error
        if sent:
            self._sent_t = self._clock()
        return sent

    def last_word(self, message: AgentFailed) -> None:
        """Send this if the driver is there, and nothing after it."""
        with suppress(RendezvousGracefulExitError):
            self.send(message)
        self.hang_up()

    def hang_up(self) -> None:
        """Neither speak nor listen to it any more, nor end for its silence: this agent ends anyway."""
        self._hung_up = True
        self._loop.unwatch(self._connection.fileno())

    def _receive(self) -> None:
        try:
            messages = self._connection.receive()
        except Disconnected as error:
            raise self._given_up(f"the driver is gone: {error}") from error
        if messages:
            self._last_message_t = self._clock()
        for message in messages:
            if isinstance(message, Ping):
                self._answer()
            elif (handler := self._handlers.get(type(message))) is not None:
                handler(message)
            else:
                self._inbox.append(message)

    def _answer(self) -> None:
        """Reports say that this agent lives, as long as there are any."""
        if self._clock() - self._sent_t >= QUIET_S:
            self.send(Alive(generation=self.generation))

    def _flush(self) -> None:
        try:
            self._connection.flush()
        except Disconnected as error:
            raise self._given_up(f"the driver is gone: {error}") from error

    def _mind_the_fence(self) -> None:
        if not self._hung_up and self._clock() - self._last_message_t > self._fence_s:
            self.fenced = True
            raise self._given_up(f"no word from the driver for {self._fence_s:.0f} s: fenced")

    def _given_up(self, why: str) -> RendezvousGracefulExitError:
        self.hang_up()
        self.gone = True
        return gone(why)
