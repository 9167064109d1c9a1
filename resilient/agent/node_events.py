"""What happens to the node itself, and is reported at once: signals that the agent gets, and changes of the node's links.

Owns the process's signal handlers and the watch of the links. The agent takes no signal for itself: they are news for the driver.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable

from resilient import clock
from resilient.agent.limits import TURN_S
from resilient.agent.links import LinkWatch, interfaces_of, ports_of
from resilient.agent.loop import Loop
from resilient.protocol.messages import AgentMessage, LinkChange, LinksChanged, SignalReceived

log = logging.getLogger(__name__)

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class NodeEvents:
    """From now on, signals and links are watched. There is one in a process.

    Args:
        addr: at which other nodes reach this one.
        send: sends a message.
        generation: the present one.
    """

    def __init__(self, loop: Loop, addr: str, send: Callable[[AgentMessage], None], generation: Callable[[], int]) -> None:
        self._loop, self._send, self._generation = loop, send, generation
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        for sig in FORWARDED:
            signal.signal(sig, lambda *_: None)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._links = LinkWatch(interfaces_of(addr, os.environ), ports_of(os.environ))
        self._sampled_t = time.monotonic()
        self._quiet = False
        log.info("watching the links %s", ", ".join(self._links.names))
        loop.watch(self._reader.fileno(), self._on_signals)
        loop.each_turn(self._sample_links)

    def hush(self) -> None:
        """Report nothing any more: the agent ends."""
        self._quiet = True

    def _on_signals(self) -> None:
        forwarded = {int(sig) for sig in FORWARDED}
        try:
            numbers = self._reader.recv(256)
        except BlockingIOError:
            return
        for number in numbers:
            if number in forwarded and not self._quiet:
                self._send(SignalReceived(generation=self._generation(), name=signal.Signals(number).name))

    def _sample_links(self) -> None:
        now = time.monotonic()
        if self._quiet or now - self._sampled_t < TURN_S:
            return
        self._sampled_t = now
        changes = tuple(
            LinkChange(interface=each.interface, state=each.state, down_s=each.down_s, detail=each.detail, counters=each.counters)
            for each in self._links.poll()
        )
        if changes:
            self._send(LinksChanged(generation=self._generation(), t=clock.now(), changes=changes))

    def close(self) -> None:
        """Close the files of the links."""
        self._links.close()
