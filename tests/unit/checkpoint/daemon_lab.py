"""Nodes on this machine: a real snapshot daemon and worker each, commanded by the real snapshot core; any of them may be killed."""

import contextlib
import os
import selectors
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint_processes import Child
from lab_children import LEASE_S, DaemonProgram, daemon_child, worker_child

from checkpoint import steps
from checkpoint.daemon.jobs import HANG_S, RELEASE_S, STALE_S
from checkpoint.fence import raise_fence
from checkpoint.framing import Decoder, Message, encode
from checkpoint.handshake import WORKER_DAEMON, daemon_keys
from checkpoint.protocol import BeginSession, DaemonNews, DaemonSettings, Inventory, TakeInventory, TierSettings
from checkpoint.quarantine import quarantine
from resilient.agent.daemon import write_session
from resilient.outbox import Outbox, RequestDaemon, WriteEvent
from resilient.protocol.messages import Start
from resilient.recovery.rollback import InvalidationRule
from resilient.snapshots import Snapshots as SnapshotCore
from resilient.snapshots import StoragePlan, TierPlan

TOKEN = "of the lab"
PATIENCE_S = 120.0
TIERS = {"tiers": [{"name": "ram", "every_steps": 1, "every_s": None, "roots": ["/dev/shm"]}]}
"""Those that workers have a cadence for, as `resilient.storage` describes them."""


class Node:
    """One node's daemon."""

    def __init__(self, lab: "Lab", index: int) -> None:
        self.lab, self.index = lab, index
        self.directory = lab.base / f"node{index}"
        self.daemon: Child | DaemonProgram | None = None
        self.session: BeginSession | None = None
        self.inventoried = False

    @property
    def imports(self) -> Path:
        """What the daemon has written to its standard error, where it is a program of its own."""
        return self.directory / "imports"

    def tier_root(self, name: str) -> Path:
        return self.lab.base / name / f"node{self.index}"

    def start(self, point: str | None = None, after: int = 1) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        fifos = [self.directory / "in", self.directory / "out"]
        for fifo in fifos:
            fifo.unlink(missing_ok=True)
            os.mkfifo(fifo)
        if self.lab.programs:
            self.daemon = DaemonProgram(fifos[0], fifos[1], self.imports)
        else:
            times = (self.lab.stale_s, self.lab.release_s, self.lab.hang_s)
            self.daemon = Child(daemon_child, str(fifos[0]), str(fifos[1]), point, after, *times)
        self.writer = os.open(fifos[0], os.O_WRONLY)
        self.reader = os.open(fifos[1], os.O_RDONLY)
        os.set_blocking(self.reader, False)
        self.decoder: Decoder[DaemonNews] = Decoder(DaemonNews)
        self.lab.selector.register(self.reader, selectors.EVENT_READ, self)
        lab = self.lab
        tiers = (
            TierSettings(name="nvme", durable=False, path=str(self.tier_root("nvme")), keep_last=2),
            TierSettings(name="durable", durable=True, path=str(lab.root), keep_last=3, max_bytes_per_s=lab.rate),
        )
        self.send(
            DaemonSettings(
                generation=lab.generation,
                node=self.index,
                host="127.0.0.1",
                keys=daemon_keys(TOKEN),
                directory=str(self.directory / "k"),
                memory="ram",
                places=(str(self.tier_root("ram")),),
                buffers=lab.buffers,
                tiers=tiers,
                nice=0,
            )
        )
        self.inventoried = False
        self.send(TakeInventory(generation=lab.generation))
        if self.session is not None:
            self.send(self.session)

    def send(self, message: Message) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead; the end of its output tells
            os.write(self.writer, encode(message))

    def receive(self) -> list[DaemonNews] | None:
        try:
            data = os.read(self.reader, 1 << 20)
        except BlockingIOError:
            return []
        return self.decoder.feed(data) if data else None

    def stop(self) -> None:
        """kill -9."""
        if self.daemon is not None:
            self.lab.selector.unregister(self.reader)
            os.close(self.writer)
            os.close(self.reader)
            self.daemon.__exit__()
            self.daemon = None


