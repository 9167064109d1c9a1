"""Old logs and incidents become archives: what is kept, that nothing is lost, and how few files are left."""

import errno
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from crash_points import crashing_at
from forked import forked
from mounts import needs_root, small_disk

from resilient.exits import EnvironmentUnusable
from resilient.logs import archive, packing
from resilient.logs.archive import DamagedArchive
from resilient.logs.packing import Rule
from resilient.logs.reading import Wanted, generations, lines

FEW = Rule(folders=2, files=1000)


def written(generation: int, node: int, count: int = 3) -> str:
    head = f"2026-01-31 12:{generation % 60:02}"
    return "".join(f"{head}:{number:02}.000 [rank {node}] generation {generation}\n" for number in range(count))


def start(run_dir: Path, generation: int, nodes: int = 2) -> Path:
    folder = run_dir / "logs" / f"g{generation}"
    folder.mkdir(parents=True)
    for node in range(nodes):
        (folder / f"node{node}.log").write_text(written(generation, node))
    return folder


def read(run_dir: Path, generation: int, rank: int = 1) -> str:
    return "".join(f"{line}\n" for line in lines(run_dir, generation, Wanted(rank=rank)))


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "logs").iterdir())


def test_the_newest_generations_stay_and_older_ones_are_read_from_their_archive_as_before(tmp_path: Path):
    for generation in range(1, 8):
        start(tmp_path, generation)
        packing.pack_folders(tmp_path / "logs", FEW)
        assert generations(tmp_path) == list(range(1, generation + 1))
    assert names(tmp_path) == ["g0001-g0100.tar.zst", "g6", "g7"]
    for generation in range(1, 8):
        assert read(tmp_path, generation) == written(generation, 1)
    with pytest.raises(EnvironmentUnusable, match=r"no logs of generation 9 .* there are those of 1 to 7"):
        read(tmp_path, 9)


def test_other_programs_read_an_archive(tmp_path: Path):
    for generation in range(1, 6):
        start(tmp_path, generation)
        packing.pack_folders(tmp_path / "logs", FEW)
    packed = tmp_path / "logs" / "g0001-g0100.tar.zst"
    unpacked = subprocess.run(["zstd", "-dc", str(packed)], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-xf", "-", "-C", str(tmp_path)], input=unpacked, check=True)
    for generation in (1, 2, 3):
        assert (tmp_path / f"g{generation}" / "node1.log").read_text() == written(generation, 1)


def test_every_hundred_generations_are_an_archive(tmp_path: Path):
    for generation in (1, 99, 100, 101, 200, 201, 202, 203):
        start(tmp_path, generation)
    packing.pack_folders(tmp_path / "logs", FEW)
    assert names(tmp_path) == ["g0001-g0100.tar.zst", "g0101-g0200.tar.zst", "g0201-g0300.tar.zst", "g202", "g203"]
    assert [each.name for each in archive.contents(tmp_path / "logs" / "g0001-g0100.tar.zst")] == ["g1", "g99", "g100"]


def test_fewer_stay_where_they_have_too_many_files_but_always_the_newest(tmp_path: Path):
    for generation in range(1, 5):
        start(tmp_path, generation, nodes=30)
    packing.pack_folders(tmp_path / "logs", Rule(folders=20, files=60))
    assert names(tmp_path) == ["g0001-g0100.tar.zst", "g3", "g4"]
    packing.pack_folders(tmp_path / "logs", Rule(folders=20, files=1))
    assert names(tmp_path) == ["g0001-g0100.tar.zst", "g4"]


def test_incidents_are_packed_in_the_order_of_their_faults(tmp_path: Path):
    for name in ("g2-10", "g2-9", "g10-12", "g10-straggler-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank0.txt").write_text(name)
    packing.pack_folders(tmp_path, FEW)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g0001-g0100.tar.zst", "g10-12", "g10-straggler-1"]
    (first, second) = archive.contents(tmp_path / "g0001-g0100.tar.zst")
    assert [first.name, second.name] == ["g2-9", "g2-10"]
    assert dict(archive.read(tmp_path / "g0001-g0100.tar.zst", first)) == {"rank0.txt": b"g2-9"}


def test_what_somebody_wrote_late_into_a_packed_generation_is_kept(tmp_path: Path):
    for generation in range(1, 4):
        start(tmp_path, generation)
    packing.pack_folders(tmp_path / "logs", FEW)
    late = "2026-01-31 13:00:00.000 [rank 1] late\n"
    (tmp_path / "logs" / "g1").mkdir()
    (tmp_path / "logs" / "g1" / "node1.log").write_text(late)
    packing.pack_folders(tmp_path / "logs", FEW)
    assert names(tmp_path) == ["g0001-g0100.tar.zst", "g2", "g3"]
    assert read(tmp_path, 1) == written(1, 1) + late


def test_what_is_no_archive_is_told_and_nothing_is_deleted(tmp_path: Path):
    for generation in range(1, 23):
        start(tmp_path, generation)
    (tmp_path / "logs" / "g0001-g0100.tar.zst").write_text("something else, of some length")
    with pytest.raises(DamagedArchive, match=r"g0001-g0100\.tar\.zst is no archive of folders at byte 0"):
        packing.pack(tmp_path)
    assert len(packing.folders(tmp_path / "logs")) == 22
    assert generations(tmp_path) == list(range(1, 23))


def test_an_archive_that_was_cut_short_is_told(tmp_path: Path):
    folder = start(tmp_path, 1)
    path = tmp_path / "archive"
    archive.add(path, [folder])
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DamagedArchive, match="ends before folder g1 does"):
        archive.contents(path)


