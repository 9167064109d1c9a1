"""A campaign stays the campaign it was: changes between two jobs are refused, or told and recorded; forks go their own way."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zarr
from campaigns import ROOT, Campaign
from shared import once
from soak import soaked

STEPS = 20
EVERY = 5
MIDDLE = 10


def text(seed: int) -> str:
    chance = random.Random(seed)
    words = ["".join(chance.choices("abcdefghij", k=chance.randrange(2, 8))) for _ in range(200)]
    return "\n<|endoftext|>\n".join(" ".join(chance.choices(words, k=400)) for _ in range(40))


def make(directory: Path, **changes: Any) -> Campaign:
    """A campaign of the real trainer on a text of its own."""
    if not (directory / "a.txt").exists():
        (directory / "a.txt").write_text(text(1))
    config: dict[str, Any] = {
        "cluster": {"device": "cpu", "threads_per_proc": 1},
        "model": {"layers": 1, "hidden": 32, "heads": 2, "seq_len": 32},
        "data": {"text": [str(directory / "a.txt")], "tokenizer": {"vocab_size": 300}},
        "train": {"steps": STEPS, "global_batch_size": 4, "micro_batch_size": 2, "precision": "fp32", "eval_interval": 0},
        "optimizer": {"warmup_samples": 8, "decay_samples": 400},  # so that the target does not change the schedule
        "checkpoint": {"every_steps": EVERY, "tiers": [{"name": "durable", "path": "${run_dir}/checkpoints", "keep_last": 9}]},
        **changes,
    }
    return Campaign(directory, **config)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    """A campaign at its target; tests leave it as it is."""

    def run_it(directory: Path) -> None:
        run = make(directory)
        assert run.run(f"train.steps={MIDDLE}") == 0, (
            run.output + run.logs()
        )  # the last step has a checkpoint however busy the disk is
        assert run.run() == 0, run.output + run.logs()

    return make(once(tmp_path_factory, "finished", run_it))


@pytest.fixture
def branch(finished: Campaign, tmp_path: Path) -> Iterator[Campaign]:
    """A campaign at its middle step, for tests to do with as they like."""
    resilient("fork", f"{finished.run_dir}@{MIDDLE}", str(tmp_path / "run"))
    config = tmp_path / "config.yaml"
    run = Campaign(tmp_path)
    config.write_text((run.run_dir / "config.yaml").read_text())
    yield run
    if run.process is not None and run.process.poll() is None:
        run.kill()


def resilient(*words: str, code: int = 0) -> str:
    """What a command prints."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "1000"}  # no path is wrapped
    done = subprocess.run([sys.executable, "-m", "resilient", *words], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def contents(directory: Path) -> dict[str, bytes]:
    """All that a campaign is, but for what belongs to one driver."""
    files = (path for path in directory.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def losses(run_dir: Path, after: int = 0) -> dict[int, str]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: repr(line["loss"]) for line in lines if line["step"] > after}


@pytest.mark.parametrize(
    "setting",
    [
        "seed=7",
        soaked("data.split=[900, 99, 1]"),
        soaked("model.rope_theta=500000"),
        soaked("model.position=alibi"),
        soaked("model.norm_eps=0.1"),
        soaked("optimizer.beta2=0.5"),
        soaked("data.mask_documents=true"),
    ],
)
def test_what_makes_another_campaign_is_refused_before_anything_starts(finished: Campaign, setting: str):
    before, key = contents(finished.run_dir), setting.partition("=")[0]
    said = resilient("run", str(finished.path), "train.steps=25", setting, code=78)
    assert said.startswith(f"command line: {key} = ") and f"--accept {key}" in said and "resilient fork" in said
    assert contents(finished.run_dir) == before


def test_a_chain_is_not_even_submitted_with_another_seed(finished: Campaign):
    said = resilient("submit", str(finished.path), "seed=7", code=78)  # and not 69, for want of Slurm
    assert "seed = 7" in said


def test_a_line_of_the_config_that_was_changed_is_named(finished: Campaign, tmp_path: Path):
    other = tmp_path / "other.yaml"
    other.write_text(finished.path.read_text().replace("vocab_size: 300", "vocab_size: 600"))
    line = 1 + next(number for number, each in enumerate(other.read_text().splitlines()) if "vocab_size" in each)
    assert resilient("run", str(other), code=78).startswith(f"{other}:{line}: data.tokenizer.vocab_size = 600: ")


def test_a_text_that_was_changed_is_refused_and_a_fork_with_the_same_again_has_its_parents_losses_to_the_bit(
    branch: Campaign, finished: Campaign
):
    original, parent = finished.directory / "a.txt", contents(finished.run_dir)
    before, data = original.read_text(), contents(branch.run_dir / "data")
    try:
        original.write_text(text(2))
        assert branch.run() == 78
        assert "data.text" in branch.output and contents(branch.run_dir / "data") == data
    finally:
        original.write_text(before)  # touched, and the same again
    assert branch.run() == 0, branch.output + branch.logs()
    assert contents(branch.run_dir / "data") == data
    assert losses(branch.run_dir) == losses(finished.run_dir, after=MIDDLE) and len(losses(branch.run_dir)) == STEPS - MIDDLE
    assert contents(finished.run_dir) == parent
    found = json.loads(resilient("diff", str(finished.run_dir), str(branch.run_dir), "--json"))
    assert found["identity"] == [] and found["lineage"]["b"]["step"] == MIDDLE
    assert (found["losses"]["common"], found["losses"]["different"]) == (STEPS - MIDDLE, 0)
    assert "the same to the bit" in resilient("diff", str(finished.run_dir), str(branch.run_dir))
    assert {"checkpoint.tiers", "name", "run_dir"} >= {each["key"] for each in found["config"]}


@pytest.mark.soak
def test_other_text_that_is_accepted_is_prepared_beside_what_was_trained_on(branch: Campaign, finished: Campaign):
    other = branch.directory / "b.txt"
    other.write_text(text(2))
    before = contents(branch.run_dir / "data")
    words = [f"data.text=[{other}]", "--accept", "data.text"]
    assert branch.run(*words) == 0, branch.output + branch.logs()
    after = contents(branch.run_dir / "data")
    assert before.items() <= after.items() and len(after) == 2 * len(before) + 1
    assert losses(branch.run_dir) != losses(finished.run_dir, after=MIDDLE)
    # From now on the other text is the campaign's, and the first one is refused.
    assert branch.run(words[0]) == 0 and "has reached its target" in branch.output
    assert branch.run() == 78


def test_what_is_accepted_and_what_is_only_told_stands_in_ledger_status_and_checkpoint(branch: Campaign):
    words = ("model.norm_eps=0.1", "--accept", "model.norm_eps")
    assert branch.run("train.global_batch_size=8", *words) == 0, branch.output + branch.logs()
    assert "changed: model.norm_eps: 1e-05 → 0.1 (accepted)" in branch.output
    assert "changed: train.global_batch_size: 4 → 8\n" in branch.output
    changed = {each["key"]: (each["from"], each["to"], each["accepted"]) for each in branch.events("config_changed")}
    assert changed["model.norm_eps"] == (1e-5, 0.1, True)
    assert changed["train.global_batch_size"] == (4, 8, False)
    names = [each["event"] for each in branch.events()]
    assert names[:2] == ["forked", "run_started"] and "config_changed" in names[2:]
    said = json.loads(resilient("status", str(branch.run_dir), "--json"))
    assert [(each["key"], each["new"], each["step"]) for each in said["accepted"]] == [("model.norm_eps", 0.1, MIDDLE)]
    assert "model.norm_eps 1e-05 → 0.1 at step 10" in resilient("status", str(branch.run_dir))
    state = zarr.open_group(branch.run_dir / "checkpoints" / f"step-{STEPS:08}", mode="r").attrs["resilient"]["state"]
    assert [each["key"] for each in state["identity"]["accepted"]] == ["model.norm_eps"]
    assert state["identity"]["keys"]["model.norm_eps"] == 0.1


@pytest.mark.soak
def test_a_run_directory_of_an_earlier_version_goes_on_and_is_guarded_from_then_on(branch: Campaign, finished: Campaign):
    (branch.run_dir / "identity.json").unlink()
    for step in (branch.run_dir / "checkpoints").glob("step-*/zarr.json"):
        assert "identity" in step.read_text()  # a fork's checkpoint has one, too: here it takes the place of the file
    assert branch.run("seed=7") == 78
    assert branch.run() == 0, branch.output + branch.logs()
    assert losses(branch.run_dir) == losses(finished.run_dir, after=MIDDLE)


@pytest.mark.soak
def test_parent_and_fork_with_another_learning_rate_go_on_at_the_same_time(branch: Campaign, finished: Campaign, tmp_path: Path):
    (tmp_path / "child").mkdir()
    child = Campaign(tmp_path / "child")
    said = resilient("fork", str(branch.run_dir), str(child.run_dir), "optimizer.lr=0.05")
    assert "optimizer.lr: 0.001 → 0.05" in said
    shutil.copy(child.run_dir / "config.yaml", child.path)
    branch.start("checkpoint.tiers.0.keep_last=1")
    child.start()
    assert (branch.wait(), child.wait()) == (0, 0), branch.output + child.output
    alone = losses(finished.run_dir, after=MIDDLE)
    assert losses(branch.run_dir) == alone  # the parent is as if there were no fork
    assert losses(child.run_dir).keys() == alone.keys() and losses(child.run_dir) != alone
    # The parent has pruned the checkpoint at which the fork began; the fork has it, whole.
    assert not (branch.run_dir / "checkpoints" / f"step-{MIDDLE:08}").exists()
    resilient("ckpt", "verify", str(child.run_dir / "checkpoints" / f"step-{MIDDLE:08}"))
    (forked,) = child.events("forked")
    assert (forked["parent"], forked["step"]) == (str(branch.run_dir), MIDDLE)
    assert forked["changes"] == [{"key": "optimizer.lr", "from": 0.001, "to": 0.05}]
    assert f"{branch.run_dir} at step {MIDDLE}" in resilient("status", str(child.run_dir))
    found = json.loads(resilient("diff", str(branch.run_dir), str(child.run_dir), "--json"))
    assert [(each["key"], each["a"], each["b"]) for each in found["identity"]] == [("optimizer.lr", 0.001, 0.05)]
    # The first step is computed with the weights of both; from the second on they part.
    assert found["losses"]["first_different"] == MIDDLE + 2
