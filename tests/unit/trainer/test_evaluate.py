"""`trainer evaluate`: losses are those that the campaign reports and that `transformers` computes, bytes are those of the text."""

import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import soaked_after
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from trainer_ranks import trained, write_config, write_dataset
from typer.testing import CliRunner

import checkpoint
from trainer.cli import app
from trainer.data import tokenizer as tokenizers
from trainer.data.indexed import IndexedDataset
from trainer.evaluation.records import FILE, Records
from trainer.evaluation.sizes import token_sizes
from trainer.export import export
from trainer.restore import find, restore

PROSE = "the cat sat on the mat and the dog sat on the log; süße Möwen fliegen über das Meer. " * 20


def evaluated(*words: object, code: int = 0) -> list[dict[str, Any]]:
    found = CliRunner().invoke(app, ["evaluate", *map(str, words), "--json"])
    assert found.exit_code == code, found.output
    return [json.loads(line) for line in found.stdout.splitlines()]


def refused(*words: object, code: int = 78) -> str:
    found = CliRunner().invoke(app, ["evaluate", *map(str, words)])
    assert found.exit_code == code, found.output
    assert found.stderr.strip() and "Traceback" not in found.stderr
    return found.stderr


def with_tokenizer(prefix: Path, **options: Any) -> Path:
    dataset = write_dataset(prefix, vocabulary=300, **options)
    Path(f"{dataset}.tokenizer.json").write_text(tokenizers.train([PROSE], 300).to_str())
    return dataset


SHORT = {"steps": 4, "precision": "fp32", "eval_interval": 2, "eval_iters": 2}
KEPT = {"every_steps": 2, "tiers": [{"name": "durable", "path": "${run_dir}/checkpoints", "keep_last": 10}]}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4, of a blend of two corpora."""
    place = tmp_path_factory.mktemp("trained")
    blend = [{"path": str(with_tokenizer(place / name)), "weight": weight} for name, weight in (("walks", 3.0), ("strolls", 1.0))]
    config = write_config(place, place / "none", model={"vocab_size": 300}, data={"path": blend}, train=SHORT, checkpoint=KEPT)
    told = trained(config, 1)
    (place / "told.json").write_text(json.dumps(told))
    return place / "run"


def validations(told: list[dict[str, Any]]) -> dict[int, float]:
    return {line["step"]: line["val_loss"] for line in told if line["event"] == "validation"}


@pytest.mark.parametrize(
    "sections",
    soaked_after(
        1,
        [
            {"data": {"mask_documents": True, "mask_end_of_text": True, "end_of_text": 7}},
            {"data": {"mask_documents": True, "end_of_text": 7}, "model": {"position": "learned"}},
            {"model": {"position": "alibi", "norm": "layernorm", "mlp": "gelu", "tie_embeddings": True}},
            {"train": {"precision": "bf16"}},
        ],
    ),
    ids=str,
)
def test_the_loss_is_the_one_that_the_campaign_reports(tmp_path: Path, sections: dict[str, dict[str, Any]]):
    sections = {
        **sections,
        "train": {**SHORT, **sections.get("train", {})},
        "model": {"vocab_size": 300, **sections.get("model", {})},
    }
    config = write_config(tmp_path, with_tokenizer(tmp_path / "walks"), checkpoint=KEPT, **sections)
    told = validations(trained(config, 1))
    tolerance = 1e-3 if sections["train"]["precision"] == "bf16" else 1e-6
    for step in (2, 4):
        (found,) = evaluated(tmp_path / f"run/checkpoints/step-{step:08}", "--batch-size", 5)
        assert found["step"] == step and found["loss"] == pytest.approx(told[step], rel=tolerance)
        assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


def test_of_a_blend_each_corpus_is_told_and_all_of_them_together_are_what_the_campaign_reports(run_dir: Path):
    told = validations(json.loads((run_dir.parent / "told.json").read_text()))
    (found,) = evaluated(run_dir)
    assert (found["step"], found["text"]) == (4, "valid") and found["loss"] == pytest.approx(told[4], rel=1e-6)
    corpora = found["corpora"]
    assert {name: each["tokens"] for name, each in corpora.items()} == {"walks": 18 * 16, "strolls": 6 * 16}
    assert sum(each["tokens"] * each["loss"] for each in corpora.values()) == pytest.approx(found["tokens"] * found["loss"])
    shown = CliRunner().invoke(app, ["evaluate", str(run_dir)]).stdout.splitlines()
    assert shown[0].startswith(f"step 4, valid: loss {found['loss']:.4f}, perplexity ") and shown[0].endswith("384 tokens")
    assert [line.split(":")[0] for line in shown[1:]] == ["  walks", "  strolls"]


def test_other_data_is_read_whole_and_transformers_computes_the_same_loss(run_dir: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    other = with_tokenizer(tmp_path / "walks", documents=3)
    (found,) = evaluated(run_dir, "--data", other)
    model, config = restore(find(run_dir))
    export(model, config, tmp_path / "out", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True, dtype=torch.float32)
    tokens = np.asarray(IndexedDataset(other).tokens).astype(np.int64)
    count = (len(tokens) - 1) // 16
    windows = torch.from_numpy(np.stack([tokens[16 * number : 16 * number + 17] for number in range(count)]))
    with torch.no_grad():  # its own shift of the labels: of 17 tokens it predicts 16
        loss = theirs(windows, labels=windows).loss.item()
    assert found["tokens"] == 16 * count and found["loss"] == pytest.approx(loss, rel=1e-5)
    sizes = token_sizes(Path(f"{other}.tokenizer.json"), 300)
    assert sizes is not None
    assert found["bits_per_byte"] == pytest.approx(loss * 16 * count / math.log(2) / sizes[windows[:, 1:].numpy()].sum(), rel=1e-5)
    (two,) = evaluated(run_dir, "--data", other, "--data", run_dir.parent / "strolls", "--samples", 5)
    assert {name: each["tokens"] for name, each in two["corpora"].items()} == {"walks": 80, "strolls": 80}


@settings(max_examples=50, deadline=None)
@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_categories=("Cs",), exclude_characters="\u2581"), max_size=60))
def test_tokens_have_the_bytes_of_the_text_that_they_were_made_of(text: str, tmp_path_factory: pytest.TempPathFactory):
    for number, coder in enumerate((tokenizers.train([PROSE], 300), sentencepiece())):
        file = tmp_path_factory.getbasetemp() / f"coder{number}.json"
        file.write_text(coder.to_str())
        sizes = token_sizes(file, coder.get_vocab_size())
        assert sizes is not None and sizes[coder.encode(text, add_special_tokens=False).ids].sum() == len(text.encode())


def sentencepiece() -> Tokenizer:
    """As Llama's: spaces are written as a character of their own, and what has no token is written byte by byte."""
    coder = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    coder.normalizer = normalizers.Replace(" ", "\u2581")
    coder.decoder = decoders.ByteFallback()
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    coder.train_from_iterator([PROSE], trainers.BpeTrainer(vocab_size=400, special_tokens=pieces[:2], show_progress=False))
    known = json.loads(coder.to_str())
    vocab = {**{piece: number for number, piece in enumerate(pieces)}}
    for token in known["model"]["vocab"]:
        vocab.setdefault(token, len(vocab))
    known["model"]["vocab"] = vocab
    return Tokenizer.from_str(json.dumps(known))


