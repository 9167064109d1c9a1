"""The simulated agents of `control_plane.py`: thousands in one process, each with a connection to the driver.

    python benchmarks/simulated_agents.py DIRECTORY NODES

The driver writes where it is to DIRECTORY/driver.json. Lines on standard input are commands (`count`, `kill NUMBER`); what happens
is told on standard output, a JSON object a line.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

# There benchmarks/checkpoint.py would be the package `checkpoint`; of no use any more to whoever imports this, either.
sys.path = [place for place in sys.path if place != str(Path(__file__).parent)]

from checkpoint.framing import Decoder, Message, encode
from checkpoint.handshake import DRIVER_AGENT, Client, derive, endpoint
from checkpoint.protocol import Held, Inventory, NodeShard, Replicate, Retain, SnapshotKey, Sync, Synced
from resilient.protocol.connection import subject_of
from resilient.protocol.messages import (
    Alive,
    Arm,
    DaemonRequests,
    Heartbeat,
    Hello,
    Imported,
    Inspect,
    Ping,
    PreparationEnded,
    Propose,
    Ready,
    Record,
    RecordsWritten,
    Report,
    Shutdown,
    Start,
    Started,
    Stop,
    WorkerEnded,
)
from resilient.recovery.faults import WorkerEnd

PROCS = 8
STEP_S = 1.0
SNAPSHOT_BYTES = 8 << 30
MEMORY = "ram"


def own_core(number: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def _light(field: msgspec.structs.FieldInfo) -> tuple[str, Any, Any] | tuple[str, Any]:
    if field.name == "candidates":
        return field.name, msgspec.Raw, msgspec.Raw()
    return (field.name, field.type) if field.required else (field.name, field.type, field.default)


# `Start`, of which the candidates are received and not unpacked: two thousand agents have a core in common here.
LightStart = msgspec.defstruct("LightStart", map(_light, msgspec.structs.fields(Start)), bases=(Message,), frozen=True, tag="start")


class Node(asyncio.Protocol):
    """One simulated agent."""

    decoder: Decoder[Any] = Decoder(LightStart | Stop | Propose | Arm | Inspect | RecordsWritten | Ping | DaemonRequests | Shutdown)

    def __init__(self, world: "World", number: int) -> None:
        self._world, self.number = world, number
        self._pending = b""
        self._handshake: Client | None = None  # while it lasts
        self.generation, self.node_rank, self.nodes, self.running = 0, number, world.nodes, False
        self.replicas: list[Held] = []
        self.held: list[NodeShard] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        server = endpoint(transport.get_extra_info("peername"))
        self._handshake = Client(self._world.key, DRIVER_AGENT, subject_of(self.number, 1), server)
        transport.write(self._handshake.opening)

    def _say_hello(self) -> None:
        address = f"10.{self.number // 256}.{self.number % 256}.1"
        self._send(
            Hello(
                generation=0,
                node=self.number,
                incarnation=1,
                host=f"n{self.number}",
                addr=address,
                t=time.time(),
            )
        )
        self._send(Imported(generation=0))
        if self.number == 0:
            self._send(PreparationEnded(generation=0))
        self._ready()

    def connection_lost(self, error: Exception | None) -> None:
        self._world.lost(self.number)

    def data_received(self, data: bytes) -> None:
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            if self._handshake is not None:
                self.transport.write(self._handshake.respond(line))
                self._handshake = None
                self._say_hello()
                continue
            self._world.received += 1
            self._on(self.decoder.decode(line))

    def _on(self, message: Message) -> None:
        match message:
            case LightStart():
                self.generation, self.node_rank, self.nodes, self.running = (
                    message.generation,
                    message.node_rank,
                    message.nodes,
                    True,
                )
                self._send(Started(generation=self.generation, pids={rank: 1000 + rank for rank in self.ranks}))
                self._world.started(self)
            case Stop():
                self.running = False
                self._ready()
            case DaemonRequests(requests=requests):
                for each in requests:
                    if isinstance(each, Replicate):
                        directory = f"{self._directory(MEMORY)}/replica-{each.shard}/step-{each.key.step:08d}"
                        shard = self._shard(each.key, each.shard, directory, replica=True)
                        self.held.append(shard)
                        self.replicas.append(Held(generation=self.generation, shard=shard, job_id=each.job_id))
                    elif isinstance(each, Retain):
                        keep = set(each.steps)
                        self.held = [shard for shard in self.held if shard.key.step in keep or shard.key.step > each.upto]
                    elif isinstance(each, Sync):
                        self._send(Report(generation=self.generation, news=(Synced(generation=self.generation),)))
            case Ping() if not self.running:
                self._send(Alive(generation=self.generation))
            case Shutdown():
                self.transport.close()

    @property
    def ranks(self) -> range:
        return range(PROCS * self.node_rank, PROCS * (self.node_rank + 1))

    def step(self, step: int, now: float) -> None:
        """A step is finished, and a snapshot of it taken; the replicas of the one before have come."""
        key = SnapshotKey(step, self.generation)
        shard = self._shard(key, self.node_rank, f"{self._directory(MEMORY)}/step-{step:08d}")
        self.held.append(shard)
        beat = Heartbeat(step, "step", now, now, 0.0, "", True, 0.9 * STEP_S * step)
        news = (*self.replicas, Held(generation=self.generation, shard=shard, stall_s=0.01, write_s=0.1))
        records = (Record(0, now, None, {"step": step, "loss": 1.0, "step_s": STEP_S}),) if self.node_rank == 0 else ()
        self.replicas = []
        self._send(Report(generation=self.generation, heartbeats=dict.fromkeys(self.ranks, beat), records=records, news=news))

    def resumed(self, step: int, now: float) -> None:
        fields = {"step": step, "tier": MEMORY if step else None}
        self._send(Report(generation=self.generation, records=(Record(0, now, "resumed", fields),)))

    def die(self, step: int) -> None:
        """One of its ranks is killed."""
        rank = self.ranks[3]
        end = WorkerEnd(rank, self.number, 1000 + rank, -9, time.time(), step, "step")
        self._send(WorkerEnded(generation=self.generation, end=end, stopped=False))

    def _ready(self) -> None:
        address = f"10.{self.number // 256}.{self.number % 256}.1:4711"
        inventory = Inventory(generation=self.generation, address=address, shards=tuple(self.held))
        self._send(Ready(generation=self.generation, store_port=29500, inventory=inventory))

    def _directory(self, tier: str) -> str:
        return f"/dev/shm/user/resilient-0123456789ab/node{self.number}/{tier}"

    def _shard(self, key: SnapshotKey, number: int, directory: str, *, replica: bool = False) -> NodeShard:
        size = SNAPSHOT_BYTES // self.nodes
        return NodeShard(
            tier=MEMORY, directory=directory, key=key, shard=number, shards=self.nodes, size_bytes=size, replica=replica
        )

    def _send(self, message: Any) -> None:
        self._world.sent += 1
        self.transport.write(encode(message))


class World:
    """All simulated agents: they step together, each at its own moment of the second."""

    def __init__(self, nodes: int, token: str) -> None:
        self.nodes, self.key = nodes, derive(token, DRIVER_AGENT)
        self.sent = self.received = self.steps = self.done = 0
        self.generation = 0
        self.first_t = self.last_t = self.hello_t = 0.0
        self._running: list[Node] = []
        self.agents: list[Node] = []

    def started(self, node: Node) -> None:
        self.last_t = time.time()
        if node.generation != self.generation:
            self.generation, self._running, self.first_t = node.generation, [], self.last_t
        self._running.append(node)
        if len(self._running) == self.nodes:
            report("all_started", first_t=self.first_t, last_t=self.last_t, hello_t=self.hello_t, generation=self.generation)

    def lost(self, number: int) -> None:
        report("lost", node=number)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        last = 0
        while True:
            began = loop.time()
            generation, nodes = self.generation, list(self._running)
            if len(nodes) == self.nodes:
                if generation != last:
                    last = generation
                    next(each for each in nodes if each.node_rank == 0).resumed(self.done, time.time())
                self.done += 1
                batch = max(1, self.nodes // 50)
                for first in range(0, self.nodes, batch):
                    for node in nodes[first : first + batch]:
                        if node.running and node.generation == generation:
                            node.step(self.done, time.time())
                    await asyncio.sleep(max(0.0, began + 0.8 * STEP_S * first / self.nodes - loop.time()))
                self.steps += 1
            await asyncio.sleep(max(0.01, began + STEP_S - loop.time()))


def report(what: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"what": what, **fields}) + "\n")
    sys.stdout.flush()


async def simulate(directory: Path, nodes: int) -> None:
    own_core(1)
    while not (directory / "driver.json").exists():
        await asyncio.sleep(0.05)
    told = json.loads((directory / "driver.json").read_text())
    host, _, port = told["driver"].rpartition(":")
    world = World(nodes, told["token"])
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    world.hello_t = time.time()
    for first in range(0, nodes, 64):
        several = [
            loop.create_connection(lambda n=n: Node(world, n), host, int(port)) for n in range(first, min(nodes, first + 64))
        ]  # type: ignore[misc]
        world.agents += [protocol for _, protocol in await asyncio.gather(*several)]  # type: ignore[misc]
    stepping = asyncio.create_task(world.run())
    async for line in commands:
        match line.decode().split():
            case ["count"]:
                report("count", sent=world.sent, received=world.received, steps=world.steps, generation=world.generation)
            case ["kill", number]:
                report("killed", t=time.time())
                world.agents[int(number)].die(world.done)
    stepping.cancel()


if __name__ == "__main__":
    asyncio.run(simulate(Path(sys.argv[1]), int(sys.argv[2])))
