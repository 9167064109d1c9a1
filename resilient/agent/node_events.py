"""What happens to the node itself, and is reported at once: signals that the agent gets, changes of its links, faults of its GPUs.

Owns the process's signal handlers, the watch of the links and that of the kernel log. The agent takes no signal for itself: they
are news for the driver.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence

from resilient import clock
from resilient.agent.limits import TURN_S
from resilient.agent.links import LinkWatch, interfaces_of, ports_of
from resilient.agent.loop import Loop
from resilient.agent.oom import KernelLog
from resilient.protocol.messages import AgentMessage, Health, HealthFinding, LinkChange, LinksChanged, SignalReceived
from resilient.recovery.xids import Xid, numbered, parse

log = logging.getLogger(__name__)

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class NodeEvents:
    """From now on, signals and links are watched. There is one in a process.

    Args:
        addr: at which other nodes reach this one.
        send: sends a message.
        generation: the present one.
        gpus: that the node's ranks compute on, by local rank, as addresses on the PCI bus; empty where one is not known.
    """

    def __init__(
        self,
        loop: Loop,
        addr: str,
        send: Callable[[AgentMessage], None],
        generation: Callable[[], int],
        gpus: Sequence[str] = (),
    ) -> None:
        self._loop, self._send, self._generation = loop, send, generation
        self._gpus = gpus
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        for sig in FORWARDED:
            signal.signal(sig, lambda *_: None)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._links = LinkWatch(interfaces_of(addr, os.environ), ports_of(os.environ))
        self._kernel_log = KernelLog(for_processes=False)
        self._gpu_faults: list[Xid] = []
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
        self._note_gpu_faults()

    def _note_gpu_faults(self) -> None:
        """What the driver of the GPUs has written is told to the ledger at once; the node is judged by it before it goes on."""
        found = list(parse(self._kernel_log.texts()))
        if found:
            self._gpu_faults += found
            log.warning("the GPUs' driver: %s", "; ".join(each.line for each in found))
            self._send(Health(generation=self._generation(), took_s=0.0, findings=tuple(map(self._finding, found))))

    def _finding(self, xid: Xid) -> HealthFinding:
        """Ranks that go on with a GPU that needs a reset are still to leave it: it computes nothing right, or will soon."""
        device = numbered(xid, self._gpus) if xid.unfit else None
        return HealthFinding(check=f"GPU {xid.gpu}", verdict="warn", text=str(xid), device=device)

    def take_gpu_faults(self) -> tuple[Xid, ...]:
        """The GPUs' faults since the last call."""
        found, self._gpu_faults = tuple(self._gpu_faults), []
        return found

    def close(self) -> None:
        """Close the files of the links, and the kernel log."""
        self._links.close()
        self._kernel_log.close()