class Lab:
    """Nodes with a tier in RAM, one on a disk, and a durable one that they share.

    Args:
        replicas: a buddy keeps each node's part in RAM and on the disk.
        rate: cap of the durable tier in bytes per second.
        programs: daemons are started as agents start them; else they are forked, with torch imported, and can be told where to die.
        stale_s, release_s, hang_s: `STALE_S`, `RELEASE_S` and `HANG_S` of daemons that are forked.
    """

    def __init__(
        self,
        base: Path,
        count: int,
        *,
        buffers: int = 3,
        replicas: bool = True,
        rate: float | None = None,
        programs: bool = False,
        stale_s: float = STALE_S,
        release_s: float = RELEASE_S,
        hang_s: float = HANG_S,
    ) -> None:
        self.base, self.count, self.buffers, self.rate, self.programs = base, count, buffers, rate, programs
        self.stale_s, self.release_s, self.hang_s = stale_s, release_s, hang_s
        self.root = base / "durable"
        self.replicas = replicas
        self.selector = selectors.DefaultSelector()
        self.nodes = [Node(self, index) for index in range(count)]
        self.workers: list[Child] = []
        self.generation = 0
        self.events: list[WriteEvent] = []
        self.said: list[DaemonNews] = []
        self.rules: tuple[InvalidationRule, ...] = ()
        self.deaths = 0
        self.restart_daemons = True
        self.gathering = True  # inventories are those that a generation begins with
        self.core = self._core()

    def _core(self) -> SnapshotCore:
        memory, nvme = TierPlan("ram", max(1, self.buffers - 2), self.replicas), TierPlan("nvme", 2, self.replicas)
        found = tuple(steps(self.root))
        durable = max(found, default=0)
        return SnapshotCore(StoragePlan(memory, (nvme,), TierPlan("durable", 3), self.buffers, (), durable, found, self.rules))

    def boot(self) -> None:
        """Everything is started anew, as after a crash of all."""
        self.core, self.gathering = self._core(), True
        for node in self.nodes:
            node.session = None
            node.start()
        self.wait(lambda: all(node.inventoried for node in self.nodes), "inventories")

    def begin(self, *, armed: str | None = None) -> list[Any]:
        """A generation: workers restore; what each of them says. One of them dies at the point `armed`."""
        self.generation += 1
        raise_fence(self.root, self.generation)
        self.core.hold()
        self.gathering = True
        for node in self.nodes:
            node.inventoried = False
            node.send(TakeInventory(generation=self.generation))
        self.wait(lambda: all(node.inventoried for node in self.nodes), "inventories")
        self.gathering = False
        self._begin()
        candidates = self.core.candidates()
        store = self.base / f"store-{self.generation}"
        for node in self.nodes:
            path = node.directory / "session.json"
            start = Start(
                generation=self.generation,
                node_rank=node.index,
                nodes=self.count,
                master_addr="",
                master_port=0,
                collective_timeout_s=PATIENCE_S,
                report_s=1.0,
                mtbf_s=1e5,
                candidates=candidates,
                world_size=self.count,
                first_rank=node.index,
            )
            write_session(
                path, start, TIERS, node=node.index, directory=node.directory / "k", key=daemon_keys(TOKEN)[WORKER_DAEMON]
            )
            node.session = BeginSession(
                generation=self.generation, node_rank=node.index, nodes=self.count, first_rank=node.index, ranks=1
            )
            node.send(node.session)
            point = armed if node.index == 0 else None
            self.workers.append(Child(worker_child, str(store), str(path), str(self.root), node.index, self.count, point))
        said = [self._from(worker) for worker in self.workers]
        out = Outbox()
        self.core.resumed(said[0][0], time.time(), out)
        self._do(out)
        for worker in self.workers:
            self._from(worker)
        return said

    def _begin(self) -> None:
        """What is invalidated is quarantined behind the fence, before a generation of all nodes begins."""
        out = Outbox()
        invalidated = self.core.invalidated_due()
        if invalidated:
            quarantine(
                self.root,
                lambda step, generation: any(each.covers(step, generation) for each in invalidated),
                "rolled-back",
                generation=self.generation,
            )
        self.core.begin(self.generation, range(self.count), out)
        self.core.quarantine_done(out)
        self._do(out)

    def _from(self, worker: Child) -> Any:
        """What a worker says, while the daemons' news come in."""
        self.wait(lambda: worker.pipe.poll(0), "a worker's answer")
        try:
            return worker.pipe.recv()
        except EOFError:
            return None

    def step(self, number: int, tiers: tuple[str, ...] = ("ram",), *, changed: bool = True, wait_s: float = LEASE_S) -> bool:
        """All ranks take a snapshot; whether all say that they have, and are alive. One that waits for no buffer is their last."""
        for worker in self.workers:
            try:
                worker.pipe.send((number, tiers, changed, wait_s))
            except BrokenPipeError:
                return False
        said = [self._from(worker) for worker in self.workers]  # one that is dead does not stand for those that are still at it
        return all(said)

    def end_workers(self) -> None:
        """kill -9 of all."""
        for worker in self.workers:
            worker.__exit__()
        self.workers = []

    def kill(self) -> None:
        """kill -9 of everything."""
        self.end_workers()
        for node in self.nodes:
            node.stop()

    def pump(self, timeout_s: float) -> None:
        """Take what daemons report, start those anew that have died, and do what the core wants."""
        for key, _ in self.selector.select(timeout_s):
            node: Node = key.data
            said = node.receive()
            if said is None:
                self.deaths += 1
                node.stop()
                if self.restart_daemons:
                    node.start()
                return  # what was ready may be closed by now
            for each in said:
                self.said.append(each)
                out = Outbox()
                if isinstance(each, Inventory):
                    node.inventoried = True
                if isinstance(each, Inventory) and self.gathering:
                    self.core.inventory(node.index, each)
                else:
                    self.core.on_news(node.index, each, time.time(), out)
                self._do(out)

    def _do(self, out: Outbox) -> None:
        for effect in out.take():
            match effect:
                case RequestDaemon():
                    if self.nodes[effect.node].daemon is not None:
                        self.nodes[effect.node].send(effect.request)
                case WriteEvent():
                    self.events.append(effect)
                case _:
                    raise AssertionError(f"the snapshot core wants {effect}")

    def roll_back(self, step: int) -> None:
        """As the coordinator does when the numbers are bad; the ledger remembers it in `rules`."""
        self.rules = (*self.rules, InvalidationRule(self.generation, step))
        out = Outbox()
        self.core.hold()
        self.core.roll_back(step, "of the lab", out)
        self._do(out)

    def save_newest(self) -> None:
        """Make the newest snapshot durable, whatever the cadence."""
        out = Outbox()
        self.core.save_newest(time.time(), out)
        self._do(out)

    def wait(self, what: Callable[[], Any], why: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            self.pump(0.005)
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited in vain: {why}; {self.events[-3:]}")

    def reported(self, event: str, tier: str, since: int = 0) -> int:
        """The newest step that was reported, in the events from the one of number `since`."""
        events = self.events[since:]
        return max((e.fields["step"] for e in events if e.event == event and e.fields.get("tier") == tier), default=0)

    def wait_durable(self, step: int) -> None:
        self.wait(lambda: self.reported("committed", "durable") >= step, f"step {step} is not durable")

    def forget_node(self, index: int) -> None:
        """Everything that a dead node held in RAM and on its disk is gone."""
        for name in ("ram", "nvme"):
            shutil.rmtree(self.nodes[index].tier_root(name), ignore_errors=True)
        shutil.rmtree(self.nodes[index].directory, ignore_errors=True)
