"""Export to the layouts of Hugging Face transformers: Llama, GPT-2 or GPT-NeoX, as safetensors.

μP's multipliers, which those layouts do not know, are folded into the weights.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from checkpoint import CheckpointError, CheckpointMismatch
from resilient.worker import Config
from trainer.model import GPT
from trainer.shape import GPTShape

LLAMA = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu"}
GPT2 = {"position": "learned", "norm": "layernorm", "mlp": "gelu"}
GPT_NEOX = {**GPT2, "position": "rope"}


class ExportError(Exception):
    """This model has no such layout, or the place is taken."""


def export(model: GPT, config: Config, output: Path, *, dtype: torch.dtype = torch.bfloat16, tokenizer: Path | None = None) -> str:
    """Write a directory that `transformers` loads; the name of its layout.

    Args:
        output: must not be there; it appears whole or not at all.
        tokenizer: a tokenizer.json to put beside it.

    Raises:
        ExportError: no layout fits the model, or `output` is there.
        OSError: it cannot be written.
    """
    if output.exists():
        raise ExportError(f"{output} is there already")
    shape = model.shape
    layout = layout_of(shape)
    weights = fold(dict(model.named_parameters()), shape)
    found = {"llama": _llama, "gpt2": _gpt2, "gpt_neox": _gpt_neox}[layout](weights, shape)
    end = _end_of_text(tokenizer)
    described = {**found[1], "vocab_size": shape.vocab, "bos_token_id": end, "eos_token_id": end, "tie_word_embeddings": shape.tied}
    described["torch_dtype"] = str(dtype).removeprefix("torch.")
    beside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        beside.mkdir(parents=True)
        tensors = {name: tensor.to(dtype).contiguous() for name, tensor in found[0].items()}
        _save(tensors, beside / "model.safetensors")
        (beside / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, beside / "tokenizer.json")
            (beside / "tokenizer_config.json").write_text(json.dumps(_of_tokenizer(shape, end), indent=2) + "\n")
        generation = {} if end is None else {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
        (beside / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        for path in (*beside.iterdir(), beside):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        beside.rename(output)
    except OSError as error:
        error.filename = str(output)  # and not the name in between, or the tokenizer that was to be copied
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return layout


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Raises OSError where it cannot be written, which safetensors tells in its own way."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def export_checkpoint(checkpoint: Path, output: Path, *, float32: bool = False) -> str:
    """Write what `export` does from a checkpoint, with its tokenizer where there is one; what was written, in a few words.

    The entry point `hf` of `resilient.exporters`.

    Args:
        checkpoint: a committed one of this trainer.
        output: must not be there.
        float32: weights of 32 bits instead of bfloat16.

    Raises:
        CheckpointError: it is damaged, or holds no model that fits a layout.
        OSError: `output` cannot be written.
    """
    from trainer.restore import RestoreError, restore
    from trainer.sources import tokenizer_of_texts

    try:
        model, config = restore(checkpoint)
        known = tokenizer_of_texts(config)
        dtype = torch.float32 if float32 else torch.bfloat16
        layout = export(model, config, output, dtype=dtype, tokenizer=known if known.is_file() else None)
    except (ExportError, RestoreError) as error:
        if isinstance(error.__cause__, CheckpointError):
            raise error.__cause__ from None
        raise CheckpointMismatch(str(error)) from error
    without = "" if known.is_file() else f", without a tokenizer: there is no {known}"
    return f"{layout}, {model.shape.parameters:,} parameters in {'fp32' if float32 else 'bf16'}{without}"


def layout_of(shape: GPTShape) -> str:
    """`llama`, `gpt2` or `gpt_neox`. Raises ExportError where neither fits."""
    reasons = []
    for name, wanted in (("llama", LLAMA), ("gpt2", GPT2), ("gpt_neox", GPT_NEOX)):
        wrong = [f"{key} {getattr(shape, key)}, not {value}" for key, value in wanted.items() if getattr(shape, key) != value]
        if name != "llama" and shape.kv_heads != shape.heads:
            wrong.append(f"kv_heads {shape.kv_heads}, not {shape.heads}")
        if not wrong:
            return name
        reasons.append(f"{name} does not fit: the model has {', '.join(wrong)}")
    raise ExportError("; ".join(reasons))


def fold(weights: dict[str, Tensor], shape: GPTShape) -> dict[str, Tensor]:
    """The weights of a model that computes the same without μP's multipliers."""
    found = {name: weight.detach().clone() for name, weight in weights.items()}
    if shape.mup_base is None:
        return found
    ratio = shape.attention_scale * shape.head_dim**0.5
    for name, weight in found.items():
        if ".attention.query." in name or name in ("norm.weight", "norm.bias"):
            weight *= ratio if ".query." in name else 1 / shape.width
    return found


