"""The driver as a shell: effects are carried out in order, and what goes wrong in the core is nobody else's fault."""

import asyncio
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from handshakes import open_agent
from rich.console import Console

from checkpoint.framing import Decoder, encode
from checkpoint.protocol import Sync
from resilient import ledger
from resilient.config import Config, layout
from resilient.driver import driver as module
from resilient.driver import durable
from resilient.driver.display import Display
from resilient.driver.driver import Driver
from resilient.driver.ending import Ending
from resilient.driver.lease import RunLease
from resilient.driver.spill_file import SpillFile
from resilient.exits import Exit
from resilient.outbox import AcknowledgeRecords, Finish, Launch, Outbox, RaiseFence, RequestDaemon, Send
from resilient.protocol.disk import DiskSettings
from resilient.protocol.messages import (
    AgentMessage,
    Alive,
    DaemonRequests,
    DriverMessage,
    Hello,
    Inspect,
    Ping,
    PreparationEnded,
    Prepare,
    RecordsWritten,
    Shutdown,
    Stop,
)

PATIENCE_S = 120.0  # with a disk process that starts, or writes, on a busy machine


class Core:
    """A core that does what a test says when an agent says something."""

    generation = 1
    draining = False

    def __init__(self, react: Callable[[AgentMessage, Outbox], None]) -> None:
        self.react = react
        self.fences: list[tuple[int, str | None]] = []
        self.lost_nodes: list[str] = []

    def begin(self, now: float, out: Outbox) -> None:
        out.append(Launch(0))

    def check(self, node: int, message: AgentMessage) -> None:
        """It may say everything."""

    def on_message(self, node: int, message: AgentMessage, now: float, out: Outbox) -> None:
        if not isinstance(message, Hello):
            self.react(message, out)

    def lost(self, node: int, detail: str, now: float, out: Outbox) -> None:
        self.lost_nodes.append(detail)

    def fence_raised(self, generation: int, error: str | None, now: float, out: Outbox) -> None:
        self.fences.append((generation, error))
        out.append(Finish(Exit.OK, ""))

    def give_up(self, code: Exit, message: str, now: float, out: Outbox) -> None:
        out.append(Finish(code, message))

    def tick(self, now: float, out: Outbox) -> None:
        pass

    def run_dir_trouble(self, detail: str, since_t: float, now: float, out: Outbox) -> None:
        pass

    def run_dir_well(self, down_s: float, now: float, out: Outbox) -> None:
        pass


class Agents:
    """A launcher whose agent connects, says a word, and keeps what it hears until it is hung up."""

    def __init__(self, secret: str, port: int, words: Sequence[AgentMessage]) -> None:
        self.secret, self.port, self.words = secret, port, words
        self.heard: list[DriverMessage] = []

    async def launch(self, node: int, incarnation: int, *, prepare: bool) -> None:
        reader, self.writer = await open_agent(self.port, self.secret, node, incarnation)
        hello = Hello(generation=0, node=node, incarnation=incarnation, host="h", addr="127.0.0.1", t=0.0)
        self.writer.write(encode(hello) + b"".join(encode(word) for word in self.words))
        self.listening = asyncio.create_task(self._listen(reader))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        decoder: Decoder[DriverMessage] = Decoder(DriverMessage)
        while data := await reader.read(1 << 16):
            self.heard += decoder.feed(data)

    def connected(self, node: int) -> None:
        pass

    async def close(self, grace_s: float) -> None:
        await asyncio.sleep(0.2)  # what was sent arrives
        self.writer.close()
        self.listening.cancel()


