"""What the control plane costs at the size of a large machine: a real driver, real TCP, and simulated agents.

    python benchmarks/control_plane.py [--ranks 16384] [--seconds 20] [--deaths 3] [--json FILE]

The driver is the real one, in a process of its own, with a launcher that starts nothing. Simulated agents of eight ranks each
connect to it and speak as real ones do: hello, ready, and then once a step of a second a report with the heartbeats of their ranks
and the snapshot that they hold; they fetch replicas when they are told to. A rank dies a few times, and all are started anew.

Measured are the driver's processor time and memory while nothing happens but that, processor time for each message that it
receives, the time from a rank's death until the last node was told to start, and from the first hello until the last node was.
The last line is a JSON object. Driver and agents have a core each; what the agents cost is not the driver's.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import figures
import msgspec
import psutil

sys.path.remove(str(Path(__file__).parent))  # where benchmarks/checkpoint.py would be the package `checkpoint`

from checkpoint.framing import Decoder, Message, encode
from checkpoint.handshake import DRIVER_AGENT, Client, derive, endpoint
from checkpoint.protocol import Held, Inventory, NodeShard, Replicate, Retain, SnapshotKey, Sync, Synced
from resilient.faults import WorkerEnd
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
    Started,
    Stop,
    WorkerEnded,
)

MEANING = "What the control plane costs at the size of a large machine: a real driver and simulated agents of eight ranks each."
PROCS = 8
STEP_S = 1.0
SETTLE_S = 5.0
SNAPSHOT_BYTES = 8 << 30
MEMORY = "ram"
CONFIG = """
name: control-plane
run_dir: {directory}/run
entrypoint: {directory}/none.py
cluster: {{launcher: local, nodes: {nodes}, procs_per_node: {procs}, threads_per_proc: 1, device: cpu}}
parallel: {{tp: {procs}}}
data: {{path: {directory}/none}}
model: {{vocab_size: 256, layers: 8, hidden: 512, heads: 8, seq_len: 128}}
train: {{steps: 1000000, global_batch_size: {nodes}, micro_batch_size: 1, precision: fp32}}
checkpoint:
  every_steps: 1000000
  tiers:
    - {{name: ram, path: {directory}/ram, every_steps: 1, keep_last: 2, replicas: 1}}
    - {{name: scratch, path: {directory}/scratch, keep_last: 2}}
