"""What is left of flushes that were cut off, and what a tier does that cannot be read or deleted from: real daemons."""

import errno
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from daemon_lab import Lab
from lone_daemon import PATIENCE_S, LoneDaemon
from mounts import freezable_disk, needs_root, small_disk

from checkpoint import LocalShard, Snapshots, points, shard_manifest, steps, verify
from checkpoint.daemon import shards
from checkpoint.daemon.buffer_files import BufferFiles, BufferSource
from checkpoint.errors import CheckpointError, DamagedCheckpoint
from checkpoint.fence import raise_fence
from checkpoint.protocol import Committed, Flushed, Held, JobFailed, SnapshotKey, StartJob, TierTrouble
from checkpoint.source import DirectorySource
from checkpoint.tiers import copying, joint_commit
from checkpoint.tiers.copying import Copy
from checkpoint.tiers.pace import Pace
from checkpoint.tools import flushing

ALL = ("ram", "nvme", "durable")
COMMITTING = (
    "finish_begun",
    "manifest_written",
    "manifest_durable",
    "finish_shares_gone",
    "directories_durable",
    "fence_checked",
    "renamed",
    "published",
)


@dataclass
class Snapshot:
    """A snapshot of step 1 that a daemon holds in RAM, and what a copy of it is made of.

    Attributes:
        path: of the node's shard.
        documents: its files that are no arrays.
        source: reads from it.
        copy: as fast as it goes.
    """

    path: Path

    def __post_init__(self) -> None:
        self.manifest = shard_manifest.read(self.path)
        self.documents = shard_manifest.documents(self.path, self.manifest)
        self.source = DirectorySource(self.path, chunks=self.manifest.chunks)
        self.copy = Copy(Pace(None), threading.Event(), lambda size_bytes: None)


@pytest.fixture
def snapshot(base: Path) -> Iterator[Callable[..., Snapshot]]:
    """Have the only rank of a node take a snapshot of so many rows of 1 KiB; the node's daemon runs until the test ends."""
    with LoneDaemon(base) as daemon:

        def taken(rows: int = 8) -> Snapshot:
            state = [LocalShard("model/weight", (rows, 256), (0, 0), torch.ones(rows, 256), (8, 256))]
            daemon.start()
            worker = Snapshots(daemon.begin(1))
            worker.start(state)
            assert worker.ready() and worker.take(1, state, {}, frozenset(["ram"]), wait_s=PATIENCE_S).copied
            return Snapshot(Path(daemon.wait_for(Held).shard.directory))

        yield taken


def test_what_a_flush_that_failed_has_left_goes_with_the_next_commit(lab: Callable[..., Lab]) -> None:
    nodes = lab()
    nodes.begin()
    assert nodes.step(1, ALL)
    nodes.wait_durable(1)
    generation = nodes.generation
    left = [nodes.root / f"step-{step:08}.g{generation}.tmp" for step in (2, 9)]
    for each in left:
        (each / "model").mkdir(parents=True)
    assert nodes.step(3, ALL)
    nodes.wait_durable(3)
    assert [each.exists() for each in left] == [False, True]  # one that is yet to come may be under way


def test_what_a_flush_of_other_arrays_has_left_of_the_same_step_is_no_part_of_the_checkpoint(lab: Callable[..., Lab]) -> None:
    """A job ended in the middle of it, and the next one shards the state otherwise."""
    nodes = lab()
    nodes.begin()
    left = nodes.root / f"step-00000001.g{nodes.generation - 1}.tmp"
    for name in ("model/weight/c/7", "model/gone/c/0", "gone.json", ".shares/node-5.g0.json"):
        (left / name).parent.mkdir(parents=True, exist_ok=True)
        (left / name).write_bytes(b"of others")
    assert nodes.step(1, ALL)
    nodes.wait_durable(1)
    assert not left.exists()
    verify(nodes.root / "step-00000001")


@pytest.mark.parametrize("point", COMMITTING)
def test_a_commit_that_a_file_system_ends_at_any_point_is_made_when_it_is_tried_again(
    snapshot: Callable[..., Snapshot], tmp_path: Path, point: str
) -> None:
    """By the daemon itself: nobody flushes again."""
    held = snapshot()

    def fails() -> None:
        points.disarm()
        raise OSError(errno.EIO, "Input/output error")

    for root in (tmp_path / "same", tmp_path / "next"):
        root.mkdir()
        copying.flush(held.source, held.manifest, held.documents, root, 1, held.copy)
        points.arm(point, fails)
        with pytest.raises(OSError, match="Input/output"):
            joint_commit.finish(held.manifest, held.documents, root, 1)
        attempt = 1
        if root.name == "next":  # a daemon died there, and another generation flushes the step again
            attempt = 2
            copying.flush(held.source, held.manifest, held.documents, root, attempt, held.copy)
        assert joint_commit.finish(held.manifest, held.documents, root, attempt).step == 1
        verify(root / "step-00000001")
        assert [each.name for each in root.iterdir() if each.is_dir()] == ["step-00000001"]


