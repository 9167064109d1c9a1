"""Only the newest generation publishes, and only what is superseded is deleted."""

import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from checkpoint_processes import Child
from checkpoint_state import local_shards
from typer.testing import CliRunner

from checkpoint import CheckpointError, StaleGeneration, points, prune, save, steps, verify
from checkpoint.cli import app
from checkpoint.fence import guard, newest_generation, raise_fence
from checkpoint.pruning import remove

PRUNE = "import sys; from pathlib import Path; from checkpoint import prune; prune(Path(sys.argv[1]), keep_last=1)"


def test_the_fence_never_sinks(root: Path) -> None:
    assert newest_generation(root) is None
    assert [raise_fence(root, generation) for generation in (0, 3, 2, 3, 9)] == [0, 3, 3, 3, 9]
    assert newest_generation(root) == 9


def test_a_stale_generation_cannot_save(root: Path) -> None:
    save(root, 1, local_shards(), {}, generation=4)
    raise_fence(root, 5)
    with pytest.raises(StaleGeneration, match=r"generation 4 may not publish in .*generation 5 has taken over"):
        save(root, 2, local_shards(), {}, generation=4)
    assert steps(root) == [1]
    save(root, 2, local_shards(), {}, generation=5)
    assert steps(root) == [1, 2]


def raise_it(root: Path) -> None:
    raise_fence(root, 1)


def test_a_generation_that_becomes_stale_while_it_writes_cannot_commit(root: Path) -> None:
    points.arm("manifest_durable", lambda: raise_it(root))
    with pytest.raises(StaleGeneration):
        save(root, 1, local_shards(), {}, generation=0)
    assert steps(root) == []
    assert not list(root.glob("step-*")), "its unfinished directory is left"


def commit_until_stale(pipe: Connection, root: Path) -> None:
    step = 0
    try:
        while True:
            step += 1
            save(root, step, local_shards(), {}, generation=0)
            pipe.send(step)
    except StaleGeneration:
        pipe.send("stale")


def test_nothing_of_an_older_generation_appears_after_the_fence_was_raised(root: Path) -> None:
    with Child(commit_until_stale, root) as child:
        child.receive()
        raise_fence(root, 1)
        committed = steps(root)
        while child.receive() != "stale":
            pass
        assert child.end() == 0
    assert steps(root) == committed


def stop_inside_the_guard(pipe: Connection, root: Path) -> None:
    def wait() -> None:
        pipe.send("inside")
        pipe.recv()

    points.arm("fence_checked", wait)
    save(root, 1, local_shards(), {}, generation=0)


def test_the_fence_waits_for_a_commit_that_is_under_way(root: Path) -> None:
    with Child(stop_inside_the_guard, root) as child:
        assert child.receive() == "inside"
        with pytest.raises(TimeoutError, match="a process that is publishing"):
            raise_fence(root, 1, timeout_s=0)
        assert newest_generation(root) is None
        child.pipe.send("go on")
        assert raise_fence(root, 1) == 1
        assert steps(root) == [1], "the commit that the fence had to wait for"


def test_commits_of_one_generation_do_not_wait_for_each_other(root: Path) -> None:
    raise_fence(root, 1)
    with guard(root, 1), guard(root, 1):
        pass


def test_a_fence_that_holds_no_number_stops_everyone(root: Path) -> None:
    raise_fence(root, 1)
    (root / ".fence").write_text("")
    with pytest.raises(CheckpointError, match="should hold the number of a generation"):
        save(root, 1, local_shards(), {}, generation=9)
    with pytest.raises(CheckpointError, match="should hold the number"):
        raise_fence(root, 9)


