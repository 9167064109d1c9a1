"""What is said of a tier that cannot be written."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemon_lab import Lab
from mounts import needs_root
from stranger import UID

from checkpoint import safe_dir
from checkpoint.errors import in_words, inodes_told_apart
from checkpoint.protocol import TierTrouble

FEW_INODES = "size=1m,nr_inodes=3"  # room, and inodes for the root and two more


@contextmanager
def disk(path: Path, options: str) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"{options},mode=700", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@pytest.fixture
def few_inodes(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "few", FEW_INODES) as path:
        yield path


@needs_root
def test_a_file_system_without_inodes_is_not_said_to_be_full(few_inodes: Path) -> None:
    with pytest.raises(OSError, match="No inodes are left") as raised, inodes_told_apart():
        (few_inodes / "a/b/c").mkdir(parents=True)
    assert raised.value.errno == errno.ENOSPC
    assert in_words(raised.value) == f"No inodes are left: {few_inodes}/a/b/c"
    (few_inodes / "a/b").rmdir()
    with pytest.raises(OSError, match="No space left"), inodes_told_apart():
        (few_inodes / "a/b").write_bytes(bytes(2 << 20))


@needs_root
def test_a_place_below_a_directory_is_told_with_its_whole_path(few_inodes: Path) -> None:
    with pytest.raises(OSError, match="No space left") as raised:
        safe_dir.make_private(few_inodes / "a/b/c")
    assert in_words(raised.value) == f"No space left on device: {few_inodes}/a/b/c"


@needs_root
def test_a_directory_of_somebody_else_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", UID, UID)
    with pytest.raises(safe_dir.UnsafeDirectory) as raised:
        safe_dir.make_private(tmp_path / "theirs")
    assert in_words(raised.value).startswith(f"{tmp_path}/theirs is not used: it belongs to ")
    assert in_words(raised.value).count("/theirs") == 1


@needs_root
@pytest.mark.parametrize(
    ("options", "words"), [(FEW_INODES, "No inodes are left"), ("size=8k,nr_inodes=999", "No space left on device")]
)
def test_a_tier_without_room_is_told_with_what_it_lacks_and_its_place(
    lab: Callable[..., Lab], tmp_path: Path, options: str, words: str
) -> None:
    nodes = lab(buffers=2)
    nodes.begin()
    assert nodes.step(1, ("ram", "durable"))
    nodes.wait_durable(1)
    aside = nodes.root.with_name("aside")
    nodes.root.rename(aside)
    with disk(tmp_path / "few", options) as few:
        nodes.root.symlink_to(few)
        for name in (".fence", ".fence.lock"):
            (few / name).write_bytes((aside / name).read_bytes() if (aside / name).exists() else b"")
        assert nodes.step(2, ("ram", "durable"))
        nodes.wait(lambda: [each for each in nodes.said if isinstance(each, TierTrouble)], "trouble")
        told = next(each for each in nodes.said if isinstance(each, TierTrouble))
        assert told.errno == errno.ENOSPC and told.detail.startswith(f"{words}: {nodes.root}"), told
        nodes.root.unlink()
        aside.rename(nodes.root)
        nodes.wait_durable(2)