def _llama(weights: dict[str, Tensor], shape: GPTShape) -> tuple[dict[str, Tensor], dict[str, Any]]:
    names = {
        "attention_norm": "input_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }
    found = {"model.embed_tokens.weight": weights["embedding.weight"], "model.norm.weight": weights["norm.weight"]}
    if not shape.tied:
        found["lm_head.weight"] = weights["head.weight"]
    for number in range(shape.layers):
        for ours, theirs in names.items():
            for kind in ("weight", "bias") if shape.bias and not ours.endswith("norm") else ("weight",):
                found[f"model.layers.{number}.{theirs}.{kind}"] = weights[f"blocks.{number}.{ours}.{kind}"]
    return found, {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn_hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.seq_len,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "hidden_act": "silu",
        "attention_bias": shape.bias,
        "mlp_bias": shape.bias,
    }


def _bias(weights: Mapping[str, Tensor], name: str, size: int) -> Tensor:
    """Zeros where the model has none, for forms in which there is always one."""
    return weights.get(f"{name}.bias", torch.zeros(size))


def _with_biases(weights: Mapping[str, Tensor], names: Mapping[str, str], *, transposed: bool = False) -> dict[str, Tensor]:
    """Weights and biases of modules under other names. Args: names: theirs by ours."""
    found = {}
    for our, their in names.items():
        weight = weights[f"{our}.weight"]
        found[f"{their}.weight"] = weight.T if transposed else weight
        found[f"{their}.bias"] = _bias(weights, our, len(weight))
    return found


def _gpt2(weights: dict[str, Tensor], shape: GPTShape) -> tuple[dict[str, Tensor], dict[str, Any]]:
    found = {"transformer.wte.weight": weights["embedding.weight"], "transformer.wpe.weight": weights["positions.weight"]}
    if not shape.tied:
        found["lm_head.weight"] = weights["head.weight"]
    norms = {"norm": "transformer.ln_f"}
    for number in range(shape.layers):
        ours, theirs = f"blocks.{number}", f"transformer.h.{number}"
        norms |= {f"{ours}.attention_norm": f"{theirs}.ln_1", f"{ours}.mlp_norm": f"{theirs}.ln_2"}
        parts = [f"{ours}.attention.{part}" for part in ("query", "key", "value")]
        # Its linear layers hold (in, out), and one makes queries, keys and values.
        found[f"{theirs}.attn.c_attn.weight"] = torch.cat([weights[f"{part}.weight"] for part in parts]).T
        found[f"{theirs}.attn.c_attn.bias"] = torch.cat([_bias(weights, part, shape.hidden) for part in parts])
        lines = {"attention.output": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
        found |= _with_biases(weights, {f"{ours}.{our}": f"{theirs}.{their}" for our, their in lines.items()}, transposed=True)
    return found | _with_biases(weights, norms), {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": shape.hidden,
        "n_inner": shape.ffn_hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_positions": shape.seq_len,
        "layer_norm_epsilon": shape.norm_eps,
        "activation_function": "gelu_new",
        "embd_pdrop": shape.dropout,
        "resid_pdrop": shape.dropout,
        "attn_pdrop": shape.attention_dropout,
    }


def _gpt_neox(weights: dict[str, Tensor], shape: GPTShape) -> tuple[dict[str, Tensor], dict[str, Any]]:
    found = {"gpt_neox.embed_in.weight": weights["embedding.weight"]}
    if not shape.tied:
        found["embed_out.weight"] = weights["head.weight"]
    norms = {"norm": "gpt_neox.final_layer_norm"}
    for number in range(shape.layers):
        ours, theirs = f"blocks.{number}", f"gpt_neox.layers.{number}"
        norms |= {f"{ours}.attention_norm": f"{theirs}.input_layernorm", f"{ours}.mlp_norm": f"{theirs}.post_attention_layernorm"}
        parts = [f"{ours}.attention.{part}" for part in ("query", "key", "value")]
        # Head by head its rows make a query, a key and a value.
        fused = torch.stack([weights[f"{part}.weight"].reshape(shape.heads, -1, shape.hidden) for part in parts], dim=1)
        found[f"{theirs}.attention.query_key_value.weight"] = fused.flatten(0, 2)
        fused = torch.stack([_bias(weights, part, shape.hidden).reshape(shape.heads, -1) for part in parts], dim=1)
        found[f"{theirs}.attention.query_key_value.bias"] = fused.flatten()
        lines = {"attention.output": "attention.dense", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}
        found |= _with_biases(weights, {f"{ours}.{our}": f"{theirs}.{their}" for our, their in lines.items()})
    return found | _with_biases(weights, norms), {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn_hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.seq_len,
        "layer_norm_eps": shape.norm_eps,
        "rotary_pct": 1.0,
        "rotary_emb_base": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta, "partial_rotary_factor": 1.0},
        "hidden_act": "gelu_new",
        "use_parallel_residual": False,
        "attention_bias": True,
        "hidden_dropout": shape.dropout,
        "attention_dropout": shape.attention_dropout,
    }


def _of_tokenizer(shape: GPTShape, end: int | None) -> dict[str, Any]:
    """What AutoTokenizer asks for beside tokenizer.json."""
    from trainer.sources import END_OF_TEXT

    special = {} if end is None else dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.seq_len}
    return {**about, "clean_up_tokenization_spaces": False, **special}


def _end_of_text(tokenizer: Path | None) -> int | None:
    if tokenizer is None:
        return None
    from trainer.data.errors import DataError
    from trainer.sources import END_OF_TEXT, tokens_of

    try:
        return tokens_of(tokenizer).get(END_OF_TEXT)
    except DataError as error:
        raise ExportError(str(error)) from error
