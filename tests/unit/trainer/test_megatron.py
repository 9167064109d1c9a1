"""Checkpoints of Megatron-LM as those of the trainer."""

import pickle
import subprocess
from pathlib import Path
from typing import Any

import megatron_files as files
import pytest
import torch
import yaml
from allocations import Allocations
from megatron_files import ITERATION, SAMPLES, Truth, arguments, truth, write_ranks, write_torch_dist
from soak import soaked, soaked_after
from trainer_ranks import steps, trained, write_config, write_dataset

import checkpoint
from checkpoint import CheckpointError
from trainer.conversion import dcp_files
from trainer.conversion.beginning import MODEL_FILE
from trainer.conversion.families import ImportRefused
from trainer.conversion.megatron import import_megatron
from trainer.conversion.megatron_args import model_of
from trainer.restore import find, restore
from trainer.state import WEIGHTS_ONLY, array_of

LLAMA = files.shape()
GPT = files.shape(position="learned", norm="layernorm", mlp="gelu", bias=True, tied=True, kv_heads=4)
MIXED = files.shape(position="rope", norm="layernorm", mlp="swiglu", bias=True, kv_heads=2)
SHAPES = {"llama": LLAMA, "gpt": GPT, "mixed": MIXED, "tied": files.shape(tied=True)}
CASES = [
    *[("llama", 2, 1), ("gpt", 1, 2), ("mixed", 2, 2), ("tied", 2, 2)],
    *(soaked("llama", tp, pp) for tp, pp in [(1, 1), (1, 2), (2, 2)]),
    *(soaked("gpt", tp, pp) for tp, pp in [(1, 1), (2, 1), (2, 2)]),
]


def held_by(run: Path, held: Truth, prefix: str) -> dict[str, torch.Tensor]:
    """The arrays of an import below `prefix`, by the parameters' names."""
    import zarr

    root = zarr.open_group(find(run), mode="r")
    found = {}
    for weight in held.shape.weights():
        array, stack = array_of(weight.name, held.shape.layers)
        whole = torch.from_numpy(root[f"{prefix}/{array}"][:])  # type: ignore[index]
        found[weight.name] = whole if stack is None else whole[stack[0]]
    return found


def check(run: Path, held: Truth, *, optimizer: bool = True) -> None:
    """Every tensor is there, bit by bit."""
    state = checkpoint.read_state(find(run))
    weights = held.masters if optimizer else {name: each.bfloat16().float() for name, each in held.masters.items()}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in held_by(run, held, "model").items())
    assert bool(state.get(WEIGHTS_ONLY)) is not optimizer
    assert (state["step"], state["consumed_samples"]) == ((ITERATION, SAMPLES) if optimizer else (0, 0))
    for moment in ("exp_avg", "exp_avg_sq") if optimizer else ():
        values = getattr(held, moment)
        assert all(torch.equal(tensor, values[name]) for name, tensor in held_by(run, held, f"optimizer/{moment}").items())
    model, config = restore(find(run))
    assert model(torch.arange(8).unsqueeze(0)).isfinite().all()
    assert yaml.safe_load((run / MODEL_FILE).read_text())["model"]["vocab_size"] == config.model.vocab_size == 61


@pytest.mark.parametrize(("kind", "tp", "pp"), soaked_after(2, CASES))
def test_the_files_of_ranks_are_put_together_bit_by_bit(tmp_path: Path, kind: str, tp: int, pp: int):
    held = truth(SHAPES[kind])
    said = import_megatron(write_ranks(tmp_path / "source", held, tp=tp, pp=pp), tmp_path / "run")
    assert f"with their optimizer, step {ITERATION}" in said
    check(tmp_path / "run", held)


@pytest.mark.parametrize(("kind", "tp", "pp"), soaked_after(2, CASES))
def test_torch_dist_is_read_bit_by_bit(tmp_path: Path, kind: str, tp: int, pp: int):
    held = truth(SHAPES[kind])
    import_megatron(write_torch_dist(tmp_path / "source", held, tp=tp, pp=pp), tmp_path / "run")
    check(tmp_path / "run", held)


