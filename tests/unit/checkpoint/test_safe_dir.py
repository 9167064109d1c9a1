"""Directories in places that all users share, with another user who was there first."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from stranger import UID, needs_root, shared_place, stranger

from checkpoint import safe_dir
from checkpoint.safe_dir import UnsafeDirectory


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_place() as path:
        yield path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_every_level_is_made_for_this_user_alone(shared: Path) -> None:
    before = os.umask(0)
    try:
        safe_dir.make_private(shared / "a/b/c")
    finally:
        os.umask(before)
    assert [mode(shared / each) for each in ("a", "a/b", "a/b/c")] == [0o700, 0o700, 0o700]


@needs_root
@pytest.mark.parametrize("level", ["a", "a/b"])
def test_a_directory_of_somebody_else_is_refused_with_his_name_whichever_level_it_is(shared: Path, level: str) -> None:
    if level == "a/b":
        (shared / "a").mkdir(mode=0o755)
        stranger('mkdir -m 0777 "$1"', shared / "b")
        (shared / "b").rename(shared / "a/b")
    else:
        stranger('mkdir -m 0777 "$1"', shared / "a")
    with pytest.raises(UnsafeDirectory, match=rf"{shared / level} is not used: it belongs to uid {UID}, where only root"):
        safe_dir.make_private(shared / "a/b/c")
    assert not (shared / "a/b/c").exists()


@needs_root
@pytest.mark.parametrize("level", ["a", "a/b"])
def test_a_link_of_somebody_else_is_not_followed(shared: Path, tmp_path: Path, level: str) -> None:
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    stranger('ln -s "$1" "$2"', mine, shared / "link")
    if level == "a/b":
        (shared / "a").mkdir()
    (shared / "link").rename(shared / level)
    with pytest.raises(UnsafeDirectory, match=f"{shared / level} is not used: it is a symbolic link of uid {UID}"):
        safe_dir.make_private(shared / "a/b/c")
    assert not any(mine.iterdir())


def test_a_link_of_ours_is_followed_on_the_way_but_is_no_directory_itself(shared: Path) -> None:
    (shared / "disk").mkdir(mode=0o700)
    (shared / "tier").symlink_to("disk")
    safe_dir.make_private(shared / "tier/node0")
    assert (shared / "disk/node0").is_dir()
    (shared / "disk/link").symlink_to("node0")
    with pytest.raises(UnsafeDirectory, match="symbolic link"):
        safe_dir.make_private(shared / "tier/link")


def test_what_a_link_leads_to_is_not_made(shared: Path) -> None:
    (shared / "link").symlink_to(shared / "away/disk")
    with pytest.raises(FileNotFoundError, match=f"it is a symbolic link to {shared}/away/disk, which is not there") as told:
        safe_dir.make_private(shared / "link/b")
    assert (told.value.filename, (shared / "away").exists()) == (str(shared / "link"), False)
    assert not safe_dir.is_safe(shared / "link/b")


def test_links_in_a_circle_end(shared: Path) -> None:
    (shared / "one").symlink_to("two")
    (shared / "two").symlink_to("one")
    with pytest.raises(OSError, match="Too many levels"):
        safe_dir.make_private(shared / "one/node0")


def test_what_others_may_write_to_is_refused_unless_it_is_sticky(shared: Path) -> None:
    (shared / "open").mkdir()
    (shared / "open").chmod(0o777)
    for path in (shared / "open", shared / "open/below"):
        with pytest.raises(UnsafeDirectory, match=r"others than .* may write to it \(mode 0777\); chmod go-w"):
            safe_dir.make_private(path)
    (shared / "open").chmod(0o1777)
    safe_dir.make_private(shared / "open/below")


def test_what_others_may_only_read_is_closed_to_them(shared: Path) -> None:
    (shared / "a").mkdir()
    (shared / "a").chmod(0o755)
    safe_dir.make_private(shared / "a")
    assert mode(shared / "a") == 0o700


def test_above_a_trusted_directory_nothing_is_asked_and_below_it_everything(shared: Path) -> None:
    project = shared / "project"
    project.mkdir()
    project.chmod(0o2777)
    safe_dir.make_private(project / "slabs/node0", trusted=project)
    assert mode(project / "slabs") & 0o777 == 0o700
    (project / "slabs").chmod(0o777)
    with pytest.raises(UnsafeDirectory):
        safe_dir.make_private(project / "slabs/node0", trusted=project)


@needs_root
def test_nothing_is_removed_that_is_somebody_elses_or_behind_his_link(shared: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine/node0"
    mine.mkdir(parents=True)
    stranger('ln -s "$1" "$2"', mine.parent, shared / "link")
    stranger('mkdir "$1"', shared / "his")
    safe_dir.remove(shared / "link/node0")
    safe_dir.remove(shared / "link")
    safe_dir.remove(shared / "his")
    assert mine.is_dir() and (shared / "his").is_dir()


@needs_root
def test_a_directory_is_found_again_by_its_owner_and_no_name_can_be_taken_before(shared: Path) -> None:
    stranger('mkdir "$1" "$2-0123456789abcdef"; ln -s /tmp "$2-fedcba9876543210"', shared / "job", shared / "job")
    assert safe_dir.find(shared, "job") == []
    mine = safe_dir.new(shared, "job")
    safe_dir.make_private(mine)
    (shared / "job-daemon-0123456789abcdef").mkdir()
    assert safe_dir.find(shared, "job") == [mine]


def test_a_file_that_is_there_is_not_written_over(shared: Path) -> None:
    fd = safe_dir.open_private(shared / "a")
    try:
        with os.fdopen(safe_dir.create(fd, "arrays/weight/c.0"), "w") as file:
            file.write("mine")
        with pytest.raises(FileExistsError):
            safe_dir.create(fd, "arrays/weight/c.0")
        (shared / "a/link").symlink_to("arrays")
        with pytest.raises(OSError):
            safe_dir.create(fd, "link/new")
    finally:
        os.close(fd)
    assert mode(shared / "a/arrays/weight") == 0o700 and mode(shared / "a/arrays/weight/c.0") == 0o600
