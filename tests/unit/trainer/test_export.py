"""What leaves this project: exports that `transformers` computes the same with, and text."""

import errno
import json
import shutil
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import yaml
from mounts import needs_root, small_disk
from trainer_ranks import trained, write_config, write_dataset
from typer.testing import CliRunner

import trainer
from checkpoint import CheckpointMismatch, DamagedCheckpoint, local_shard_of, save
from checkpoint.tools import aside
from checkpoint.tools.export import EXPORTERS
from resilient.worker import Config, load_config
from trainer.cli import app
from trainer.data import tokenizer as tokenizers
from trainer.export import ExportError, export, export_checkpoint, layout_of
from trainer.generate import generate, sample
from trainer.model import GPT
from trainer.restore import RestoreError, find, restore
from trainer.shape import shape_of
from trainer.weights import initialize

LLAMA = {"layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "seq_len": 24, "init_std": 0.2}
GPT2 = {**LLAMA, "kv_heads": 4, "position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True}

EXPORTED = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}

MODELS = [
    LLAMA,
    {**LLAMA, "tie_embeddings": True, "rope_theta": 500.0, "kv_heads": 4},
    {**LLAMA, "mup_base_hidden": 8},
    GPT2,
    {**GPT2, "bias": False, "tie_embeddings": True},
    {**GPT2, "mup_base_hidden": 8, "tie_embeddings": True},
    {**LLAMA, "bias": True},
    {**GPT2, "position": "rope"},
    {**GPT2, "position": "rope", "bias": False, "tie_embeddings": True, "mup_base_hidden": 8},
]


def made(model: dict[str, object]) -> tuple[GPT, Config]:
    """A model in which every parameter matters, also those that start as 0 or 1."""
    config = Config.model_validate({"model": model})
    built = GPT(shape_of(config, 61)).eval()
    initialize(built, 1)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() == 1:
                parameter += torch.empty_like(parameter).normal_(0, 0.3, generator=random)
    return built, config


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_transformers_computes_the_same_logits_from_an_export(tmp_path: Path, model):
    from transformers import AutoModelForCausalLM

    built, config = made(model)
    kind = export(built, config, tmp_path / "out", dtype=torch.float32)
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", local_files_only=True, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert (
        type(theirs).__name__
        == {
            "llama": "LlamaForCausalLM",
            "gpt2": "GPT2LMHeadModel",
            "gpt_neox": "GPTNeoXForCausalLM",
        }[kind]
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokens = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, built(tokens), rtol=1e-4, atol=1e-4)


@needs_root
@pytest.mark.parametrize("tokenizer_fits", [True, False])
def test_an_export_to_a_full_disk_is_told_with_its_place(tmp_path: Path, tokenizer_fits: bool):
    built, config = made(LLAMA)
    coder = tmp_path / "tokenizer.json"
    coder.write_text(json.dumps({"model": {"vocab": {"a": 0}}, "more": "x" * (1 if tokenizer_fits else 2 << 20)}))
    with small_disk(tmp_path / "disk", 16 << 10 if tokenizer_fits else 1 << 20) as disk:
        with pytest.raises(OSError, match="No space left") as caught:
            export(built, config, disk / "out", tokenizer=coder)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, f"{disk}/out")
        assert list(disk.iterdir()) == []