@pytest.mark.parametrize(("virtual", "names"), soaked_after(1, [(1, "te"), (2, "old"), soaked(1, "old"), soaked(2, "te")]))
def test_older_names_and_virtual_stages_are_known(tmp_path: Path, virtual: int, names: str):
    held = truth(GPT)
    source = write_ranks(tmp_path / "source", held, tp=2, pp=2, virtual=virtual, names=names)
    import_megatron(source, tmp_path / "run")
    check(tmp_path / "run", held)
    import_megatron(source / f"iter_{ITERATION:07d}", tmp_path / "again")  # one iteration by itself
    check(tmp_path / "again", held)


@pytest.mark.parametrize(
    "form",
    soaked_after(
        2, [{"split_gate": True, "stacked": False}, {"flattened": True}, {"common_file": False}, soaked({"stacked": False})]
    ),
    ids=str,
)
def test_every_form_of_torch_dist_is_known(tmp_path: Path, form: dict[str, bool]):
    held = truth(MIXED)
    import_megatron(write_torch_dist(tmp_path / "source", held, tp=2, pp=2, **form), tmp_path / "run")
    check(tmp_path / "run", held)


@pytest.mark.parametrize("write", [write_ranks, write_torch_dist])
def test_without_an_optimizers_state_the_weights_are_those_of_step_0(tmp_path: Path, write: Any):
    held = truth(LLAMA)
    said = import_megatron(write(tmp_path / "source", held, tp=2, pp=1, optimizer=False), tmp_path / "run")
    assert said.endswith("; the weights alone, from step 0: it has no state of an optimizer")
    check(tmp_path / "run", held, optimizer=False)


def test_an_optimizers_state_that_cannot_be_told_apart_is_left_out(tmp_path: Path):
    held = truth(LLAMA)

    def said_of(place: str, change: Any) -> str:
        source = write_ranks(tmp_path / place, held, tp=1, pp=1)
        file = torch.load(
            source / f"iter_{ITERATION:07d}/mp_rank_00/model_optim_rng.pt", weights_only=False, pickle_module=_without_classes()
        )
        change(file["optimizer"])
        torch.save(file, source / f"iter_{ITERATION:07d}/mp_rank_00/model_optim_rng.pt")
        said = import_megatron(source, tmp_path / f"{place}-run")
        check(tmp_path / f"{place}-run", held, optimizer=False)
        return said.partition(": ")[2]

    def exchanged(optimizer: Any) -> None:
        first, second = optimizer["fp32_from_fp16_params"][0][:2]
        first[:1], second[:1] = 0.0, 0.0

    def split(optimizer: Any) -> None:
        group = optimizer["optimizer"]["param_groups"][0]
        optimizer["optimizer"]["param_groups"].insert(1, {**group, "params": group["params"][3:]})
        group["params"] = group["params"][:3]
        optimizer["fp32_from_fp16_params"].insert(1, optimizer["fp32_from_fp16_params"][0][3:])

    def short(optimizer: Any) -> None:
        del optimizer["optimizer"]["state"][2]["exp_avg_sq"]

    def flat(optimizer: Any) -> None:
        optimizer["optimizer"].pop("state")

    assert said_of("exchanged", exchanged) == "its optimizer's master weights are in another order than its weights"
    assert said_of("split", split).startswith("its optimizer has other groups of parameters")
    assert said_of("short", short) == "its optimizer's state lacks tensors of Adam's"
    assert said_of("flat", flat) == "its optimizer's state is not that of one Adam"