logging: {{progress: none}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=20.0, help="of undisturbed steps that are measured")
    parser.add_argument("--deaths", type=int, default=3, help="of ranks, one after the other")
    parser.add_argument("--driver", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--agents", type=Path, help=argparse.SUPPRESS)
    figures.add_option(parser)
    args = parser.parse_args()
    if args.driver is not None:
        drive(args.driver)
    elif args.agents is not None:
        asyncio.run(simulate(args.agents, args.ranks // PROCS))
    else:
        found = measure(args)
        named = {
            "driver_cpu_share": ("of a core, for the driver", ""),
            "rss_mib": ("memory of the driver", "MiB"),
            "us_per_message": ("processor time of the driver for each message", "us"),
            "death_to_last_start_s": ("a rank's death to the last `start`", "s"),
            "hello_to_first_start_s": ("the first hello to the last `start` of the first generation", "s"),
        }
        figures.save(
            args.json,
            MEANING,
            [figures.figure(name, f"{what}, {args.ranks} ranks", unit, [found[name]]) for name, (what, unit) in named.items()],
        )
        sys.stdout.write(json.dumps({"ranks": args.ranks, **found}) + "\n")


# -- the measurement -----------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, float]:
    nodes = args.ranks // PROCS
    with tempfile.TemporaryDirectory(prefix="control-plane-") as scratch:
        directory = Path(scratch)
        (directory / "none.py").write_text("")
        (directory / "config.yaml").write_text(CONFIG.format(directory=directory, nodes=nodes, procs=PROCS))
        log = (directory / "driver.log").open("w")
        this = [sys.executable, __file__, "--ranks", str(args.ranks)]
        driver = subprocess.Popen([*this, "--driver", str(directory)], stdout=log, stderr=log)
        agents = subprocess.Popen(
            [*this, "--agents", str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        threading.Thread(target=_end_with, args=(driver, agents), daemon=True).start()
        try:
            return _measured(args, Simulated(agents), psutil.Process(driver.pid))
        except BaseException:
            log.flush()
            sys.stderr.write((directory / "driver.log").read_text()[-8000:])
            raise
        finally:
            for process in (agents, driver):
                process.kill()
                process.wait()
            log.close()


def _end_with(driver: subprocess.Popen[Any], agents: subprocess.Popen[str]) -> None:
    """Without a driver nobody has anything to wait for."""
    driver.wait()
    agents.kill()


class Simulated:
    """The process of simulated agents, as the measurement sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def next(self, wanted: str) -> dict[str, Any]:
        """The next line of that kind."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told: dict[str, Any] = json.loads(line)
            if told["what"] == wanted:
                return told
            if told["what"] == "lost":
                raise SystemExit(f"the driver has closed the connection of node {told['node']}")
        raise SystemExit("the simulated agents have ended")

    def ask(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()


def _measured(args: argparse.Namespace, agents: Simulated, driver: psutil.Process) -> dict[str, float]:
    started = agents.next("all_started")
    hello_s = started["last_t"] - started["hello_t"]
    time.sleep(SETTLE_S)
    agents.ask("count")
    before, spent, began = agents.next("count"), _spent_s(driver), time.monotonic()
    time.sleep(args.seconds)
    agents.ask("count")
    after, spent, took = agents.next("count"), _spent_s(driver) - spent, time.monotonic() - began
    rss = driver.memory_info().rss
    deaths = []
    for number in range(args.deaths):
        agents.ask(f"kill {(number * 7919 + 3) % (args.ranks // PROCS)}")
        spent_s = _spent_s(driver)
        killed, started = agents.next("killed"), agents.next("all_started")
        first_s, last_s = started["first_t"] - killed["t"], started["last_t"] - killed["t"]
        spent_s = _spent_s(driver) - spent_s
        sys.stdout.write(f"death: first start after {first_s:.2f} s, last {last_s:.2f}; the driver computed {spent_s:.2f} s\n")
        deaths.append(started["last_t"] - killed["t"])
        rss = max(rss, driver.memory_info().rss)
        time.sleep(SETTLE_S)
    agents.ask("count")
    last = agents.next("count")
    if last["steps"] <= after["steps"] or last["generation"] != 1 + args.deaths:
        raise SystemExit(f"the run did not go on as it should: {last}")
    received = after["sent"] - before["sent"]
    sys.stdout.write(
        f"{args.ranks} ranks, {args.ranks // PROCS} nodes: {received / took:,.0f} messages/s received, "
        f"{(after['received'] - before['received']) / took:,.0f} sent, {(after['steps'] - before['steps']) / took:.2f} steps/s\n"
    )
    return {
        "driver_cpu_share": round(spent / took, 4),
        "rss_mib": round(rss / 2**20, 1),
        "us_per_message": round(1e6 * spent / received, 2),
        "death_to_last_start_s": round(statistics.median(deaths), 3) if deaths else 0.0,
        "hello_to_first_start_s": round(hello_s, 3),
    }


def _spent_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# -- the driver's process ------------------------------------------------------------------------------------------------


def drive(directory: Path) -> None:
    """The real driver, with agents that somebody else starts."""
    _own_core(0)
    from rich.console import Console

    from resilient.campaign import machine_layout
    from resilient.config import load
    from resilient.driver import agents, campaign
    from resilient.driver.display import Display

    class NobodyStarts:
        addr = "127.0.0.1"

        def __init__(self, command: Any, *_: Any) -> None:
            new = directory / "driver.new"
            new.write_text(json.dumps({"driver": command.driver, "token": command.token}))
            new.rename(directory / "driver.json")

        async def launch(self, node: int, incarnation: int, *, prepare: bool) -> None:
            pass

        def connected(self, node: int) -> None:
            pass

        async def close(self, grace_s: float) -> None:
            pass

    agents.LocalLauncher = NobodyStarts  # type: ignore[misc, assignment]
    config = load(directory / "config.yaml", [])
    code, message = campaign.run_campaign(
        config, machine_layout(config), Display("none", config.train.steps, console=Console(stderr=True))
    )
    sys.stdout.write(f"{code!r}: {message}\n")


def _own_core(number: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


# -- the agents' process -------------------------------------------------------------------------------------------------


class LightStart(Message, frozen=True, tag="start"):
    """`Start`, of which the candidates are received and not unpacked: two thousand agents have a core in common here."""

    generation: int
    node_rank: int
    nodes: int
    master_addr: str
    master_port: int
    collective_timeout_s: float
    report_s: float
    mtbf_s: float
    candidates: msgspec.Raw = msgspec.Raw()
    go_back_to: int | None = None
    skip: tuple[tuple[int, int], ...] = ()
    saved_step: int | None = None


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
    _own_core(1)
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
    main()
