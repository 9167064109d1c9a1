"""Files a second time: linked where that is right, copied elsewhere, and never tied to the first ones' fate."""

import os
import shutil
from pathlib import Path

import pytest

from resilient.lineage import duplicate
from resilient.lineage.duplicate import Duplicated

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: files of another user need root")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source" / "inner").mkdir(parents=True)
    (tmp_path / "source" / "inner" / "b").write_text("two")
    (tmp_path / "source" / "a").write_text("one")
    return tmp_path / "source"


def contents(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_files_are_linked_and_deleting_them_in_one_place_leaves_the_other(source: Path, tmp_path: Path):
    done, target = Duplicated(), tmp_path / "target"
    duplicate.tree(source, target, done, group=False)
    assert done.files == {"linked": 2} and str(done) == "2 files linked"
    assert (target / "a").stat().st_ino == (source / "a").stat().st_ino
    before = contents(source)
    shutil.rmtree(source)
    assert contents(target) == before


def test_another_file_system_gets_copies(source: Path):
    target = Path("/dev/shm") / f"duplicate-{os.getpid()}"
    if source.stat().st_dev == Path("/dev/shm").stat().st_dev:
        pytest.skip("the temporary directory is on /dev/shm, too")
    done = Duplicated()
    try:
        duplicate.tree(source, target, done, group=False)
        assert contents(target) == contents(source) and done.files == {"copied": 2}
    finally:
        shutil.rmtree(target)


@NEEDS_ROOT
def test_files_of_another_user_are_copied_and_are_the_callers_own_then(source: Path, tmp_path: Path):
    os.chown(source / "a", 12345, 12345)
    done, target = Duplicated(), tmp_path / "target"
    duplicate.tree(source, target, done, group=False)
    assert done.files["linked"] == 1
    assert (target / "a").stat().st_uid == os.geteuid() and (target / "a").stat().st_ino != (source / "a").stat().st_ino
    assert contents(target) == contents(source)


def test_a_group_that_may_read_the_copy_could_not_read_a_link(source: Path, tmp_path: Path):
    (source / "a").chmod(0o600)
    (source / "inner" / "b").chmod(0o640)
    done, before = Duplicated(), os.umask(0o027)
    try:
        duplicate.tree(source, tmp_path / "target", done, group=True)
    finally:
        os.umask(before)
    assert done.files["linked"] == 1 and (tmp_path / "target" / "a").stat().st_mode & 0o777 == 0o640
    assert (source / "a").stat().st_mode & 0o777 == 0o600


def test_a_link_in_it_is_refused(source: Path, tmp_path: Path):
    (source / "link").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="no regular file"):
        duplicate.tree(source, tmp_path / "target", Duplicated(), group=False)
