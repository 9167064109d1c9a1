"""Which commit a checkout is of, and what is taken for a checkout."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from resilient.version import commit, described, dirty

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git, to make checkouts with")

PACKAGE = "resilient/version.py"


def git(at: Path, *arguments: str) -> str:
    """Run it there with nothing of this machine's or a caller's configuration."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    names = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", str(at), *names, *arguments], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def package(root: Path) -> Path:
    here = root / PACKAGE
    here.parent.mkdir(parents=True)
    here.write_text("# as it was committed\n")
    return here


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A package at the top of a checkout with one commit."""
    root = tmp_path / "checkout"
    found = package(root)
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "first")
    return found


def linked(root: Path) -> Path:
    """In a linked worktree, on a branch of its own."""
    git(root, "worktree", "add", "--quiet", "-b", "other", "../linked")
    git(root / "../linked", "commit", "--quiet", "--allow-empty", "--message", "second")
    return (root / "../linked").resolve()


def submodule(root: Path) -> Path:
    above = root.parent / "above"
    above.mkdir()
    git(above, "init", "--quiet")
    git(above, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(root), "inner")
    return above / "inner"


def arranged(how: str, root: Path) -> Path:
    match how:
        case "a branch that was packed":
            git(root, "pack-refs", "--all")
        case "a detached head":
            git(root, "checkout", "--quiet", "--detach")
        case "a branch with a slash":
            git(root, "checkout", "--quiet", "-b", "a/b")
        case "a linked worktree":
            return linked(root)
        case "a linked worktree, packed":
            at = linked(root)
            git(root, "pack-refs", "--all")
            return at
        case "a submodule":
            return submodule(root)
    return root


@pytest.mark.parametrize(
    "how",
    [
        "a branch",
        "a branch that was packed",
        "a branch with a slash",
        "a detached head",
        "a linked worktree",
        "a linked worktree, packed",
        "a submodule",
    ],
)
def test_the_commit_is_the_one_that_git_names(here: Path, how: str):
    root = arranged(how, here.parents[1])
    assert commit(root / PACKAGE) == git(root, "rev-parse", "HEAD")


def test_a_repository_that_only_surrounds_the_package_is_not_taken_for_it(here: Path):
    installed = package(here.parents[1] / "venv/site-packages")
    assert commit(installed) is None


def test_a_repository_that_does_not_track_the_package_is_not_taken_for_it(here: Path):
    git(here.parents[1], "rm", "--quiet", "--cached", PACKAGE)
    assert here.is_file()
    assert commit(here) is None


def test_the_current_directory_says_nothing(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(here.parents[1])
    assert commit(package(tmp_path / "elsewhere")) is None


def test_a_link_to_the_package_leads_to_its_checkout(here: Path, tmp_path: Path):
    link = tmp_path / "site-packages/resilient"
    link.parent.mkdir()
    link.symlink_to(here.parent)
    assert commit(link / "version.py") == git(here.parents[1], "rev-parse", "HEAD")


@pytest.mark.parametrize("head", ["", "ref: refs/heads/none", "ref: ../../secret", "no commit at all", "\udcff"])
def test_a_repository_that_cannot_be_read_has_no_commit(here: Path, head: str):
    (here.parents[1] / ".git/HEAD").write_text(head, errors="surrogateescape")
    assert commit(here) is None


def test_a_repository_without_an_index_has_no_commit(here: Path):
    (here.parents[1] / ".git/index").unlink()
    assert commit(here) is None


def test_only_changes_to_tracked_files_make_it_dirty(here: Path):
    assert not dirty(here)
    (here.parent / "notes").write_text("")
    assert not dirty(here)
    here.write_text("# changed\n")
    assert dirty(here)


def test_a_repository_that_the_environment_names_is_another_matter(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here.write_text("# changed\n")
    other = package(tmp_path / "other").parents[1]
    git(other, "init", "--quiet")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert dirty(here)


def test_without_git_there_is_a_commit_and_no_word_on_changes(here: Path, monkeypatch: pytest.MonkeyPatch):
    found = git(here.parents[1], "rev-parse", "HEAD")
    here.write_text("# changed\n")
    monkeypatch.setenv("PATH", "")
    assert commit(here) == found
    assert not dirty(here)


def test_the_command_prints_version_and_commit():
    told = subprocess.run(
        [sys.executable, "-m", "resilient", "--version"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert told == f"resilient {described()}"
    suffix = "" if (found := commit()) is None else rf" \({found[:7]}(\+dirty)?\)"
    assert re.fullmatch(rf"resilient {re.escape(version('resilient'))}{suffix}", told)
