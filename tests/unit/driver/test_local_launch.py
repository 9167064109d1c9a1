"""Agents as processes of this machine: a log that cannot be opened keeps neither the event loop nor anybody else."""

import asyncio
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from mounts import freezable_disk, needs_root

from resilient.campaign import shares_of_gpus
from resilient.config import Config, layout
from resilient.driver import launch
from resilient.driver.launch import AgentCommand, LocalLauncher

PATIENCE_S = 120.0


class Local:
    """A launcher whose agents are processes that say who they are in their log, and end."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launch, "AGENT", ("/bin/sh", "-c", 'echo "agent $RESILIENT_TOKEN"'))
        self.log = directory / "logs" / "agent0.log"
        self.log.parent.mkdir()
        self.ended: list[tuple[int, int, str]] = []
        self.command = AgentCommand("n2:80", 4, directory, "x", "trainer.main:train", 30.0, 30.0, 16, "cpu", "t0ken", {}, "INFO")
        self.launcher = LocalLauncher(self.command, lambda *news: self.ended.append(news))


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Local:
    return Local(tmp_path, monkeypatch)


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():
            await asyncio.sleep(0.01)


def test_an_agent_whose_log_stands_still_keeps_nobody_and_starts_when_it_goes_on(local: Local):
    os.mkfifo(local.log)  # to open it waits until somebody reads

    async def play() -> str:
        launching = asyncio.create_task(local.launcher.launch(0, 1, prepare=False))
        again = asyncio.create_task(local.launcher.launch(0, 2, prepare=False))
        await asyncio.sleep(0)  # the event loop goes on
        assert not launching.done() and not again.done()
        reader = os.open(local.log, os.O_RDONLY | os.O_NONBLOCK)
        await asyncio.gather(launching, again)
        await until(lambda: bool(local.ended))
        text = os.read(reader, 1 << 16).decode()
        os.close(reader)
        await local.launcher.close(0.0)
        return text

    assert asyncio.run(play()) == "agent t0ken.2\n", "the one that was asked for last, and no other"
    assert [(node, incarnation) for node, incarnation, _ in local.ended] == [(0, 2)]


def test_a_driver_ends_although_the_log_of_an_agent_stands_still(local: Local):
    os.mkfifo(local.log)

    async def play() -> None:
        launching = asyncio.create_task(local.launcher.launch(0, 1, prepare=False))
        await asyncio.sleep(0)
        launching.cancel()
        await asyncio.gather(launching, return_exceptions=True)
        await local.launcher.close(0.0)

    asyncio.run(play())  # waits for the threads of the loop's own executor, if there were any
    os.close(os.open(local.log, os.O_RDONLY | os.O_NONBLOCK))  # lets the thread go
    assert not local.ended


def test_an_agent_whose_log_cannot_be_opened_has_ended(local: Local):
    local.log.mkdir()
    asyncio.run(local.launcher.launch(0, 7, prepare=False))
    ((node, incarnation, detail),) = local.ended
    assert (node, incarnation) == (0, 7)
    assert "it could not be started" in detail and "agent0.log" in detail


@needs_root
@pytest.mark.parametrize("again", [False, True])
def test_an_agent_that_the_kernel_keeps_holds_up_neither_the_end_nor_the_next_agent(
    local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
):
    monkeypatch.setattr(launch, "GONE_S", 0.1)
    with freezable_disk(tmp_path / "disk", 16) as disk:
        monkeypatch.setattr(launch, "AGENT", ("/bin/sh", "-c", f"echo began; echo >{disk}/file"))
        subprocess.run(["fsfreeze", "--freeze", disk], check=True)

        async def play() -> None:
            await local.launcher.launch(0, 1, prepare=False)
            stuck = local.launcher._processes[0].pid
            await until(lambda: Path(f"/proc/{stuck}/stat").read_text().rpartition(")")[2].split()[0] == "D")
            if again:
                monkeypatch.setattr(launch, "AGENT", ("/bin/true",))
                await local.launcher.launch(0, 2, prepare=False)
                await until(lambda: bool(local.ended))
            await local.launcher.close(0.0)

        asyncio.run(asyncio.wait_for(play(), PATIENCE_S))
        assert [incarnation for _, incarnation, _ in local.ended] == [2] * again


def test_without_a_descriptor_to_be_had_an_agent_that_cannot_be_started_is_told_and_one_that_ends_is_seen(local: Local):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    failed: list[str] = []

    async def play() -> None:
        await local.launcher.launch(0, 1, prepare=False)
        await until(lambda: bool(local.ended))
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        await local.launcher.launch(0, 2, prepare=False)
        failed.append(local.ended[-1][2])
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        process = subprocess.Popen(["/bin/sleep", "0.1"])
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        assert await launch._end_of(process) == 0
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await local.launcher.launch(0, 3, prepare=False)
        await until(lambda: len(local.ended) == 3)
        await local.launcher.close(0.0)

    try:
        asyncio.run(play())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "could not be started" in failed[0] and "Too many open files" in failed[0]
    assert [incarnation for _, incarnation, _ in local.ended] == [1, 2, 3]


def test_every_local_agent_sees_gpus_of_its_own_as_do_spares(local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    monkeypatch.setattr(launch, "AGENT", ("/bin/sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES"'))
    config = Config.model_validate({"cluster": {"nodes": 2, "procs_per_node": 2, "spares": 1}, "train": {"global_batch_size": 16}})
    shares = shares_of_gpus(config, layout(config, cpu_count=2, gpu_count=6))
    launcher = LocalLauncher(local.command, lambda *news: local.ended.append(news), None, shares)

    async def play() -> None:
        for node in range(3):
            await launcher.launch(node, 1, prepare=False)
        await until(lambda: len(local.ended) == 3)
        await launcher.close(0.0)

    asyncio.run(play())
    assert [(tmp_path / "logs" / f"agent{node}.log").read_text().strip() for node in range(3)] == ["0,1", "2,3", "4,5"]
