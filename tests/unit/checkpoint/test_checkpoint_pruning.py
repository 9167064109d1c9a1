"""`resilient ckpt prune`: what is superseded is deleted, after a question, and something sound is left."""

import shutil
import threading
from pathlib import Path

import pytest
from checkpoint_commands import flip, in_terminal, run
from checkpoint_state import local_shards

from checkpoint import newest_good, save, steps
from checkpoint.tools import pruning


def test_prune_asks_and_deletes(campaign: Path) -> None:
    root = campaign / "checkpoints"
    (root / "step-00000050.deleted-1").mkdir()
    (root / "step-00000050.deleted-1/file").write_bytes(bytes(2 << 20))
    listed = run("prune", campaign, "--keep-last", 1, "--dry-run")
    assert listed.exit_code == 0
    assert "step-00000050.deleted-1: 2.0 MiB" in listed.stdout
    assert "would delete 3 directories" in listed.stdout
    refused = run("prune", campaign, "--keep-last", 1)
    assert refused.exit_code == 1, "nobody has confirmed it"
    assert "--yes" in refused.stderr
    code, output = in_terminal("prune", campaign, "--keep-last", 1, answer=b"n\n")
    assert code == 1
    assert "nothing was deleted" in output
    assert steps(root) == [100, 200, 300]
    code, output = in_terminal("prune", campaign, "--keep-last", 1, "--keep-every", 100, answer=b"y\n")
    assert (code, steps(root)) == (0, [100, 200, 300])
    assert not list(root.glob("*.deleted-*"))
    assert run("prune", campaign, "--keep-last", 1, "--yes").exit_code == 0
    assert steps(root) == [300]
    assert steps(campaign / "node0") == [350, 360], "only the durable tier"
    again = run("prune", campaign, "--keep-last", 1)
    assert (again.exit_code, again.stdout) == (0, "nothing is superseded\n")


def test_prune_counts_what_a_campaign_that_goes_on_deletes_at_the_same_time(tmp_path: Path) -> None:
    (tmp_path / "step-00000002").mkdir()
    over = threading.Event()

    def campaign_goes_on() -> None:
        gone = tmp_path / "step-00000001.deleted-1"
        while not over.is_set():
            gone.mkdir()
            for number in range(40):
                (gone / f"c{number}").touch()
            shutil.rmtree(gone)

    thread = threading.Thread(target=campaign_goes_on)
    thread.start()
    try:
        for _ in range(1000):
            pruning.plans(tmp_path, 1, None)
    finally:
        over.set()
        thread.join()


def test_prune_counts_no_checkpoint_that_is_damaged(tmp_path: Path) -> None:
    for step in (200, 300, 350, 400, 500):
        save(tmp_path, step, local_shards(float(step)), {}, generation=1)
    for step in (400, 500):  # the campaign has passed them over, and gone on from 300
        flip(tmp_path / f"step-{step:08d}/model/weight/c.0.0", 5000)
    listed = run("prune", tmp_path, "--keep-last", 2, "--dry-run")
    assert "would delete 1 directories" in listed.stdout
    assert "steps that stay: 300, 350; and 400, 500, which cannot be used and do not count" in listed.stdout
    pruned = run("prune", tmp_path, "--keep-last", 2, "--yes")
    assert (pruned.exit_code, steps(tmp_path)) == (0, [300, 350, 400, 500])
    for step in (400, 500):
        assert f"resilient: {tmp_path}/step-{step:08d} is damaged: model/weight/c.0.0" in pruned.stderr
    assert newest_good(tmp_path) == tmp_path / "step-00000350"


def test_prune_reads_no_checkpoint_where_nothing_is_superseded(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, local_shards(), {}, generation=1)
    flip(tmp_path / "step-00000002/model/weight/c.0.0", 5000)
    pruned = run("prune", tmp_path, "--keep-last", 2, "--yes")
    assert (pruned.exit_code, pruned.stdout, pruned.stderr) == (0, "nothing is superseded\n", "")


def test_prune_deletes_no_more_than_was_agreed_to(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        save(tmp_path, step, local_shards(), {}, generation=1)
    (plan,) = pruning.plans(tmp_path, 2, None)
    save(tmp_path, 250, local_shards(), {}, generation=1)  # the campaign was rolled back
    pruning.carry_out(plan, 2, None)
    assert steps(tmp_path) == [200, 250, 300]


def test_prune_refuses_to_leave_only_damaged_ones(campaign: Path) -> None:
    for step in (100, 300):
        (campaign / f"checkpoints/step-{step:08d}/manifest.json").unlink()
    result = run("prune", campaign, "--keep-last", 1, "--yes")
    assert result.exit_code == 69
    assert "nothing was deleted, because none of its checkpoints is sound: 100, 200, 300" in result.stderr
    assert steps(campaign / "checkpoints") == [100, 200, 300]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--keep-last", "0"], "--keep-last 0: must be at least 1"),
        (["--keep-last", "1", "--keep-every", "-2"], "--keep-every -2: must be at least 1"),
    ],
)
def test_prune_refuses_numbers_that_keep_nothing(campaign: Path, arguments: list[str], says: str) -> None:
    refused = run("prune", campaign, *arguments, "--yes")
    assert (refused.exit_code, refused.output) == (78, f"resilient: {says}\n")
    assert run("prune", campaign / "checkpoints/step-00000100", "--keep-last", "1").exit_code == 78
    (campaign / "none").mkdir()
    assert run("prune", campaign / "none", "--keep-last", "1").exit_code == 69