def test_the_command_tells_in_a_line_that_nothing_can_be_written(run_dir: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(app, ["export", str(run_dir), str(tmp_path / "file/hf")])
    assert (refused.exit_code, refused.stderr.count("\n")) == (69, 1)
    assert f"cannot write {tmp_path}/file" in refused.stderr and "Not a directory" in refused.stderr


def test_what_is_exported_is_known_to_be_an_export():
    assert EXPORTED == aside.HUGGING_FACE


def test_a_model_that_fits_no_layout_is_told_why(tmp_path: Path):
    with pytest.raises(ExportError, match=r"llama does not fit: .* position alibi, not rope; gpt2 does not fit: .*rmsnorm"):
        layout_of(shape_of(Config.model_validate({"model": {"position": "alibi"}}), 64))
    built, config = made(LLAMA)
    (tmp_path / "out").mkdir()
    with pytest.raises(ExportError, match="is there already"):
        export(built, config, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a tiny model with a real tokenizer; on 2 × 2 × 1 ranks, so that the checkpoint was written in parts."""
    place = tmp_path_factory.mktemp("trained")
    dataset = write_dataset(place / "walks", vocabulary=300)
    coder = tokenizers.train(["the cat sat on the mat and the dog sat on the log " * 40], 300)
    (place / "walks.tokenizer.json").write_text(coder.to_str())
    model = {"model": {"vocab_size": 300, "tie_embeddings": True}, "train": {"steps": 4}}
    trained(write_config(place, dataset, **model), 4, "parallel.tp=2", "parallel.pp=2")
    return place / "run"


def test_a_checkpoint_of_any_layout_is_restored_whole(run_dir: Path):
    import zarr

    model, config = restore(find(run_dir))
    assert config.train.steps == 4
    stored = zarr.open_group(run_dir / "checkpoints" / "step-00000004", mode="r")
    assert torch.equal(model.embedding.weight, torch.from_numpy(stored["model/embedding.weight"][...]))
    assert torch.equal(model.blocks["1"].mlp.up.weight, torch.from_numpy(stored["model/blocks.mlp.up.weight"][1]))


def test_a_copy_of_a_run_directory_is_not_taken_for_the_run_that_was_copied(run_dir: Path, tmp_path: Path):
    (tmp_path / "copy").mkdir()
    copied = Path(shutil.copy(run_dir.parent / "config.yaml", tmp_path / "copy"))
    assert find(run_dir).is_relative_to(load_config(copied, []).run_dir)
    with pytest.raises(RestoreError, match="has no checkpoint"):
        find(tmp_path / "copy")


def test_checkpoints_that_lie_outside_of_the_run_directory_are_found(run_dir: Path, tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere/step-00000004").mkdir(parents=True)
    config = yaml.safe_load((run_dir.parent / "config.yaml").read_text())
    config["checkpoint"]["tiers"] = [{"name": "durable", "path": str(tmp_path / "elsewhere")}]
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(config))
    assert find(tmp_path / "run") == tmp_path / "elsewhere/step-00000004"


def test_what_is_no_checkpoint_is_refused(tmp_path: Path):
    for path in (tmp_path, tmp_path / "step-00000001", tmp_path / "none"):
        with pytest.raises(RestoreError):
            find(path)
    named = tmp_path / "step-decay"  # a run directory may be called so
    (named / "checkpoints/step-00000004").mkdir(parents=True)
    assert find(named) == named / "checkpoints/step-00000004"
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(RestoreError, match="holds no model"):
        restore(find(tmp_path))


def test_the_same_seed_writes_the_same_text(run_dir: Path):
    def text(*options: str) -> str:
        found = CliRunner().invoke(app, ["generate", str(run_dir), "the cat", "--tokens", "12", *options])
        assert found.exit_code == 0, found.output
        return found.stdout

    assert text().startswith("the cat")
    assert text("--seed", "1") == text("--seed", "1")
    assert len({text("--seed", str(seed)) for seed in range(4)}) > 1
    assert text("--temperature", "0") == text("--temperature", "0", "--seed", "9")


def test_a_prompt_that_is_not_utf_8_is_refused_in_a_line(run_dir: Path):
    refused = CliRunner().invoke(app, ["generate", str(run_dir), "the\udcff"])  # as Python has the byte 0xff of a command line
    assert (refused.exit_code, refused.stderr) == (78, "the prompt has bytes that are not UTF-8 text\n")


def test_the_command_exports_and_refuses(run_dir: Path, tmp_path: Path):
    place = tmp_path / "hf"
    found = CliRunner().invoke(app, ["export", str(run_dir), str(place), "--dtype", "fp32"])
    assert found.exit_code == 0, found.output
    assert {path.name for path in place.iterdir()} == EXPORTED
    again = CliRunner().invoke(app, ["export", str(run_dir), str(place)])
    assert (again.exit_code, again.stderr.count("\n")) == (78, 1)
    missing = ["export", str(run_dir), str(tmp_path / "y"), "--tokenizer", str(tmp_path / "none.json")]
    without = (["generate", str(tmp_path), "x"], ["export", str(tmp_path), str(tmp_path / "y")])
    for arguments, code in ((without[0], 69), (without[1], 69), (missing, 78)):
        refused = CliRunner().invoke(app, arguments)
        assert (refused.exit_code, refused.stderr.count("\n")) == (code, 1)


def test_the_exporter_for_checkpoints_writes_what_the_command_writes(run_dir: Path, tmp_path: Path):
    asked = CliRunner().invoke(app, ["export", str(run_dir), str(tmp_path / "command"), "--dtype", "fp32"])
    assert asked.exit_code == 0, asked.output
    export_checkpoint(find(run_dir), tmp_path / "exporter", float32=True)
    assert {path.name for path in (tmp_path / "exporter").iterdir()} == EXPORTED
    for path in (tmp_path / "exporter").iterdir():
        assert path.read_bytes() == (tmp_path / "command" / path.name).read_bytes()
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(DamagedCheckpoint):
        export_checkpoint(tmp_path / "step-00000001", tmp_path / "none")
    save(tmp_path, 2, [local_shard_of("model/x", torch.zeros(2))], {}, generation=0)
    with pytest.raises(CheckpointMismatch, match="holds no model"):
        export_checkpoint(tmp_path / "step-00000002", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    points = tomllib.loads((Path(trainer.__file__).parents[1] / "pyproject.toml").read_text())["project"]["entry-points"]
    assert EntryPoint("hf", points[EXPORTERS]["hf"], EXPORTERS).load() is export_checkpoint


def test_transformers_needs_nothing_else_to_write_text(run_dir: Path, tmp_path: Path):
    from transformers import AutoTokenizer, pipeline

    export_checkpoint(find(run_dir), tmp_path / "hf", float32=True)
    coder = AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert coder.decode(coder("the cat sat")["input_ids"]) == "the cat sat"
    assert coder.eos_token == "<|endoftext|>"
    assert coder.model_max_length == 16
    writer = pipeline("text-generation", model=str(tmp_path / "hf"), device="cpu")
    (text,) = writer("the cat", max_new_tokens=8, do_sample=False)
    assert text["generated_text"].startswith("the cat")


def test_sampling_keeps_to_the_likeliest_that_it_is_told():
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0])

    def drawn(**options) -> set[int]:
        settings = {"temperature": 1.0, "top_k": None, "top_p": None, **options}
        random = torch.Generator().manual_seed(0)
        return {sample(logits, generator=random, **settings) for _ in range(200)}

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {1, 2}
    assert drawn(top_p=0.5) == {1}
    assert drawn(top_p=0.7) == {1, 2}
    assert drawn(temperature=0.0) == {1}
    assert drawn(top_p=0.0) == drawn(temperature=1e-39) == {1}


def test_the_context_is_cut_and_padding_is_never_drawn():
    built, _ = made(LLAMA)
    prompt = list(range(40))  # longer than the 24 that the model sees
    found = list(generate(built, prompt, 5, vocabulary=3, temperature=5.0))
    assert len(found) == 5
    assert max(found) < 3
    first = next(generate(built, prompt, 1, vocabulary=61, temperature=0))
    assert next(generate(built, prompt[-24:], 1, vocabulary=61, temperature=0)) == first
    assert list(generate(built, prompt, 9, vocabulary=61, temperature=0, stop=first)) == []
