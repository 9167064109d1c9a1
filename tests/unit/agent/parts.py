"""What tests of the agent put together: a loop, a driver at the other end of a socket, heartbeat regions without workers."""

import select
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from handshakes import as_driver

from checkpoint.framing import Decoder, encode
from resilient.agent.driver import Driver
from resilient.agent.loop import Loop
from resilient.heartbeat import region as heartbeat_region
from resilient.heartbeat.agent_side import AgentRegion
from resilient.heartbeat.worker_side import WorkerRegion
from resilient.protocol.connection import Connection
from resilient.protocol.messages import AgentFailed, AgentMessage, DriverMessage, Heartbeat

PATIENCE_S = 120.0
SECRET = "secret"


class FakeDriver:
    """The driver's end of a connection, in the test's own thread."""

    def __init__(self, listener: socket.socket, secret: str = SECRET) -> None:
        self._socket, _ = listener.accept()
        as_driver(self._socket, secret)
        self._decoder: Decoder[AgentMessage | AgentFailed] = Decoder(AgentMessage | AgentFailed)
        self._found: list[AgentMessage | AgentFailed] = []

    def send(self, *messages: DriverMessage) -> None:
        self._socket.sendall(b"".join(map(encode, messages)))

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def next(self, timeout_s: float = PATIENCE_S) -> AgentMessage | AgentFailed:
        """The next message that the agent has sent."""
        while not self._found:
            assert select.select([self._socket], [], [], timeout_s)[0], "nothing came"
            data = self._socket.recv(1 << 16)
            assert data, "the agent has hung up"
            self._found += self._decoder.feed(data)
        return self._found.pop(0)

    def until(self, kind: type[AgentMessage | AgentFailed]) -> tuple[Any, list[AgentMessage | AgentFailed]]:
        """The next message of a class, and those before it."""
        before: list[AgentMessage | AgentFailed] = []
        while not isinstance(message := self.next(), kind):
            before.append(message)
        return message, before

    def arrived(self) -> list[AgentMessage | AgentFailed]:
        """All that is there, without waiting."""
        while select.select([self._socket], [], [], 0.0)[0] and (data := self._socket.recv(1 << 16)):
            self._found += self._decoder.feed(data)
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        self._socket.close()


class Talk:
    """An agent's loop and its driver, connected to the test."""

    def __init__(
        self,
        handlers: Mapping[type[DriverMessage], Callable[[Any], None]] | None = None,
        *,
        fence_s: float = 600.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            with ThreadPoolExecutor(1) as other:
                peer = other.submit(FakeDriver, listener)
                where = [listener.getsockname()]
                self.connection = Connection(where, token=SECRET, node=0, incarnation=1, timeout_s=PATIENCE_S)
                self.peer = peer.result()
        self.loop = Loop()
        more: dict[str, Any] = {"clock": clock} if clock is not None else {}
        self.driver = Driver(self.loop, self.connection, fence_s=fence_s, handlers=handlers or {}, **more)

    def close(self) -> None:
        self.connection.close()
        self.peer.close()
        self.loop.close()


class FakeWorkers:
    """Heartbeat regions of ranks whose processes do not exist; stands for `resilient.agent.workers.Workers`."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.regions = [AgentRegion(directory / f"g1-rank{rank}") for rank in range(ranks)]
        self.workers = [WorkerRegion(region.path) for region in self.regions]
        self.watched_anew = 0

    def heartbeats(self) -> dict[int, Heartbeat]:
        found = {}
        for rank, region in enumerate(self.regions):
            activity = region.activity()
            found[rank] = Heartbeat(
                activity.step, activity.phase, activity.beat_t, max(activity.beat_t, activity.phase_t), 0.0, "", True
            )
        return found

    def take_records(self, *, last: bool = False) -> Iterator[tuple[int, heartbeat_region.Record, AgentRegion]]:
        for rank, region in enumerate(self.regions):
            for record in region.drain() + (region.unreported() if last else []):
                yield rank, record, region

    def watch_from_now(self) -> None:
        self.watched_anew += 1

    def close(self) -> None:
        for each in (*self.workers, *self.regions):
            each.close()