def test_where_the_tokenizer_says_nothing_of_bytes_none_are_told(run_dir: Path, tmp_path: Path):
    file = tmp_path / "words.json"
    file.write_text(json.dumps({"model": {"vocab": {"cat": 0, "dog": 1}}}))
    (found,) = evaluated(run_dir, "--tokenizer", file)
    assert found["bits_per_byte"] is None
    assert "bits a byte" not in CliRunner().invoke(app, ["evaluate", str(run_dir), "--tokenizer", str(file)]).stdout
    file.write_text("{")
    assert "words.json is no tokenizer" in refused(run_dir, "--tokenizer", file)


@pytest.fixture
def copy(run_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_dir, tmp_path / "run"))


def test_each_checkpoint_of_a_campaign_is_evaluated_once_and_kept(copy: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert [found["step"] for found in evaluated(copy, "--every", 4)] == [4]
    assert [found["step"] for found in evaluated(copy, "--follow")] == [2], (
        "what was done is not done again; the last step is there"
    )
    assert evaluated(copy, "--every", 2) == []
    assert [found["step"] for found in evaluated(copy, "--every", 2, "--samples", 3)] == [2, 4], "that is another text"
    kept = list(Records(copy).read())
    assert [(record["step"], record["text"]) for record in kept] == [(4, "valid"), (2, "valid"), (2, "valid:3"), (4, "valid:3")]
    scalars = EventAccumulator(str(copy / "tensorboard/evaluation")).Reload()
    assert {entry.step for entry in scalars.Scalars("evaluation/loss")} == {2, 4}
    assert set(scalars.Tags()["scalars"]) >= {"evaluation/walks/perplexity", "evaluation/bits_per_byte"}


def test_following_ends_at_the_campaign_s_last_step_although_its_checkpoint_is_damaged(
    run_dir: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copy(run_dir.parent / "config.yaml", copy)  # as a supervisor writes it
    (copy / "checkpoints/step-00000004/zarr.json").write_text("{")
    monkeypatch.setattr(time, "sleep", lambda s: pytest.fail("it waits for a checkpoint that never comes"))
    assert "could not be evaluated: steps 4" in refused(copy, "--follow", code=69)
    assert [record["step"] for record in Records(copy).read()] == [2]


def test_following_each_so_many_steps_the_last_step_is_evaluated_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.yaml").write_text(f"run_dir: {tmp_path}\ntrain: {{steps: 5}}\n")
    for step in (2, 3, 4, 5):  # each is told to be damaged once its turn comes
        (tmp_path / f"checkpoints/step-{step:08}").mkdir(parents=True)
    monkeypatch.setattr(time, "sleep", lambda s: pytest.fail("it waits for a checkpoint that never comes"))
    assert "could not be evaluated: steps 2, 4, 5" in refused(tmp_path, "--every", 2, "--follow", code=69)
    assert "could not be evaluated: steps 2, 4\n" in refused(tmp_path, "--every", 2, code=69)


def test_following_ends_where_this_version_refuses_the_config_of_the_run_directory(copy: Path, monkeypatch: pytest.MonkeyPatch):
    (copy / "config.yaml").write_text("of_another_version: true\n")
    monkeypatch.setattr(time, "sleep", lambda s: pytest.fail("it waits for a checkpoint that never comes"))
    assert [found["step"] for found in evaluated(copy, "--follow")] == [2, 4]


def test_a_line_that_was_cut_off_counts_as_none_and_spoils_no_other(copy: Path):
    evaluated(copy, "--every", 4)
    file = copy / FILE
    file.write_bytes(file.read_bytes()[:-20])
    assert [found["step"] for found in evaluated(copy, "--every", 4)] == [4]
    assert [record["step"] for record in Records(copy).read()] == [4]


@pytest.mark.soak
def test_a_checkpoint_is_read_where_python_leaves_out_its_asserts(run_dir: Path):
    command = [sys.executable, "-OO", "-c", "from trainer.cli import main; main()", "evaluate", str(run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and json.loads(done.stdout)["step"] == 4, done.stderr


def test_a_loss_that_is_no_number_is_null_in_what_is_kept(tmp_path: Path):
    Records(tmp_path).add({"step": 3, "text": "valid", "loss": math.nan, "corpora": {"walks": {"loss": math.inf}}})
    assert json.loads((tmp_path / FILE).read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))["loss"] is None


def test_a_damaged_checkpoint_is_told_and_passed_by(copy: Path):
    for file in (copy / "checkpoints/step-00000002").rglob("*"):
        if file.is_file() and file.stat().st_size > 4000:
            file.write_bytes(file.read_bytes()[:-100])
    found = CliRunner().invoke(app, ["evaluate", str(copy), "--every", "2"])
    assert found.exit_code == 69 and found.stdout.startswith("step 4, valid: loss")
    assert "step-00000002 holds no model" in found.stderr and "could not be evaluated: steps 2" in found.stderr


def test_what_cannot_be_evaluated_is_refused_in_a_sentence(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    newest = find(run_dir)
    assert "has no checkpoint" in refused(tmp_path, code=69)
    assert "has no checkpoint" in refused(tmp_path / "none", code=69)
    assert "is not there" in refused(tmp_path / "step-00000007", code=69)
    assert "is no run directory" in refused(newest, "--follow")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.yaml").write_text("of_another_version: true\n")
    assert "of_another_version" in refused(tmp_path / "other", "--every", 5, code=69)
    assert "is no run directory" in refused(tmp_path / "none", "--every", 5, code=69)
    assert "no checkpoint of a step that is a multiple of 7" in refused(run_dir, "--every", 7, code=69)
    assert "split [9, 1, 0] leaves nothing for test" in refused(run_dir, "--split", "test")
    assert str(tmp_path / "none") in refused(run_dir, "--data", tmp_path / "none")
    strange = write_dataset(tmp_path / "strange", vocabulary=400)
    assert "the vocabulary has only" in refused(run_dir, "--data", strange)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "allowed: auto, cpu" in refused(run_dir, "--device", "cuda")


def test_data_that_was_there_and_cannot_be_read_now_is_no_error_of_what_was_asked_for(run_dir: Path, tmp_path: Path):
    (tmp_path / "walks.idx").mkdir()  # reading it fails, as on a disk with errors
    assert f"{tmp_path / 'walks.idx'} cannot be read" in refused(run_dir, "--data", tmp_path / "walks", code=69)
    own = run_dir.parent / "walks.idx"
    away = own.rename(tmp_path / "away.idx")
    try:
        assert f"there is no {own}" in refused(run_dir, code=69)
        assert f"there is no {own}" in refused(run_dir, "--data", own.with_suffix(""))  # named just now
    finally:
        away.rename(own)
    spoilt = "/proc/self/mem"  # its first bytes are an input/output error
    for file, code in ((spoilt, 69), (tmp_path / "none.json", 78)):
        assert str(file) in refused(run_dir, "--tokenizer", file, code=code)
        found = CliRunner().invoke(app, ["generate", str(run_dir), "the", "--tokenizer", str(file)])
        assert found.exit_code == code and found.stderr.count("\n") == 1, found.output


def test_a_checkpoint_that_is_deleted_before_it_is_read_is_passed_by(copy: Path, monkeypatch: pytest.MonkeyPatch):
    first = copy / "checkpoints/step-00000002"
    listed = checkpoint.steps(first.parent)
    monkeypatch.setattr(checkpoint, "steps", lambda root: listed if root == first.parent else [])
    shutil.rmtree(first)
    assert [found["step"] for found in evaluated(copy, "--every", 2)] == [4]