def play(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    react: Callable[[AgentMessage, Outbox], None],
    words: Sequence[AgentMessage] = (Alive(generation=1),),
) -> tuple[Any, ...]:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints/.identity").write_text("x\n")
    config = Config.model_validate(
        {
            "name": "test",
            "run_dir": str(run_dir),
            "cluster": {"device": "cpu"},
            "train": {"steps": 10},
            "checkpoint": {"tiers": [{"name": "durable", "path": str(run_dir / "checkpoints")}]},
        }
    )
    agents: list[Agents] = []

    def launcher_of(*_: Any, secret: str, port: int, **__: Any) -> Agents:
        agents.append(Agents(secret, port, words))
        return agents[0]

    monkeypatch.setattr(module, "launcher_of", launcher_of)
    monkeypatch.setattr(module, "FLUSH_S", PATIENCE_S)
    monkeypatch.setattr(durable, "DIAGNOSIS_S", PATIENCE_S)
    lease = RunLease(run_dir)
    core = Core(react)

    async def run() -> Ending:
        driver = Driver(
            config,
            layout(config, cpu_count=2, gpu_count=0),
            core,  # type: ignore[arg-type]
            Display("none", 10, console=Console(file=io.StringIO())),
            str,
            identity="x",
            nonce="x",
            allocation=None,
            chain=None,
            settings=DiskSettings(run_dir=str(run_dir), token=lease.owner.token, lock_fd=lease.lock_fd),
            spill=SpillFile(Path("/dev/shm") / f"resilient-test-{os.getpid()}-{tmp_path.name}"),
            drain_s=PATIENCE_S,
        )
        return await driver.run()

    try:
        return (*asyncio.run(run())[:2], core, agents[0], run_dir)
    finally:
        lease.leave()


def test_effects_are_carried_out_in_order_and_the_fence_comes_back_as_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def react(message: AgentMessage, out: Outbox) -> None:
        out.request(0, Sync(generation=1))
        out.append(RequestDaemon(0, Sync(generation=1)))
        out.append(Send(0, Inspect(generation=1)))
        out.event("note", {"word": "said"}, 1)
        out.append(AcknowledgeRecords(0, 64))
        out.append(RaiseFence(1, PATIENCE_S))

    code, message, core, agents, run_dir = play(tmp_path, monkeypatch, react)
    assert (code, message) == (Exit.OK, "")
    assert core.fences == [(1, None)] and core.lost_nodes == []
    assert (run_dir / "checkpoints/.fence").read_text() == "1\n"
    heard = [each for each in agents.heard if not isinstance(each, Ping)]
    assert [type(each) for each in heard] == [DaemonRequests, Inspect, RecordsWritten]
    assert len(heard[0].requests) == 2
    assert [line["event"] for line in ledger.read(run_dir / ledger.EVENTS)] == ["run_started", "note"]
    assert not (run_dir / ".lease").exists()


def test_an_exception_in_the_core_ends_the_run_and_is_charged_to_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def react(message: AgentMessage, out: Outbox) -> None:
        out.event("half", {}, 1)  # of a turn that does not come to its end nothing is done
        raise KeyError("what nobody has thought of")

    code, message, core, agents, run_dir = play(tmp_path, monkeypatch, react)
    assert code == Exit.GAVE_UP
    assert "a defect in resilient: KeyError: 'what nobody has thought of'; run again to go on" in message
    assert [each for each in agents.heard if not isinstance(each, Ping)] == [Stop(generation=1), Shutdown(generation=1)]
    assert core.lost_nodes == []
    assert [line["event"] for line in ledger.read(run_dir / ledger.EVENTS)] == ["run_started"]
    assert "Traceback" in caplog.text and "what nobody has thought of" in caplog.text
    (page,) = run_dir.glob("diagnos*")
    assert "in react" in page.read_text()


def test_a_preparation_that_was_killed_is_made_again_and_given_up_the_third_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    killed = PreparationEnded(generation=0, failure="killed", killed=True)
    code, message, _, agents, _ = play(tmp_path, monkeypatch, lambda *_: None, [killed] * 3)
    assert code == Exit.GAVE_UP and message.startswith("killed\n")
    assert [each for each in agents.heard if isinstance(each, Prepare)] == [Prepare(generation=1)] * 2