def test_what_has_the_name_of_a_copy_on_a_nodes_tier_gives_way_to_it(snapshot: Callable[..., Snapshot], tmp_path: Path) -> None:
    held = snapshot()
    target, outside = tmp_path / "step-00000001", tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    for squat in (lambda: target.symlink_to("nowhere"), lambda: target.symlink_to(outside), target.touch, target.mkdir):
        squat()
        copying.to_tier(held.source, held.manifest, held.documents, target, held.copy)
        assert shard_manifest.read(target) == held.manifest
        shutil.rmtree(target)
    assert (outside / "kept").exists()


@pytest.mark.parametrize("point", ["", "flush_begun", "half_of_copy_written", "finish_begun"])
def test_a_durable_tier_that_is_gone_at_any_moment_of_a_flush_is_not_made_anew_in_its_place(
    snapshot: Callable[..., Snapshot], tmp_path: Path, point: str
) -> None:
    held, root, aside = snapshot(rows=64), tmp_path / "durable", tmp_path / "aside"
    root.mkdir()

    def goes() -> None:
        points.disarm()
        root.rename(aside)

    def flush() -> None:
        copying.flush(held.source, held.manifest, held.documents, root, 1, held.copy)
        joint_commit.finish(held.manifest, held.documents, root, 1)

    if point:
        points.arm(point, goes)
    else:
        goes()
    try:
        with pytest.raises((OSError, CheckpointError)):
            flush()
        assert not root.exists(), "it would hide what belongs there, or be hidden by it"
    finally:
        points.disarm()
    aside.rename(root)
    flush()
    verify(root / "step-00000001")


@needs_root
def test_a_flush_by_hand_onto_a_full_disk_is_told_with_its_place(snapshot: Callable[..., Snapshot], tmp_path: Path) -> None:
    held = flushing.Held(1, 1, ((snapshot(rows=1024).path,),), 1 << 20)
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        with pytest.raises(OSError, match="No space left") as caught:
            flushing.flush(held, disk, lambda size_bytes: None)
        assert caught.value.filename == f"{disk}/step-00000001"


# The driver on another machine, which renews the lease every second, by a clock that is a minute behind.
RENEWING = """
import os, sys, time
while True:
    os.utime(sys.argv[1], (time.time() - 60, time.time() - 60))
    print(flush=True)
    time.sleep(1)
"""


def test_a_run_that_is_alive_on_another_machine_is_not_flushed_where_its_lock_is_not_seen(
    snapshot: Callable[..., Snapshot], tmp_path: Path
) -> None:
    """As on a file system whose locks are each machine's own."""
    held, run_dir = snapshot(), tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    run_dir.chmod(0o700)
    tiers = [
        {"name": "ram", "durable": False, "roots": [str(held.path.parent)]},
        {"name": "durable", "durable": True, "roots": [str(run_dir / "checkpoints")]},
    ]
    (run_dir / "storage.json").write_text(json.dumps({"run_dir": str(run_dir), "tiers": tiers}))
    (run_dir / ".lock").touch()
    owner = {"host": "n7", "pid": 4711, "job": "42", "machine": "another", "token": "t"}
    (run_dir / ".lease").write_text(json.dumps(owner))
    flush = [sys.executable, "-c", "from checkpoint.cli import app; app()", "flush", str(run_dir)]
    driver = subprocess.Popen([sys.executable, "-c", RENEWING, str(run_dir / ".lease")], stdout=subprocess.PIPE)
    try:
        assert driver.stdout is not None
        driver.stdout.readline()
        refused = subprocess.run(flush, capture_output=True, text=True, check=False)
        assert refused.returncode == 69
        assert "in use by pid 4711 on n7 (job 42), which flushes by itself" in refused.stderr
        assert not list((run_dir / "checkpoints").iterdir())
    finally:
        driver.kill()
        driver.communicate()
    subprocess.run(flush, check=True)
    assert steps(run_dir / "checkpoints") == [1]


