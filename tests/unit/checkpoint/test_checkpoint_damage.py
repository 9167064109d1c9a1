"""Damage of every kind is found and named, and the checkpoint before it is used."""

import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import crc32c
import pytest
import torch
from checkpoint_state import local_shards
from soak import soaked

from checkpoint import DamagedCheckpoint, LocalShard, NoUsableCheckpoint, layout, load, naming, newest_good, restore, save, verify

SHARD = "model/weight/c.0.0"  # an index, three slots of 32 bytes, a checksum and padding


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2, of the same arrays with other values."""
    root = tmp_path_factory.mktemp("sound")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "CHUNK_TARGET_BYTES", 32)
        for step in (1, 2):
            save(root, step, local_shards(float(step)), {"step": step}, generation=0)
    return root


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "root")
    return tmp_path / "root"


def flip(name: str, place: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[place] ^= 0x10
        (path / name).write_bytes(content)

    return damage


def cut(name: str, size: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[:size])

    return damage


def lengthen(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with (path / name).open("ab") as file:
            file.write(b"\0")

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def from_step_1(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        shutil.copyfile(path.parent / "step-00000001" / name, path / name)

    return damage


def swap_chunks(path: Path) -> None:
    content = bytearray((path / SHARD).read_bytes())
    content[4096:8192], content[8192:12288] = content[8192:12288], content[4096:8192]
    (path / SHARD).write_bytes(content)


def rewrite_chunk(path: Path) -> None:
    """Another chunk with a checksum that fits it."""
    content = bytearray((path / SHARD).read_bytes())
    content[4096:4128] = bytes(32)
    content[4128:4132] = struct.pack("<I", crc32c.crc32c(bytes(32)))
    (path / SHARD).write_bytes(content)


def rewrite_manifest(**changes: object) -> Callable[[Path], None]:
    """A manifest with a checksum that fits it."""

    def damage(path: Path) -> None:
        found = json.loads((path / "manifest.json").read_bytes())
        del found["crc32c"]
        body = json.dumps({**found, **changes}, indent=1).removesuffix("\n}").encode()
        tail = b',\n "crc32c": "%08x"\n}\n' % crc32c.crc32c(body)
        (path / "manifest.json").write_bytes(body + tail)

    return damage


def replace_by_directory(path: Path) -> None:
    (path / SHARD).unlink()
    (path / SHARD).mkdir()


def replace_by_link(path: Path) -> None:
    (path / SHARD).rename(path.parent / "elsewhere")
    (path / SHARD).symlink_to(path.parent / "elsewhere")


def replace_by_pipe(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return damage


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


VARIANTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "chunk flipped": (flip(SHARD, 4096), f"{SHARD} has checksum .* instead of"),
    "chunk's checksum flipped": (flip(SHARD, 4096 + 32), f"{SHARD} has checksum"),
    "last chunk flipped": (flip(SHARD, 3 * 4096 + 31), f"{SHARD} has checksum"),
    "index flipped": (flip(SHARD, 3), f"{SHARD} has checksum"),
    "index's checksum flipped": (flip(SHARD, 16 * 3 + 2), f"{SHARD} has checksum"),
    "padding of the index flipped": (flip(SHARD, 4095), f"{SHARD} has checksum"),
    "padding of a chunk flipped": (flip(SHARD, 8191), f"{SHARD} has checksum"),
    "last byte flipped": (flip(SHARD, -1), f"{SHARD} has checksum"),
    "chunks swapped": (swap_chunks, f"{SHARD} has sound chunks, but .* not those that were written"),
    "chunk rewritten with its checksum": (rewrite_chunk, f"{SHARD} has sound chunks"),
    "shard of another step": (from_step_1(SHARD), f"{SHARD} has sound chunks"),
    "shard cut by a byte": (cut(SHARD, -1), rf"{SHARD} has 16383 bytes instead of 16384"),
    "shard cut in the middle": (cut(SHARD, 5000), f"{SHARD} has 5000 bytes instead"),
    "shard empty": (cut(SHARD, 0), f"{SHARD} has 0 bytes instead"),
    "shard longer": (lengthen(SHARD), f"{SHARD} has 16385 bytes instead"),
    "shard missing": (remove(SHARD), f"{SHARD} is missing"),
    "shard a directory": (replace_by_directory, f"{SHARD} does not belong"),
    "shard a link": (replace_by_link, f"{SHARD} does not belong"),
    "shard a pipe": (replace_by_pipe(SHARD), f"{SHARD} does not belong"),
    "array's metadata flipped": (flip("model/weight/zarr.json", 10), "model/weight/zarr.json has checksum"),
    "array's metadata missing": (remove("model/weight/zarr.json"), "model/weight/zarr.json is missing"),
    "group's metadata cut": (cut("model/zarr.json", 5), "model/zarr.json has 5 bytes"),
    "root's metadata flipped": (flip("zarr.json", 30), "^zarr.json does not match the manifest"),
    "root's metadata missing": (remove("zarr.json"), "^zarr.json is missing"),
    "root's metadata a pipe": (replace_by_pipe("zarr.json"), "^zarr.json cannot be read: it is a pipe"),
    "root's metadata of another step": (from_step_1("zarr.json"), "^zarr.json does not match the manifest"),
    "manifest flipped": (flip("manifest.json", 20), "manifest.json does not match its own checksum"),
    "manifest's checksum flipped": (flip("manifest.json", -6), "manifest.json does not match its own checksum"),
    "manifest's last byte flipped": (flip("manifest.json", -1), "manifest.json does not match its own checksum"),
    "manifest cut": (cut("manifest.json", -1), "manifest.json does not match its own checksum"),
    "manifest longer": (lengthen("manifest.json"), "manifest.json does not match its own checksum"),
    "manifest empty": (cut("manifest.json", 0), "manifest.json does not match its own checksum"),
    "manifest missing": (remove("manifest.json"), "manifest.json is missing"),
    "manifest a pipe": (replace_by_pipe("manifest.json"), "manifest.json cannot be read: it is a pipe"),
    "manifest of another step": (from_step_1("manifest.json"), "manifest.json is that of step 1"),
    "manifest with another step": (rewrite_manifest(step=3), "manifest.json is that of step 3"),
    "manifest with another generation": (rewrite_manifest(generation=5), "of step 2, generation 0, and manifest.json of .* 5"),
    "manifest of another format": (rewrite_manifest(format="other"), "has format 'other' 1, expected"),
    "manifest of a later version": (rewrite_manifest(version=2), "has format 'resilient-checkpoint' 2, expected"),
    "manifest without files": (rewrite_manifest(files={}), "zarr.json does not match the manifest"),
    "manifest of wrong types": (rewrite_manifest(files=[1]), "manifest.json is not what a checkpoint has"),
    "foreign file": (lambda path: (path / "core").touch(), "core does not belong to it"),
    "foreign file inside": (lambda path: (path / "model/weight/c.1.0").touch(), "model/weight/c.1.0 does not belong"),
    "foreign directory": (lambda path: (path / "model/bias").mkdir(), "model/bias does not belong to it"),
    "empty directory": (empty, "manifest.json is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_damage_is_named_and_the_checkpoint_before_it_is_used(root: Path, name: str) -> None:
    damage, reason = VARIANTS[name]
    path = root / "step-00000002"
    verify(path)
    damage(path)
    rejected: list[tuple[int, str]] = []
    assert newest_good(root, on_reject=lambda *each: rejected.append(each)) == root / "step-00000001"
    with pytest.raises(DamagedCheckpoint) as raised:
        verify(path)
    assert re.search(reason, raised.value.reason)
    assert rejected == [(2, raised.value.reason)]
    assert str(raised.value).startswith(f"{path} is damaged: ")


@pytest.mark.parametrize("count", [60, soaked(1000)])
def test_every_flipped_byte_is_found(root: Path, count: int) -> None:
    path = root / "step-00000002"
    files = sorted(each for each in path.rglob("*") if each.is_file())
    sizes = [each.stat().st_size for each in files]
    dice = random.Random(1)
    for _ in range(count):
        (file,) = dice.choices(files, weights=sizes)
        content = bytearray(file.read_bytes())
        place = dice.randrange(len(content))
        content[place] ^= dice.randrange(1, 256)
        before = file.read_bytes()
        file.write_bytes(content)
        with pytest.raises(DamagedCheckpoint):
            verify(path)
        rejected: list[int] = []
        wanted = local_shards(0.0)
        restored = restore(root, lambda state, wanted=wanted: wanted, on_reject=lambda step, *_, to=rejected: to.append(step))
        assert restored is not None
        assert (restored.step, rejected) == (1, [2]), file
        assert all(torch.equal(one.data, other.data) for one, other in zip(wanted, local_shards(1.0), strict=True))
        file.write_bytes(before)
    verify(path)


def test_the_parts_of_a_verification_cover_every_file_once(root: Path) -> None:
    path = root / "step-00000002"
    for file in [each for each in path.rglob("*") if each.is_file()]:
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        found = 0
        for part in range(3):
            try:
                verify(path, part=part, parts=3)
            except DamagedCheckpoint:
                found += 1
        assert found == (3 if file.parent == path else 1), file
        file.write_bytes(content)


def load_everything(path: Path) -> list[LocalShard]:
    found = [LocalShard(each.array, each.shape, each.offset, torch.zeros_like(each.data), each.unit) for each in local_shards()]
    load(path, found)
    return found


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip(SHARD, 4096), r"chunk \(0, 0\) of model/weight \(slot 0 of .*\) has a wrong checksum"),
        (flip(SHARD, 4096 + 33), "has a wrong checksum"),
        (flip(SHARD, 3), "has a wrong index"),
        (cut(SHARD, -1), "has 16383 bytes instead of 16384"),
        (remove(SHARD), "is missing"),
        (replace_by_pipe(SHARD), "cannot be read: it is a pipe"),
        (flip("zarr.json", 30), "does not match the manifest"),
        (remove("manifest.json"), "is missing"),
    ],
)
def test_loading_finds_the_damage_that_it_meets(root: Path, damage: Callable[[Path], None], reason: str) -> None:
    path = root / "step-00000002"
    load_everything(path)
    damage(path)
    with pytest.raises(DamagedCheckpoint, match=reason):
        load_everything(path)


def test_only_chunks_that_are_needed_are_read(root: Path) -> None:
    path = root / "step-00000002"
    flip(SHARD, 4096)(path)
    last = local_shards()[1]
    rows = LocalShard(last.array, last.shape, last.offset, torch.zeros_like(last.data), last.unit)
    load(path, [rows])
    assert torch.equal(rows.data, local_shards(2.0)[1].data)


def test_when_none_is_good_each_one_is_named(root: Path) -> None:
    flip(SHARD, 4096)(root / "step-00000001")
    remove("manifest.json")(root / "step-00000002")
    with pytest.raises(NoUsableCheckpoint, match=r"(?s)none of the 2 checkpoints .*step 2: .*missing\n  step 1: .*checksum"):
        newest_good(root)


def test_without_checkpoints_there_is_none(tmp_path: Path) -> None:
    assert newest_good(tmp_path) is None
    assert newest_good(tmp_path / "nowhere") is None
    (tmp_path / "step-00000001.g0.tmp").mkdir()
    (tmp_path / "step-00000001.damaged-1").mkdir()
    (tmp_path / "step-00000001.deleted-1").mkdir()
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-00000001").touch()
    assert newest_good(tmp_path) is None


OUT_OF_SIGHT = "x" * 300  # what a link to it leads to cannot be looked at: ENAMETOOLONG


@pytest.mark.parametrize("name", ["old", "step-00000003.deleted-1", "step-00000003.g0.tmp"])
def test_what_is_no_checkpoint_and_cannot_be_looked_at_hides_none(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 2, local_shards(), {}, generation=1).path
    (tmp_path / name).symlink_to(OUT_OF_SIGHT)
    assert (naming.steps(tmp_path), naming.stale(tmp_path, 1), naming.deleted(tmp_path)) == ([2], [], [])
    assert newest_good(tmp_path) == path


def test_a_checkpoint_that_cannot_be_looked_at_is_one_that_cannot_be_read(tmp_path: Path) -> None:
    path = save(tmp_path, 2, local_shards(), {}, generation=1).path
    (tmp_path / "step-00000003").symlink_to(OUT_OF_SIGHT)
    assert naming.steps(tmp_path) == [2, 3]
    rejected: list[tuple[int, str]] = []
    assert newest_good(tmp_path, on_reject=lambda step, reason: rejected.append((step, reason))) == path
    assert rejected == [(3, "manifest.json cannot be read: File name too long")]
    save(tmp_path, 3, local_shards(), {}, generation=1)
    assert (tmp_path / "step-00000003.damaged-1").is_symlink()
    assert newest_good(tmp_path) == tmp_path / "step-00000003"
