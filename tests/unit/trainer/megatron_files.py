"""Checkpoints of Megatron-LM, written in the layout that its source describes, without it.

`training/checkpointing.py` names directories and members, `core/transformer` the parameters and how they are cut, and
`core/optimizer` the state of the optimizer; `core/dist_checkpointing` the format torch_dist.
"""

import argparse
import enum
import io
import json
import pickle
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from trainer.shape import GPTShape

PADDED = 64
ITERATION, SAMPLES = 7, 84

Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Truth:
    """What a checkpoint holds, whole and by the trainer's names: fp32 weights, and both moments."""

    shape: GPTShape
    masters: Values
    exp_avg: Values
    exp_avg_sq: Values

    def kinds(self) -> Mapping[str, Values]:
        return {"fp32_param": self.masters, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


def shape(**options: Any) -> GPTShape:
    known = {"vocab": PADDED, "layers": 4, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn_hidden": 24, "seq_len": 8}
    return GPTShape(**{**known, **options})


def truth(of: GPTShape) -> Truth:
    chance = torch.Generator().manual_seed(5)

    def drawn() -> Values:
        return {weight.name: torch.randn(weight.shape, generator=chance) for weight in of.weights()}

    return Truth(of, drawn(), drawn(), {name: each.square() for name, each in drawn().items()})


def arguments(of: GPTShape, tp: int = 1, pp: int = 1, **options: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            **{
                "num_layers": of.layers,
                "hidden_size": of.hidden,
                "num_attention_heads": of.heads,
                "ffn_hidden_size": of.ffn_hidden,
            },
            **{"group_query_attention": of.kv_heads != of.heads, "num_query_groups": of.kv_heads, "kv_channels": of.head_dim},
            **{"max_position_embeddings": of.seq_len, "seq_length": of.seq_len, "vocab_size": 61, "padded_vocab_size": of.vocab},
            **{"make_vocab_size_divisible_by": PADDED // tp, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp},
            "position_embedding_type": {"rope": "rope", "learned": "learned_absolute"}[of.position],
            **{"rotary_base": 10000, "rotary_percent": 1.0, "normalization": {"rmsnorm": "RMSNorm"}.get(of.norm, "LayerNorm")},
            **{"norm_epsilon": of.norm_eps, "swiglu": of.gated, "bias_gelu_fusion": not of.gated, "add_bias_linear": of.bias},
            **{"untie_embeddings_and_output_weights": not of.tied, "hidden_dropout": 0.0, "attention_dropout": 0.0},
            **{
                "init_method_std": of.init_std,
                "num_experts": None,
                "consumed_train_samples": SAMPLES,
                "params_dtype": torch.bfloat16,
            },
            **options,
        }
    )


def layer_tensors(values: Values, of: GPTShape, layer: int, tp_rank: int, tp: int) -> Iterator[tuple[str, Tensor]]:
    """One rank's parameters of a layer, in the order of Megatron-core's plain layers."""
    ours = f"blocks.{layer}."

    def rows(tensor: Tensor) -> Tensor:
        return tensor.chunk(tp)[tp_rank]

    def kinds(name: str) -> list[str]:
        return [kind for kind in ("weight", "bias") if f"{ours}{name}.{kind}" in values]

    def norm(name: str, theirs: str) -> Iterator[tuple[str, Tensor]]:
        return ((f"{theirs}.{kind}", values[f"{ours}{name}.{kind}"]) for kind in kinds(name))

    def row_parallel(name: str, theirs: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{theirs}.weight", values[f"{ours}{name}.weight"].chunk(tp, dim=1)[tp_rank]
        if "bias" in kinds(name):
            yield f"{theirs}.bias", values[f"{ours}{name}.bias"]

    queries = of.heads // of.kv_heads * of.head_dim
    yield from norm("attention_norm", "input_layernorm")
    yield from row_parallel("attention.output", "self_attention.linear_proj")
    for kind in kinds("attention.query"):
        query, key, value = (values[f"{ours}attention.{part}.{kind}"] for part in ("query", "key", "value"))
        groups = []
        for group in range(of.kv_heads):
            kv = slice(group * of.head_dim, (group + 1) * of.head_dim)
            groups += [query[group * queries : (group + 1) * queries], key[kv], value[kv]]
        yield f"self_attention.linear_qkv.{kind}", rows(torch.cat(groups))
    yield from norm("mlp_norm", "pre_mlp_layernorm")
    for kind in kinds("mlp.up"):
        up = rows(values[f"{ours}mlp.up.{kind}"])
        yield f"mlp.linear_fc1.{kind}", torch.cat([rows(values[f"{ours}mlp.gate.{kind}"]), up]) if of.gated else up
    yield from row_parallel("mlp.down", "mlp.linear_fc2")


def chunk_tensors(values: Values, of: GPTShape, layers: range, tp_rank: int, tp: int) -> dict[str, Tensor]:
    """One rank's parameters of some layers, with the layers' numbers there, and of what is before or behind them."""
    found: dict[str, Tensor] = {}
    if layers.start == 0:
        found["embedding.word_embeddings.weight"] = values["embedding.weight"].chunk(tp)[tp_rank]
        if of.position == "learned":
            found["embedding.position_embeddings.weight"] = values["positions.weight"]
    for layer in layers:
        for name, tensor in layer_tensors(values, of, layer, tp_rank, tp):
            found[f"decoder.layers.{layer - layers.start}.{name}"] = tensor
    if layers.stop == of.layers:
        for kind in ("weight", "bias") if "norm.bias" in values else ("weight",):
            found[f"decoder.final_layernorm.{kind}"] = values[f"norm.{kind}"]
        if not of.tied or layers.start > 0:
            found["output_layer.weight"] = values["embedding.weight" if of.tied else "head.weight"].chunk(tp)[tp_rank]
    return found


def write_ranks(
    place: Path, held: Truth, *, tp: int, pp: int, virtual: int = 1, names: str = "core", optimizer: bool = True
) -> Path:
    """`iter_0000007/mp_rank_XX[_YYY]/model_optim_rng.pt` below `place`.

    Args:
        names: `core`, `te` with norms inside of linear layers, or `old` from before Megatron-core.
    """
    of, stages = held.shape, pp * virtual
    each = of.layers // stages
    for tp_rank in range(tp):
        for pp_rank in range(pp):
            chunks = [range((part * pp + pp_rank) * each, (part * pp + pp_rank + 1) * each) for part in range(virtual)]
            kinds = {
                kind: [chunk_tensors(values, of, layers, tp_rank, tp) for layers in chunks] for kind, values in held.kinds().items()
            }
            models = [{name: tensor.bfloat16() for name, tensor in chunk.items()} for chunk in kinds["fp32_param"]]
            file: dict[str, Any] = {"args": arguments(of, tp, pp), "checkpoint_version": 3.0, "iteration": ITERATION}
            for number, model in enumerate(models):
                file["model" if virtual == 1 else f"model{number}"] = _named(model, names)
            if optimizer:
                file["optimizer"] = _adam(kinds)
            file["rng_state"] = [{"random_rng_state": (3, (1, 2), None), "np_rng_state": _numpy_state()}]
            folder = place / f"iter_{ITERATION:07d}" / (f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if pp > 1 else ""))
            folder.mkdir(parents=True)
            save(file, folder / "model_optim_rng.pt")
    (place / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return place


def save(file: dict[str, Any], path: Path) -> None:
    """As Megatron-LM does, with objects of classes that are not there when it is read."""
    module = types.ModuleType("megatron.core.transformer.enums")
    kind = enum.Enum("AttnBackend", {"flash": 1, "auto": 5}, module=module.__name__)
    module.AttnBackend = kind  # type: ignore[attr-defined]
    packages = {"megatron": types.ModuleType("megatron"), module.__name__: module}
    sys.modules.update(packages)
    try:
        file["args"].attention_backend = kind.auto
        torch.save(file, path)
    finally:
        for name in packages:
            del sys.modules[name]


def _numpy_state() -> Any:
    import numpy as np

    return np.random.RandomState(3).get_state()


def _named(model: dict[str, Tensor], names: str) -> dict[str, Any]:
    if names == "core":
        return {**model, "decoder.layers.0.self_attention.linear_qkv._extra_state": io.BytesIO(b"").getvalue() or None}
    if names == "te":
        renamed = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
        for ours, theirs in renamed.items():
            model = {name.replace(ours, theirs): tensor for name, tensor in model.items()}
        return model
    old = {
        **{"self_attention.linear_qkv": "self_attention.query_key_value", "self_attention.linear_proj": "self_attention.dense"},
        **{"linear_fc1": "dense_h_to_4h", "linear_fc2": "dense_4h_to_h", "pre_mlp_layernorm": "post_attention_layernorm"},
        "final_layernorm": "final_layernorm",
    }
    found: dict[str, Any] = {"language_model": {}}
    body = found["language_model"]
    for name, tensor in model.items():
        for ours, theirs in old.items():
            name = name.replace(ours, theirs)
        head, _, rest = name.partition(".")
        if head == "embedding":
            layer, _, kind = rest.partition(".")
            body.setdefault("embedding", {})[layer] = {kind: tensor}
        elif head == "decoder":
            body.setdefault("encoder", {})[rest] = tensor
        elif "embedding" in body:
            body["output_layer"] = {"weight": tensor}
        else:
            body["output_layer"] = {"weight": tensor}
    return found


def _adam(kinds: Mapping[str, list[dict[str, Tensor]]]) -> dict[str, Any]:
    """`Float16OptimizerWithFloat16Params.state_dict()`: matrices with weight decay, then vectors without."""
    masters: list[list[Tensor]] = []
    state: dict[int, dict[str, Tensor]] = {}
    groups: list[dict[str, Any]] = []
    for decayed in (True, False):
        numbers, copies = [], []
        for chunk, tensors in enumerate(kinds["fp32_param"]):
            for name, tensor in tensors.items():
                if (tensor.dim() > 1) is decayed:
                    numbers.append(len(state))
                    copies.append(tensor)
                    state[len(state)] = {moment: kinds[moment][chunk][name].clone() for moment in ("exp_avg", "exp_avg_sq")}
        groups.append({"params": numbers, "lr": 1e-4, "wd_mult": float(decayed), "step": ITERATION})
        masters.append(copies)
    return {"optimizer": {"state": state, "param_groups": groups}, "fp32_from_fp16_params": masters}


# -- torch_dist ------------------------------------------------------------------------------------------------------------


def write_torch_dist(
    place: Path,
    held: Truth,
    *,
    tp: int,
    pp: int,
    stacked: bool = True,
    flattened: bool = False,
    split_gate: bool = False,
    common_file: bool = True,
    optimizer: bool = True,
) -> Path:
    """`iter_0000007` below `place`, a file of chunks for each rank.

    Args:
        stacked: layers are the first dimension of one tensor; else each has a name.
        flattened: moments are (layer, parts along each dimension, numbers of a part), each part in two chunks.
        split_gate: the halves of an MLP's first matrix are tensors of their own.
        common_file: what is no tensor is in common.pt; else an object among the tensors.
    """
    of = held.shape
    directory = place / f"iter_{ITERATION:07d}"
    directory.mkdir(parents=True)
    writer = _Chunks(directory)
    each = of.layers // pp
    for pp_rank in range(pp):
        for tp_rank in range(tp):
            writer.begin(f"__{pp_rank * tp + tp_rank}_0.distcp")
            layers = range(pp_rank * each, (pp_rank + 1) * each)
            for kind, values in held.kinds().items():
                for name, tensor in chunk_tensors(values, of, layers, tp_rank, tp).items():
                    if of.tied and name == "output_layer.weight":
                        continue  # shares the embedding's entry
                    number, rest = _parted(name)
                    inside = _blocks(rest, tensor, tp_rank, tp, gated=of.gated, split=split_gate)
                    layer = None if number is None else number + layers.start
                    for key, block, grid, where in inside:
                        if grid == (1,) * len(grid) and tp_rank > 0:
                            continue  # all ranks have the same
                        named = key if layer is None else f"decoder.layers.{key}" if stacked else f"decoder.layers.{layer}.{key}"
                        stack = (layer, of.layers) if stacked and layer is not None else None
                        if kind == "fp32_param":
                            writer.add(named, block.bfloat16(), grid, where, stack)
                        if optimizer:
                            writer.add(f"optimizer.state.{kind}.{named}", block, grid, where, stack, flattened=flattened)
    common = {"args": arguments(of, tp, pp), "checkpoint_version": 3.0, "iteration": ITERATION}
    if common_file:
        save(common, directory / "common.pt")
    else:
        writer.object("common_state/shard_0_1", [common])
    writer.finish()
    (directory / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (place / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return place


def _parted(name: str) -> tuple[int | None, str]:
    if not name.startswith("decoder.layers."):
        return None, name
    number, _, rest = name.removeprefix("decoder.layers.").partition(".")
    return int(number), rest


Block = tuple[str, Tensor, tuple[int, ...], tuple[int, ...]]


def _blocks(name: str, tensor: Tensor, tp_rank: int, tp: int, *, gated: bool, split: bool) -> list[Block]:
    """Key, block, parts along each dimension, and which of them this one is."""
    ones, zeros = (1,) * tensor.dim(), (0,) * tensor.dim()
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return [(name, tensor, (1, tp), (0, tp_rank))]
    if gated and "linear_fc1" in name:
        gate, up = tensor.chunk(2)
        if split:
            return [
                (f"{name}_w", gate, (tp, *ones[1:]), (tp_rank, *zeros[1:])),
                (f"{name}_v", up, (tp, *ones[1:]), (tp_rank, *zeros[1:])),
            ]
        return [
            (name, gate, (2 * tp, *ones[1:]), (tp_rank, *zeros[1:])),
            (name, up, (2 * tp, *ones[1:]), (tp + tp_rank, *zeros[1:])),
        ]
    if any(part in name for part in ("linear_qkv", "linear_fc1", "word_embeddings", "output_layer")):
        return [(name, tensor, (tp, *ones[1:]), (tp_rank, *zeros[1:]))]
    return [(name, tensor, ones, zeros)]


class _Chunks:
    """Writes what `FileSystemWriter` writes: blobs of `torch.save` behind each other, and a pickled description."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def begin(self, file: str) -> None:
        self._file = file
        (self._directory / file).touch()

    def add(
        self,
        name: str,
        block: Tensor,
        grid: tuple[int, ...],
        where: tuple[int, ...],
        stack: tuple[int, int] | None,
        *,
        flattened: bool = False,
    ) -> None:
        if flattened:
            grid, where = (*grid, 2), (*where, 0)
            for half, part in enumerate(block.flatten().chunk(2)):
                self._add(name, part.reshape((1,) * (len(grid) - 1) + (-1,)), grid, (*where[:-1], half), stack)
        else:
            self._add(name, block, grid, where, stack)

    def _add(self, name: str, block: Tensor, grid: tuple[int, ...], where: tuple[int, ...], stack: tuple[int, int] | None) -> None:
        offset = [index * size for index, size in zip(where, block.shape, strict=True)]
        size = [count * length for count, length in zip(grid, block.shape, strict=True)]
        if stack is not None:
            block, offset, size = block.unsqueeze(0), [stack[0], *offset], [stack[1], *size]
        known = self._tensors.setdefault(
            name, TensorStorageMetadata(TensorProperties.create_from_tensor(block), torch.Size(size), [])
        )
        assert isinstance(known, TensorStorageMetadata)
        assert list(known.size) == size
        known.chunks.append(ChunkStorageMetadata(torch.Size(offset), block.shape))
        self._blob(MetadataIndex(name, offset, len(known.chunks) - 1), block.clone())

    def object(self, name: str, value: object) -> None:
        self._tensors[name] = BytesStorageMetadata()
        self._blob(MetadataIndex(name), value)

    def _blob(self, index: MetadataIndex, value: object) -> None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        with (self._directory / self._file).open("ab") as file:
            self._places[index] = _StorageInfo(self._file, file.tell(), len(buffer.getvalue()))
            file.write(buffer.getvalue())

    def finish(self) -> None:
        with (self._directory / ".metadata").open("wb") as file:
            pickle.dump(Metadata(self._tensors, {"an": ("object",)}, self._places), file)