def test_a_step_that_is_flushed_is_committed_although_its_buffer_has_something_newer(lab: Callable[..., Lab]) -> None:
    nodes = lab(1)
    nodes.begin()
    assert nodes.step(1)
    nodes.wait(lambda: nodes.reported("snapshot", "ram") == 1, "the snapshot")
    job = {"tier": "durable", "key": SnapshotKey(1, nodes.generation), "shard": 0, "generation": nodes.generation, "job_id": 77}
    nodes.nodes[0].send(StartJob(kind="flush", **job))
    nodes.wait(lambda: any(isinstance(news, Flushed) for news in nodes.said), "the flush")
    newer = iter(range(2, 30))  # while another node is still at it; which buffers are free by then depends on the moment
    while 1 in steps(nodes.nodes[0].tier_root("ram")):
        step = next(newer)
        assert nodes.step(step)
        nodes.wait(lambda step=step: nodes.reported("snapshot", "ram") == step, f"the snapshot of step {step}")
    nodes.nodes[0].send(StartJob(kind="commit", **job))
    nodes.wait(lambda: any(isinstance(news, Committed | JobFailed) for news in nodes.said), "the commit")
    verify(nodes.root / "step-00000001")


def broken(nodes: Lab) -> Path:
    """Have the durable tier fail; where what it held is meanwhile, see `mended`."""
    away = nodes.root.rename(nodes.root.with_name("away"))
    nodes.root.write_text("not a directory")
    return away


def mended(nodes: Lab, away: Path) -> None:
    nodes.root.unlink()
    away.rename(nodes.root)


@pytest.mark.parametrize(("buffers", "due"), [(2, ("ram", "durable")), (3, ("ram", "durable")), (3, ALL)])
def test_snapshots_in_ram_go_on_while_a_tier_does_not_work_and_a_late_one_becomes_durable_then(
    lab: Callable[..., Lab], buffers: int, due: tuple[str, ...]
) -> None:
    nodes = lab(buffers=buffers, release_s=0.0)
    nodes.begin()
    assert nodes.step(1, ALL)
    nodes.wait_durable(1)
    away = broken(nodes)
    for step in range(2, 20):
        assert nodes.step(step, due if step in (2, 9) else ("ram",), wait_s=PATIENCE_S), step
        nodes.wait(lambda step=step: nodes.reported("snapshot", "ram") == step, f"the snapshot of step {step}")
    assert nodes.reported("committed", "durable") == 1
    assert not [event for event in nodes.events if "given up" in str(event.fields.get("detail"))], "nothing is wrong with a step"
    mended(nodes, away)
    assert nodes.step(20, due, wait_s=PATIENCE_S)
    nodes.wait_durable(9)
    told = [event for event in nodes.events if event.event == "checkpoint_missed"]
    assert told or buffers > 2, "the step that had to make way for a newer snapshot"
    assert {event.fields["step"] for event in told} <= {2, 9}
    verify(nodes.root / f"step-{nodes.reported('committed', 'durable'):08}")


@needs_root
@pytest.mark.parametrize("late", [(2,), (2, 9)], ids=["nothing newer is due", "another step is due"])
def test_snapshots_in_ram_go_on_while_a_tier_hangs_and_what_was_overwritten_meanwhile_does_not_become_durable(
    lab: Callable[..., Lab], late: tuple[int, ...]
) -> None:
    nodes = lab(buffers=2, hang_s=0.5)
    with freezable_disk(nodes.root, 32):
        nodes.begin()
        assert nodes.step(1, ("ram", "durable"))
        nodes.wait_durable(1)
        subprocess.run(["fsfreeze", "--freeze", nodes.root], check=True)
        for step in range(2, 20):
            due = ("ram", "durable") if step in late else ("ram",)
            assert nodes.step(step, due, wait_s=PATIENCE_S), step
            nodes.wait(lambda step=step: nodes.reported("snapshot", "ram") == step, f"the snapshot of step {step}")
        assert nodes.reported("committed", "durable") == 1
        subprocess.run(["fsfreeze", "--unfreeze", nodes.root], check=True)
        assert nodes.step(20, ("ram", "durable"), wait_s=PATIENCE_S)
        nodes.wait_durable(9)
        told = {event.fields["step"] for event in nodes.events if event.event == "checkpoint_missed"}
        assert 2 in told and 2 not in steps(nodes.root)
        for step in steps(nodes.root):
            verify(nodes.root / f"step-{step:08}")
        assert not [event for event in nodes.events if "given up" in str(event.fields.get("detail"))]
        nodes.kill()


