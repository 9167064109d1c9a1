"""What comes from elsewhere: models that `transformers` made, as checkpoints that training begins from."""

import json
import tomllib
import weakref
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from soak import soaked
from trainer_ranks import VOCABULARY, steps, trained, write_config, write_dataset
from typer.testing import CliRunner

import checkpoint
import trainer
from checkpoint import CheckpointError, CheckpointMismatch
from checkpoint.cli import app
from checkpoint.tools.importing import IMPORTERS
from resilient.worker import load_config
from trainer.conversion.beginning import MODEL_FILE
from trainer.conversion.families import ImportRefused, described
from trainer.conversion.importing import import_checkpoint
from trainer.conversion.megatron import import_megatron
from trainer.export import export
from trainer.restore import find, restore
from trainer.state import WEIGHTS_ONLY

LLAMA = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 16, "initializer_range": 0.2},
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "initializer_range": 0.2}
NEOX = {
    **{name: LLAMA[name] for name in LLAMA if name != "num_key_value_heads"},
    **{"use_parallel_residual": False, "hidden_act": "gelu_new"},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
DEEP = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "tie_word_embeddings": True}

SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", LLAMA),
    ("Llama", {**LLAMA, **DEEP, **ROPE}),
    ("Llama", {**LLAMA, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    ("Mistral", {**LLAMA, "sliding_window": None}),
    ("Mistral", {**LLAMA, **DEEP, "sliding_window": 64}),
    ("Mistral", {**LLAMA, **ROPE, "num_key_value_heads": 4, "sliding_window": 8}),
    ("Qwen2", LLAMA),
    ("Qwen2", {**LLAMA, **DEEP, **ROPE}),
    ("Qwen2", {**LLAMA, "num_key_value_heads": 1, "intermediate_size": 80}),
    ("GPT2", GPT2),
    ("GPT2", {**GPT2, "n_layer": 3, "n_embd": 48, "n_inner": 80, "tie_word_embeddings": False}),
    ("GPT2", {**GPT2, "n_head": 2, "layer_norm_epsilon": 1e-3}),
    ("GPTNeoX", NEOX),
    ("GPTNeoX", {**NEOX, **DEEP}),
    ("GPTNeoX", {**NEOX, "attention_bias": False, "layer_norm_eps": 1e-3}),
]
ONE_OF_EACH = SHAPES[2::3]


def made(kind: str, options: dict[str, Any], place: Path, **saved: Any) -> Any:
    """A random model of transformers in which also biases and gains matter, saved in `place`."""
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**options, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.empty_like(parameter).normal_(0, 0.3)
    model.save_pretrained(place, **saved)
    return model


@pytest.mark.parametrize(
    ("kind", "options"),
    [case if case in ONE_OF_EACH else soaked(*case) for case in SHAPES],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_import_computes_what_its_source_computes_and_survives_an_export(tmp_path: Path, kind: str, options: dict[str, Any]):
    source = made(kind, options, tmp_path / "source")
    import_checkpoint(tmp_path / "source", tmp_path / "first")
    model, config = restore(find(tmp_path / "first"))
    tokens = torch.randint(0, VOCABULARY, (2, config.model.seq_len), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), source(tokens).logits, rtol=1e-5, atol=1e-5)
    assert yaml.safe_load((tmp_path / "first" / MODEL_FILE).read_text())["model"]["tie_embeddings"] == model.shape.tied

    export(model, config, tmp_path / "exported", dtype=torch.float32)
    import_checkpoint(tmp_path / "exported", tmp_path / "second")
    again, _ = restore(find(tmp_path / "second"))
    before, after = dict(model.named_parameters()), dict(again.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    same = CliRunner().invoke(app, ["diff", str(tmp_path / "first"), str(tmp_path / "second")])
    assert same.exit_code == 0, same.output


def test_files_in_parts_and_of_16_bits_are_read_tensor_by_tensor(tmp_path: Path):
    source = made("Llama", {**LLAMA, "dtype": torch.bfloat16}, tmp_path / "source", max_shard_size="10KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 3
    import_checkpoint(tmp_path / "source", tmp_path / "run")
    model, _ = restore(find(tmp_path / "run"))
    theirs = dict(source.named_parameters())
    assert torch.equal(model.embedding.weight, theirs["model.embed_tokens.weight"].float())
    assert torch.equal(model.blocks["1"].mlp.down.weight, theirs["model.layers.1.mlp.down_proj.weight"].float())


def test_a_tensor_is_written_and_gone_before_the_next_is_made(tmp_path: Path):
    shapes = [checkpoint.local_shard_of(f"model/{name}", torch.empty(8, device="meta")) for name in "abc"]
    alive: list[weakref.ref[torch.Tensor]] = []

    def one_by_one() -> Iterator[checkpoint.LocalShard]:
        for name in "abc":
            assert all(tensor() is None for tensor in alive)
            tensor = torch.full((8,), float(ord(name)))
            shard = checkpoint.local_shard_of(f"model/{name}", tensor)
            alive.append(weakref.ref(shard.data))
            del tensor
            yield shard
            del shard

    saved = checkpoint.save_one_by_one(tmp_path, 0, shapes, one_by_one(), {})
    checkpoint.verify(saved.path)
    with pytest.raises(ValueError, match="were not written"):
        checkpoint.save_one_by_one(tmp_path, 1, shapes, [], {})
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("step-")] == ["step-00000000"]


REFUSED = [
    ("Llama", {"hidden_act": "gelu"}, "hidden_act gelu, .* it has silu"),
    ("Llama", {"head_dim": 16}, "head_dim 16"),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type linear"),
    ("GPT2", {"activation_function": "relu"}, "activation_function relu"),
    ("GPT2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    ("GPTNeoX", {"use_parallel_residual": True}, "use_parallel_residual True"),
    ("GPTNeoX", {"hidden_act": "gelu"}, "hidden_act gelu"),
    ("GPTNeoX", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rotary_pct 0.5"),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED, ids=str)
def test_what_the_model_does_not_compute_is_refused(kind: str, options: dict[str, Any], message: str):
    import transformers

    base = {"Llama": LLAMA, "GPT2": GPT2, "GPTNeoX": NEOX}[kind]
    config = getattr(transformers, f"{kind}Config")(**{**base, **options}).to_dict()
    with pytest.raises(ImportRefused, match=message):
        described(config, ["lm_head.weight"])
    with pytest.raises(ImportRefused, match=r"'bert' is not known; known are llama, mistral, qwen2, gpt2, gpt_neox"):
        described({"model_type": "bert"}, [])


def test_a_source_that_is_not_what_it_says_leaves_nothing(tmp_path: Path):
    made("Llama", LLAMA, tmp_path / "source")
    whole = tmp_path / "source" / "model.safetensors"
    tensors = load_file(whole)

    def refused(message: str, kind: type[CheckpointError] = CheckpointMismatch) -> None:
        with pytest.raises(CheckpointError, match=message) as refusal:
            import_checkpoint(tmp_path / "source", tmp_path / "run")
        assert refusal.type is kind
        assert not list((tmp_path / "run").glob("checkpoints/step-*"))

    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, whole)
    refused("1 tensors are missing .*up_proj")
    save_file({**tensors, "model.layers.1.mlp.up_proj.bias": torch.zeros(48)}, whole)
    refused("1 have no place .*up_proj.bias")
    save_file({**tensors, name: tensors[name][1:].contiguous()}, whole)
    refused(r"up_proj.weight gives .* the shape \[47, 32\]")
    save_file({**tensors, name: tensors[name].double()}, whole)
    refused("float64")
    about = json.loads((whole.parent / "config.json").read_text())
    (whole.parent / "config.json").write_text(json.dumps({**about, "num_hidden_layers": 10**9}))
    refused("1000000000 layers, and there are 21 tensors")
    (whole.parent / "config.json").write_text(json.dumps(about))
    whole.write_bytes(whole.read_bytes()[:1000])
    refused("cannot be read", CheckpointError)
    index = whole.parent / "model.safetensors.index.json"
    for damaged in ({}, {"weight_map": [name]}):
        index.write_text(json.dumps(damaged))
        refused("has no weight_map")
    index.write_text(json.dumps({"weight_map": {name: "../model.safetensors"}}))
    refused("no safetensors file beside it", CheckpointError)


@pytest.mark.soak
def test_training_begins_from_an_import_on_any_layout(tmp_path: Path):
    source = made("Qwen2", LLAMA, tmp_path / "source")
    dataset = write_dataset(tmp_path / "walks")
    import_checkpoint(tmp_path / "source", tmp_path / "imported")
    model = yaml.safe_load((tmp_path / "imported" / MODEL_FILE).read_text())["model"]
    short = {"steps": 3, "precision": "fp32"}
    first = trained_from(tmp_path / "one", tmp_path / "source", dataset, {"model": model, "train": short}, 1)
    second = trained_from(
        tmp_path / "four",
        tmp_path / "source",
        dataset,
        {"model": model, "train": short},
        4,
        "parallel.tp=2",
        "parallel.zero_stage=3",
    )
    for (step, loss, *_), (other, elsewhere, *_) in zip(steps(first), steps(second), strict=True):
        assert step == other
        assert loss == pytest.approx(elsewhere, abs=1e-5)
    window = torch.from_numpy(first_batch(tmp_path / "one" / "config.yaml"))
    with torch.no_grad():
        logits = source(window[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
    assert steps(first)[0][:2] == (1, pytest.approx(float(expected), abs=1e-5))
    latest = find(tmp_path / "one" / "run")
    assert latest.name == "step-00000003"
    assert WEIGHTS_ONLY not in checkpoint.read_state(latest)


def trained_from(
    place: Path, source: Path, dataset: Path, sections: dict[str, Any], ranks: int, *overrides: str
) -> list[dict[str, Any]]:
    config = write_config(place, dataset, **sections)
    import_checkpoint(source, place / "run", config=config)
    return trained(config, ranks, *overrides)


def first_batch(path: Path) -> Any:
    import numpy as np

    from trainer.data import open_split
    from trainer.sources import datasets

    config = load_config(path)
    data = open_split(datasets(config), config.data.split, "train", config.model.seq_len, config.seed)
    return data.get(np.arange(config.train.global_batch_size))


def test_a_config_must_have_the_model_of_the_source_and_may_have_room_for_more_tokens(tmp_path: Path):
    made("Llama", {**LLAMA, "tie_word_embeddings": True}, tmp_path / "source")
    dataset = write_dataset(tmp_path / "walks")
    import_checkpoint(tmp_path / "source", tmp_path / "imported")
    model = yaml.safe_load((tmp_path / "imported" / MODEL_FILE).read_text())["model"]
    other = write_config(tmp_path / "other", dataset, model={**model, "layers": 3, "seq_len": 32, "tie_embeddings": False})
    with pytest.raises(
        CheckpointMismatch, match=r"layers is 3, not 2; model.tie_embeddings is False, not True; model.seq_len is 32"
    ):
        import_checkpoint(tmp_path / "source", tmp_path / "other" / "run", config=other)
    wider = write_config(tmp_path / "wider", dataset, model={**model, "vocab_multiple": 64})
    import_checkpoint(tmp_path / "source", tmp_path / "wider" / "run", config=wider)
    wide, _ = restore(find(tmp_path / "wider" / "run"))
    narrow, _ = restore(find(tmp_path / "imported"))
    assert torch.equal(wide.embedding.weight, torch.nn.functional.pad(narrow.embedding.weight, (0, 0, 0, 3)))


def test_the_command_imports_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    points = tomllib.loads((Path(trainer.__file__).parents[1] / "pyproject.toml").read_text())["project"]["entry-points"]
    assert EntryPoint("hf", points[IMPORTERS]["hf"], IMPORTERS).load() is import_checkpoint
    assert EntryPoint("megatron", points[IMPORTERS]["megatron"], IMPORTERS).load() is import_megatron
    installed = tmp_path / "packages" / "importing-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: importing\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[{IMPORTERS}]\nhf = {points[IMPORTERS]['hf']}\n")
    monkeypatch.syspath_prepend(installed.parent)
    made("GPT2", GPT2, tmp_path / "source")
    command = ["import", str(tmp_path / "source"), str(tmp_path / "run")]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    assert "gpt2" in found.stdout
    again = CliRunner().invoke(app, command)
    assert (again.exit_code, again.stderr.count("\n")) == (78, 1)
    assert "has checkpoints already" in again.stderr