@needs_root
def test_a_packer_that_finds_no_room_leaves_as_much_as_there_was(tmp_path: Path):
    with small_disk(tmp_path / "disk", 3 << 20) as disk:
        for generation in range(1, 4):
            (start(disk, generation) / "rank0.txt").write_bytes(os.urandom(1 << 20 if generation == 1 else 0))
        packing.pack_folders(disk / "logs", FEW)
        for generation in range(4, 25):
            (start(disk, generation) / "rank0.txt").write_bytes(os.urandom(40 << 10))
        there, free = names(disk), os.statvfs(disk).f_bavail
        with pytest.raises(OSError) as failure:
            packing.pack_folders(disk / "logs", FEW)
        assert failure.value.errno == errno.ENOSPC
        assert (names(disk), os.statvfs(disk).f_bavail) == (there, free)
        assert read(disk, 1) == written(1, 1)


def pack_and_die(directory: Path, left: int) -> None:
    """In a process of its own, killed at the call number `left` of those that matter."""
    dying = crashing_at(left)
    os.fsync, Path.replace, Path.rename, os.unlink, os.rmdir, os.rename = map(  # type: ignore[method-assign]
        dying, (os.fsync, Path.replace, Path.rename, os.unlink, os.rmdir, os.rename)
    )
    archive._append = dying(archive._append)
    packing.pack_folders(directory, FEW)


def test_a_packer_killed_at_any_call_that_matters_loses_nothing_and_the_next_one_goes_on(tmp_path: Path):
    before = tmp_path / "before"
    for generation in (99, 100, 101):
        start(before, generation)
        packing.pack_folders(before / "logs", FEW)
    for generation in (102, 103, 104):
        start(before, generation)
    for left in range(60):
        run_dir = tmp_path / f"{left}"
        shutil.copytree(before, run_dir)
        packer = forked(pack_and_die, run_dir / "logs", left, daemon=False)
        packer.join()
        ended = packer.exitcode == 0
        assert ended or packer.exitcode == -signal.SIGKILL
        for _ in range(2):
            for generation in range(99, 105):
                assert read(run_dir, generation) == written(generation, 1), (left, generation)
            packing.pack_folders(run_dir / "logs", FEW)
        assert names(run_dir) == ["g0001-g0100.tar.zst", "g0101-g0200.tar.zst", "g103", "g104"]
        if ended:
            break
    else:
        pytest.fail("the packer never finished")
    assert left > 10


def test_a_hundred_restarts_of_a_thousand_nodes_leave_fewer_than_25000_files(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    for node in range(1000):
        (tmp_path / "logs" / f"agent{node}.log").touch()
    for generation in range(1, 102):
        folder = tmp_path / "logs" / f"g{generation}"
        folder.mkdir()
        incident = tmp_path / "incidents" / f"g{generation}-{generation}"
        incident.mkdir(parents=True)
        for node in range(1000 if generation > 79 else 1):  # what is packed is one file, however many it was
            os.close(os.open(folder / f"node{node}.log", os.O_CREAT | os.O_WRONLY))
        for node in range(1000 if generation > 97 else 1):
            os.close(os.open(incident / f"node{node}.tar.zst", os.O_CREAT | os.O_WRONLY))
        for rank in range(64 if generation > 97 else 1):
            (incident / f"rank{rank}.txt").touch()
        if generation % 50 == 1:
            packing.pack(tmp_path)
    assert sum(len(files) for _, _, files in os.walk(tmp_path)) < 25_000
    assert generations(tmp_path) == list(range(1, 102))