@pytest.mark.parametrize("where", ["flush", "to_tier"])
def test_what_was_read_before_its_buffer_was_overwritten_is_kept_however_long_it_takes_to_make_it_durable(
    snapshot: Callable[..., Snapshot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    held = snapshot()
    buffer = held.path.resolve()
    source = BufferSource(BufferFiles(buffer), held.manifest)
    held.copy.check = source.check

    def fsync(fd: int) -> None:
        if "/model/" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            (buffer / shard_manifest.NAME).unlink(missing_ok=True)  # a rank writes into it from now on

    monkeypatch.setattr(copying.os, "fsync", fsync)
    if where == "flush":
        raise_fence(tmp_path, 1)
        copying.flush(source, held.manifest, held.documents, tmp_path, 1, held.copy)
        joint_commit.finish(held.manifest, held.documents, tmp_path, 1)
        verify(tmp_path / "step-00000001")
    else:
        copying.to_tier(source, held.manifest, held.documents, tmp_path / "step-00000001", held.copy)
        assert shard_manifest.read(tmp_path / "step-00000001") == held.manifest
    with pytest.raises(DamagedCheckpoint, match="it was overwritten while it was read"):
        copying.to_tier(source, held.manifest, held.documents, tmp_path / "step-00000002", held.copy)


def test_a_tier_that_fails_for_a_moment_gets_the_step_that_was_due(lab: Callable[..., Lab]) -> None:
    nodes = lab(buffers=2)
    nodes.begin()
    assert nodes.step(1, ("ram", "durable"))
    nodes.wait_durable(1)
    away = broken(nodes)
    assert nodes.step(2, ("ram", "durable"))
    nodes.wait(lambda: nodes.reported("snapshot", "ram") == 2, "the snapshot")
    assert nodes.step(3, wait_s=PATIENCE_S)  # nothing but the flush keeps step 2 from now on
    nodes.wait(lambda: [each for each in nodes.said if isinstance(each, TierTrouble)], "trouble")
    mended(nodes, away)
    nodes.wait_durable(2)
    verify(nodes.root / "step-00000002")


def test_what_flushes_that_were_called_off_have_left_does_not_grow(lab: Callable[..., Lab]) -> None:
    """One node cannot write: what the others have written of a step is deleted when the next one is flushed."""
    nodes = lab(buffers=2)
    nodes.begin()
    left = [nodes.root / f"step-{step:08}.g{nodes.generation}.tmp" for step in (1, 2)]
    for each in left:
        (each / "model").mkdir(parents=True)
    assert nodes.step(3)
    nodes.wait(lambda: nodes.reported("snapshot", "ram") == 3, "the snapshot")
    job = {"tier": "durable", "key": SnapshotKey(3, nodes.generation), "shard": 0, "generation": nodes.generation, "job_id": 77}
    nodes.nodes[0].send(StartJob(kind="flush", **job))
    nodes.wait(lambda: any(isinstance(news, Flushed) for news in nodes.said), "the flush")
    assert not any(each.exists() for each in left)


def test_a_flush_that_meets_the_fence_of_the_next_generation_is_done_by_that_one_and_no_fault(lab: Callable[..., Lab]) -> None:
    nodes = lab(stale_s=PATIENCE_S)  # until it has begun, however busy the machine is
    nodes.begin()
    raise_fence(nodes.root, nodes.generation + 1)  # as the driver does a moment before it begins
    assert nodes.step(1, ALL)
    nodes.wait(lambda: nodes.reported("snapshot", "ram") == 1, "the snapshot")
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        nodes.pump(0.01)
    nodes.end_workers()
    nodes.begin()
    nodes.wait_durable(1)
    assert not [event for event in nodes.events if event.event == "fault"], nodes.events


def test_a_shard_that_cannot_be_deleted_keeps_no_other_from_it_and_ends_no_daemon(lab, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = lab(1)
    nodes.begin()
    for step in (1, 2):
        assert nodes.step(step, ("ram", "nvme"))
        nodes.wait(lambda step=step: nodes.reported("snapshot", "nvme") == step, "the disk")
    nodes.kill()  # the daemon would delete some of it meanwhile
    root = nodes.nodes[0].tier_root("nvme")
    broken = root / "step-00000001" / shard_manifest.NAME
    broken.unlink()
    broken.symlink_to("/proc/self/mem")  # which cannot be read at its beginning (EIO)
    roots = [shards.Root("nvme", root, nodes.base)]
    assert [each.key.step for each in shards.inventory(roots)] == [2]
    shards.forget(roots, lambda _: False)
    assert steps(root) == [1]

    def unreadable(path: Path, _: str) -> list[Path]:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(Path, "glob", unreadable)
    shards.sweep(roots)