def _without_classes() -> Any:
    """A pickle module that knows no class of Megatron-LM."""
    import types

    class Text:
        """In place of an enumeration, whose members are pickled by value or, by some releases of Python, by name."""

        def __call__(self, value: object) -> str:
            return str(value)

        def __getattr__(self, name: str) -> str:
            return name

    class Lenient(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return Text() if module.startswith("megatron") else super().find_class(module, name)

    return types.SimpleNamespace(Unpickler=Lenient, load=pickle.load, __name__="pickle")


@pytest.mark.parametrize("kind", ["ranks", soaked("torch_dist")])
def test_training_goes_on_from_megatrons_iteration_as_if_it_had_never_been_elsewhere(tmp_path: Path, kind: str):
    dataset = write_dataset(tmp_path / "walks")
    sections: dict[str, Any] = {
        "model": {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn_hidden": 24, "seq_len": 8, "vocab_size": 61},
        "train": {"steps": ITERATION + 3, "precision": "fp32"},
        "checkpoint": {"every_steps": ITERATION},
    }
    config = write_config(tmp_path / "native", dataset, **sections)
    native = steps(trained(config, 1))
    held = as_truth(tmp_path / "native/run/checkpoints" / f"step-{ITERATION:08d}", files.shape(layers=2))
    write = write_ranks if kind == "ranks" else write_torch_dist
    source = write(tmp_path / "source", held, tp=2, pp=2)
    config = write_config(tmp_path / "moved", dataset, **sections)
    import_megatron(source, tmp_path / "moved/run", config=config)
    assert steps(trained(config, 1)) == native[ITERATION:]
    assert not (tmp_path / "moved/run" / MODEL_FILE).exists()


def as_truth(path: Path, of: Any) -> Truth:
    import zarr

    root: Any = zarr.open_group(path, mode="r")

    def values(prefix: str) -> dict[str, torch.Tensor]:
        found = {}
        for weight in of.weights():
            array, stack = array_of(weight.name, of.layers)
            whole = torch.from_numpy(root[f"{prefix}/{array}"][:])
            found[weight.name] = whole if stack is None else whole[stack[0]]
        return found

    return Truth(of, values("model"), values("optimizer/exp_avg"), values("optimizer/exp_avg_sq"))


REFUSED = [
    ({"num_experts": 8}, "num_experts 8"),
    ({"multi_latent_attention": True}, "multi_latent_attention True"),
    ({"qk_layernorm": True}, "qk_layernorm True"),
    ({"mtp_num_layers": 1}, "mtp_num_layers 1"),
    ({"rotary_percent": 0.5}, "rotary_percent 0.5"),
    ({"kv_channels": 8}, "kv_channels 8"),
    ({"squared_relu": True}, "squared_relu True"),
    ({"swiglu": False, "bias_gelu_fusion": False}, "without bias_gelu_fusion"),
    ({"position_embedding_type": "yarn"}, "position_embedding_type 'yarn'"),
    ({"normalization": "L2Norm"}, "normalization 'L2Norm'"),
    ({"num_layers": "4"}, "num_layers '4'"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_what_the_model_does_not_compute_is_refused_by_the_name_of_its_argument(options: dict[str, Any], message: str):
    with pytest.raises(ImportRefused, match=message):
        model_of(vars(arguments(LLAMA, **options)))
    without = vars(arguments(LLAMA))
    del without["hidden_size"]
    with pytest.raises(ImportRefused, match="hidden_size"):
        model_of(without)


def test_biases_of_queries_keys_and_values_alone_are_known():
    found = model_of(vars(arguments(LLAMA, add_qkv_bias=True)))
    assert found.model["bias"] is True
    assert found.biases == {"attention.query", "attention.key", "attention.value"}


class Evil:
    """Runs something where it is unpickled."""

    def __init__(self, call: Any, *args: Any) -> None:
        self._call, self._args = call, args

    def __reduce__(self) -> Any:
        return self._call, self._args


def test_a_checkpoint_runs_nothing(tmp_path: Path):
    held, mark = truth(LLAMA), tmp_path / "was here"
    evil = Evil(subprocess.call, ["touch", str(mark)])
    source = write_torch_dist(tmp_path / "dist", held, tp=1, pp=1)
    described = source / f"iter_{ITERATION:07d}" / ".metadata"
    metadata = pickle.loads(described.read_bytes())
    metadata.planner_data = evil
    described.write_bytes(pickle.dumps(metadata))
    common = source / f"iter_{ITERATION:07d}" / "common.pt"
    files.save({"args": arguments(LLAMA), "iteration": ITERATION, "more": evil}, common)
    import_megatron(source, tmp_path / "run")
    check(tmp_path / "run", held)
    assert not mark.exists()
    files.save({"args": arguments(LLAMA), "iteration": ITERATION, "more": Evil(Path.touch, mark)}, common)
    with pytest.raises(CheckpointError, match="Trying to call reduce for unrecognized function"):
        import_megatron(source, tmp_path / "other")
    assert not mark.exists()
    pickle.loads(described.read_bytes())  # which is how others read it
    assert mark.exists()


def test_a_source_that_is_not_whole_leaves_nothing(tmp_path: Path):
    held = truth(LLAMA)
    ranks = write_ranks(tmp_path / "ranks", held, tp=2, pp=2) / f"iter_{ITERATION:07d}"
    dist = write_torch_dist(tmp_path / "dist", held, tp=2, pp=1) / f"iter_{ITERATION:07d}"

    def refused(source: Path, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            import_megatron(source, tmp_path / "run")
        assert not list((tmp_path / "run").glob("checkpoints/step-*"))

    (ranks / "mp_rank_01_001").rename(ranks / "elsewhere")
    refused(ranks, "has 3 directories .* not those of all ranks")
    (ranks / "elsewhere").rename(ranks / "mp_rank_01_001_000")
    refused(ranks, "expert-parallel")
    (ranks / "mp_rank_01_001_000").rename(ranks / "mp_rank_01_001")
    file = ranks / "mp_rank_01_001" / "model_optim_rng.pt"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    refused(ranks, "is no whole file of torch.save")
    files.save({"args": arguments(files.shape(layers=8)), "checkpoint_version": 3.0, "iteration": 1, "model": {}}, file)
    refused(ranks, "ranks 1 and 0 of stage 1 have other parameters")
    file.write_bytes(whole)
    first = ranks / "mp_rank_00_000" / "model_optim_rng.pt"
    whole = first.read_bytes()
    files.save({"args": arguments(LLAMA), "checkpoint_version": 1.0, "iteration": 1, "model": {}}, first)
    refused(ranks, "has checkpoint_version 1.0")
    first.write_bytes(whole)
    files.save({"args": arguments(files.shape(layers=8)), "iteration": ITERATION}, dist / "common.pt")
    refused(dist, "say 8 layers, and its tensors are of 4")
    files.save({"args": arguments(GPT), "iteration": ITERATION}, dist / "common.pt")
    refused(dist, "tensors are missing .* have no place")
    files.save({"args": arguments(LLAMA), "iteration": -1}, dist / "common.pt")
    refused(dist, "iteration -1")
    (dist / "__1_0.distcp").write_bytes(b"")
    files.save({"args": arguments(LLAMA), "iteration": ITERATION}, dist / "common.pt")
    refused(dist, "has 0 bytes")
    (dist / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    refused(dist, "sharded_backend 'zarr'")
    (tmp_path / "dist" / "latest_checkpointed_iteration.txt").write_text("../../x")
    refused(tmp_path / "dist", "expected a number, or release")


def test_what_torch_itself_has_written_is_read(tmp_path: Path):
    import torch.distributed.checkpoint as dcp

    tensors = {"a": torch.randn(3, 4), "nested": {"b": torch.randn(5).bfloat16()}}
    dcp.save({**tensors, "told": {"iteration": 3}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    opened = dcp_files.DCPFiles(tmp_path / "dcp")
    assert torch.equal(opened.read("a"), tensors["a"])
    assert torch.equal(opened.read("a", 1), tensors["a"][1])
    assert torch.equal(opened.read("nested.b"), tensors["nested"]["b"])
    assert opened.object("told.iteration") == 3


@pytest.mark.parametrize("write", [write_ranks, write_torch_dist])
def test_memory_stays_at_two_of_the_largest_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any):
    held = truth(files.shape(hidden=64, ffn_hidden=512, vocab=4096, heads=4))
    largest = 4096 * 64 * 4  # bytes, in fp32
    source = write(tmp_path / "source", held, tp=2, pp=2)
    allocations = Allocations()
    load_part = dcp_files.load_part

    def counted(path: Path, offset: int, length: int) -> Any:
        """Reading takes the bytes and what is made of them."""
        allocations.peak_bytes = max(allocations.peak_bytes, allocations.live_bytes + 2 * length)
        found = load_part(path, offset, length)
        allocations.add(found)
        return found

    monkeypatch.setattr(dcp_files, "load_part", counted)
    with allocations:
        import_megatron(source, tmp_path / "run")
    assert largest <= allocations.peak_bytes <= 2 * largest + (1 << 16)
