"""What a driver has its disk process do, when that dies meanwhile: kill -9, as the kernel does where memory runs out."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkpoint import manifest
from checkpoint.fence import newest_generation
from resilient import storage
from resilient.config import Config, load
from resilient.driver.durable import Durable
from resilient.driver.lease import RunLease
from resilient.driver.spill_file import SpillFile
from resilient.driver.writer import Listeners, Writer
from resilient.exits import Exit
from resilient.outbox import Quarantine, RaiseFence
from resilient.protocol.disk import DiskSettings
from resilient.recovery.rollback import InvalidationRule
from resilient.slurm import chain
from resilient.slurm.allocation import Allocation
from resilient.slurm.succession import Succession

PATIENCE_S = 60.0
IDENTITY = "0123456789ab"
CALLS = 1_000_000  # more than Slurm is ever asked


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "config.yaml"
    tiers = [{"name": "durable", "path": str(tmp_path / "durable")}]
    path.write_text(yaml.safe_dump({"name": "gpt", "run_dir": str(tmp_path / "run"), "checkpoint": {"tiers": tiers}}))
    (tmp_path / "durable").mkdir()
    (tmp_path / "durable" / storage.IDENTITY).write_text(f"{IDENTITY}\n")
    return load(path, [])


async def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@contextmanager
def writing(config: Config, spill_dir: Path) -> Iterator[Writer]:
    config.run_dir.mkdir(exist_ok=True)
    lease = RunLease(config.run_dir)
    settings = DiskSettings(run_dir=str(config.run_dir), token=lease.owner.token, lock_fd=lease.lock_fd)
    heard = Listeners(lambda *_: None, lambda _: None, lambda _: None, lambda _: None)
    yield Writer(settings, SpillFile(spill_dir), heard)
    lease.leave()


async def stopped(writer: Writer) -> int:
    """The disk process, which answers nothing any more."""
    await until(lambda: writer.disk_pid is not None)
    pid = writer.disk_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid


def end_of_a_job(config: Config, spill_dir: Path, code: Exit, until_noted: Callable[[list[str]], None]) -> list[str]:
    """What a person is told at the end of job 100, which has not been followed. Args: until_noted: called with each note."""
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        until_noted(notes)

    async def run(writer: Writer) -> None:
        writer.start()
        durable = Durable(config, IDENTITY, Allocation("100", ("n1",), (2,), 0), Succession.of(config).name, writer, note)
        await asyncio.wait_for(durable.ended(code), PATIENCE_S)
        assert await writer.close(PATIENCE_S)

    with writing(config, spill_dir) as writer:
        asyncio.run(run(writer))
    return notes


def running_chain(config: Config, slurm: Any) -> Succession:
    found = Succession.of(config)
    asyncio.run(found.begin(f"#!/bin/bash\n#SBATCH --job-name={found.name}\n"))
    slurm.becomes("100", state="RUNNING", end="2099-01-01T00:00:00")
    assert found.started("100", 0) is None
    return found


@pytest.mark.parametrize("code", [Exit.STOPPED, Exit.UNUSABLE])
def test_a_job_that_ends_while_slurm_is_silent_asks_for_the_next_one_until_it_has_it(config: Config, slurm, tmp_path: Path, code):
    running_chain(config, slurm)
    slurm.deaf(CALLS)
    notes = end_of_a_job(config, tmp_path / "spill", code, lambda _: slurm.deaf(1))
    assert [job["state"] for job in slurm.jobs()] == ["RUNNING", "PENDING"]
    (told,) = notes
    assert told.startswith("the next job is not in the queue yet: it is asked for up to 300 s more (")
    assert "Unable to contact slurm controller" in told


def test_a_chain_that_is_stopped_meanwhile_asks_for_no_next_job(config: Config, slurm, tmp_path: Path):
    running_chain(config, slurm)
    slurm.deaf(CALLS)

    def stop(_: list[str]) -> None:
        with (config.run_dir / chain.FILE).open("a") as file:
            file.write('{"t": 1, "what": "stopped"}\n')
        slurm.deaf(0)

    assert len(end_of_a_job(config, tmp_path / "spill", Exit.STOPPED, stop)) == 1
    assert [job["state"] for job in slurm.jobs()] == ["RUNNING"]


def test_a_job_that_ends_a_chain_asks_for_no_next_job(config: Config, slurm, tmp_path: Path):
    running_chain(config, slurm)
    assert end_of_a_job(config, tmp_path / "spill", Exit.GAVE_UP, lambda _: None) == []
    assert [job["state"] for job in slurm.jobs()] == ["RUNNING"]


def test_the_next_job_is_there_however_often_the_disk_process_dies_while_slurm_is_silent(config: Config, slurm, tmp_path: Path):
    running = running_chain(config, slurm)

    async def run(writer: Writer) -> None:
        writer.start()
        durable = Durable(config, IDENTITY, Allocation("100", ("n1",), (2,), 0), running.name, writer, lambda _: None)
        slurm.deaf(CALLS)
        asking = asyncio.create_task(durable.ensure_successor())
        for _ in range(3):
            left = int((slurm.directory / "deaf").read_text() or CALLS)
            await until(lambda left=left: 0 < int((slurm.directory / "deaf").read_text() or 0) < left)
            assert writer.disk_pid is not None
            os.kill(writer.disk_pid, signal.SIGKILL)
        slurm.deaf(0)
        await asyncio.wait_for(asking, PATIENCE_S)
        assert await writer.close(PATIENCE_S)

    with writing(config, tmp_path / "spill") as writer:
        asyncio.run(run(writer))
    assert [job["state"] for job in slurm.jobs()] == ["RUNNING", "PENDING"]


def test_the_fence_is_raised_and_checkpoints_are_renamed_although_the_disk_process_dies(config: Config, tmp_path: Path):
    rolled_back = tmp_path / "durable" / "step-00000007"
    rolled_back.mkdir()
    (rolled_back / manifest.NAME).write_bytes(manifest.encode(manifest.Manifest(7, 1, {})))

    async def run(writer: Writer) -> None:
        writer.start()
        durable = Durable(config, IDENTITY, None, None, writer, lambda _: None)
        for asked in (durable.raise_fence(RaiseFence(3, 30.0)), durable.quarantine(Quarantine((InvalidationRule(2, 5),), 3))):
            pid = await stopped(writer)
            asking = asyncio.create_task(asked)
            await asyncio.sleep(0)  # the call is on its way
            os.kill(pid, signal.SIGKILL)
            answer = await asking
            assert answer is None or answer[1] is None, answer
            await until(lambda pid=pid: writer.disk_pid not in (None, pid))
        assert await writer.close(PATIENCE_S)

    with writing(config, tmp_path / "spill") as writer:
        asyncio.run(run(writer))
    assert newest_generation(tmp_path / "durable") == 3 and not rolled_back.exists()


def test_no_fence_is_raised_where_another_campaign_has_its_durable_tier(config: Config, tmp_path: Path):
    async def run(writer: Writer) -> None:
        writer.start()
        why = await Durable(config, "ba9876543210", None, None, writer, lambda _: None).raise_fence(RaiseFence(3, 30.0))
        assert why is not None and "leads to another directory" in why
        assert await writer.close(PATIENCE_S)

    with writing(config, tmp_path / "spill") as writer:
        asyncio.run(run(writer))
    assert newest_generation(tmp_path / "durable") is None


def test_what_ends_the_disk_process_each_time_is_asked_for_twice_and_no_more(config: Config, tmp_path: Path):
    async def run(writer: Writer) -> None:
        writer.start()
        durable = Durable(config, IDENTITY, None, None, writer, lambda _: None)
        first = await stopped(writer)
        asking = asyncio.create_task(durable.raise_fence(RaiseFence(3, 30.0)))
        await asyncio.sleep(0)  # the call is on its way
        os.kill(first, signal.SIGKILL)
        await until(lambda: writer.disk_pid != first)
        assert not asking.done()
        os.kill(await stopped(writer), signal.SIGKILL)
        assert "has died" in (await asking or "")
        await writer.close(0.1)

    with writing(config, tmp_path / "spill") as writer:
        asyncio.run(run(writer))