def test_raising_the_fence_needs_no_heavy_import(root: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from checkpoint.fence import raise_fence\n"
        "raise_fence(Path(sys.argv[1]), 3)\n"
        "assert not {'torch', 'zarr', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, root], check=True)
    assert newest_generation(root) == 3


def test_a_newer_generation_clears_away_what_older_ones_left(root: Path) -> None:
    root.mkdir()
    for name in ("step-00000007.g0.tmp", "step-00000009.g1.tmp", "step-00000007.g2.tmp", "step-00000009.g3.tmp", "mine.tmp"):
        (root / name / "model").mkdir(parents=True)
    save(root, 1, local_shards(), {}, generation=2)
    left = {path.name for path in root.iterdir() if path.is_dir()}
    assert left == {"step-00000001", "step-00000007.g2.tmp", "step-00000009.g3.tmp", "mine.tmp"}


def test_saving_keeps_the_last_ones(root: Path) -> None:
    for step in range(1, 6):
        save(root, step, local_shards(), {}, generation=0, keep_last=2)
    assert steps(root) == [4, 5]
    assert {path.name for path in root.iterdir() if path.is_dir()} == {"step-00000004", "step-00000005"}
    verify(root / "step-00000004")


def test_saving_after_a_roll_back_keeps_what_it_has_written(root: Path) -> None:
    """Steps 10 and 20 are there and 20 is damaged; what began again at 10 saves 15."""
    for step in (10, 20):
        save(root, step, local_shards(), {}, generation=0)
    (root / "step-00000020/manifest.json").unlink()
    save(root, 15, local_shards(), {}, generation=1, keep_last=1)
    assert steps(root) == [15, 20]


def test_pruning_keeps_the_newest_the_multiples_and_what_was_set_aside(root: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        save(root, step, local_shards(), {}, generation=0)
    (root / "step-00000010.damaged-1").mkdir()
    assert prune(root, keep_last=1, keep_every=20) == [10, 30]
    assert steps(root) == [20, 40, 50]
    assert (root / "step-00000010.damaged-1").is_dir()
    assert prune(root, keep_last=1) == [20, 40]
    with pytest.raises(ValueError, match="at least 1"):
        prune(root, keep_last=0)
    assert steps(root) == [50]


def test_pruning_a_link_to_a_checkpoint_deletes_the_link_alone(root: Path, tmp_path: Path) -> None:
    for step in (1, 2):
        save(root, step, local_shards(), {}, generation=0)
    elsewhere = tmp_path / "elsewhere"
    (root / "step-00000001").rename(elsewhere)
    (root / "step-00000001").symlink_to(elsewhere)
    assert prune(root, keep_last=1) == [1]
    assert [path.name for path in root.glob("step-*")] == ["step-00000002"]
    assert (elsewhere / "manifest.json").is_file()


def test_two_that_prune_at_the_same_time_do_each_others_work(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20, 30, 40):
        save(root, step, local_shards(), {}, generation=0)
    unlink = os.unlink

    def late(path: str, *, dir_fd: int | None = None) -> None:
        """Somebody else has deleted every file a moment ago."""
        unlink(path, dir_fd=dir_fd)
        unlink(path, dir_fd=dir_fd)

    def first(name: str) -> None:
        """Somebody else prunes when this one has renamed its first checkpoint, and is done when it goes on."""
        if name == "pruned_by_name" and len(steps(root)) > 1:
            monkeypatch.setattr(points, "reached", lambda name: None)
            other = subprocess.run([sys.executable, "-c", PRUNE, str(root)], check=False, capture_output=True, text=True)
            assert (other.returncode, other.stderr) == (0, "")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", late)
        remove(root / "step-00000010")
    assert not (root / "step-00000010").exists()
    monkeypatch.setattr(points, "reached", first)
    assert prune(root, keep_last=1) == [20, 30]
    assert steps(root) == [40] and not list(root.glob("*.deleted-*"))
    remove(root / "step-00000030.deleted-1")
    assert not caplog.records


def test_a_stale_generation_cannot_prune(root: Path) -> None:
    for step in (1, 2):
        save(root, step, local_shards(), {}, generation=0)
    raise_fence(root, 1)
    with pytest.raises(StaleGeneration):
        prune(root, keep_last=1, generation=0)
    assert steps(root) == [1, 2]


def test_a_step_or_generation_without_a_name_is_refused(root: Path) -> None:
    for step, generation in ((-1, 0), (100_000_000, 0), (1, -1)):
        with pytest.raises(CheckpointError, match="is a number from 0"):
            save(root, step, local_shards(), {}, generation=generation)


def test_the_command_line_lists_and_verifies(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in (100, 200):
        save(root, step, local_shards(), {}, generation=3)
    runner = CliRunner()
    verified = runner.invoke(app, ["verify", str(tmp_path)])
    assert verified.exit_code == 0
    assert verified.output.count(": good") == 2

    (root / "step-00000200/manifest.json").unlink()
    listed = runner.invoke(app, ["ls", str(root)])
    assert listed.exit_code == 0
    lines = listed.output.splitlines()
    assert lines[1].split()[:3] == ["durable", "100", "3"]
    assert "damaged: manifest.json is missing" in lines[2]

    verified = runner.invoke(app, ["verify", str(root / "step-00000200")])
    assert verified.exit_code == 1
    assert "manifest.json is missing" in verified.output
    assert "Traceback" not in verified.output


@pytest.mark.parametrize("words", [("ls",), ("verify",), ("flush",), ("prune", "--keep-last", "1")], ids=lambda words: words[0])
@pytest.mark.parametrize(("place", "told"), [("nowhere", "is not a directory"), (".", "there is no ")])
def test_the_command_line_says_when_there_is_nothing(tmp_path: Path, words: Sequence[str], place: str, told: str) -> None:
    result = CliRunner().invoke(app, [*words, str(tmp_path / place)])
    assert result.exit_code == 69
    assert told in result.output
