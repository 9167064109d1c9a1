"""What a Hugging Face `config.json` says, as the trainer's own keys, and where the tensors of its family go.

Owns names and refusals: what the trainer's model does not compute is refused, so that an import always computes what its source
computes. Pure; reads no file.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainer.shape import GPTShape

Part = Literal["whole", "transposed", "columns", "heads", "groups", "halves"]

_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_BUFFERS = re.compile(r".*(rotary_emb\.inv_freq|\.attn\.(bias|masked_bias)|\.attention\.(bias|masked_bias))")


class ImportRefused(Exception):
    """This trainer cannot compute what the source computes, or the source is not what it says."""


class SourceUnusable(ImportRefused):
    """The source is not there, is damaged, or cannot be read."""


@dataclass(frozen=True)
class Piece:
    """Where a parameter comes from.

    Attributes:
        source: tensor of the source.
        part: `whole`; `transposed`: held as (in, out); `columns`: one of three blocks of a transposed matrix, or of its bias;
            `heads`: one of three, query, key and value lying side by side head by head; `groups`: the same group by group, the
            queries of a group before its key and its value; `halves`: one of two blocks.
        index: which of them.
    """

    source: str
    part: Part = "whole"
    index: int = 0


@dataclass(frozen=True)
class Described:
    """A model of another house.

    Attributes:
        family: `model_type` of its config.json.
        model: the trainer's section `model`.
        longest: tokens up to which the source computes the same.
        biases: linear layers of a block that have a bias in the source, by the trainer's names.
        rows: of the source's embedding, where it has room for more tokens than there are.
    """

    family: str
    model: Mapping[str, Any]
    longest: int
    biases: frozenset[str] = frozenset()
    rows: int | None = None


def described(config: Mapping[str, Any], names: Sequence[str]) -> Described:
    """The model that a config.json and the names of the tensors beside it describe. Raises ImportRefused."""
    family = config.get("model_type")
    readers = {"llama": _llama, "mistral": _llama, "qwen2": _llama, "gpt2": _gpt2, "gpt_neox": _gpt_neox}
    if family not in readers:
        raise ImportRefused(f"model_type {family!r} is not known; known are {', '.join(readers)}")
    if config.get("quantization_config"):
        raise ImportRefused("the weights are quantized; import the model that they were made of")
    head = "embed_out.weight" if family == "gpt_neox" else "lm_head.weight"
    tied = config.get("tie_word_embeddings", head not in names)
    try:
        found = readers[family](config, family)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ImportRefused(f"config.json is not what {family} has: {error!r}") from error
    return Described(family, {**found.model, "tie_embeddings": bool(tied), "vocab_multiple": 1}, found.longest, biases=found.biases)


def _llama(config: Mapping[str, Any], family: str) -> Described:
    hidden, heads, longest = config["hidden_size"], config["num_attention_heads"], config["max_position_embeddings"]
    _require("hidden_act", config.get("hidden_act", "silu"), "silu", "swish")
    _require("head_dim", config.get("head_dim") or hidden // heads, hidden // heads)
    window = config.get("sliding_window") if family == "mistral" or config.get("use_sliding_window") else None
    if family == "qwen2" and window is None and "sliding_attention" in (config.get("layer_types") or ()):
        window = config.get("sliding_window")
    if window is not None:
        longest = min(longest, window)
    attention = ["attention.query", "attention.key", "attention.value"] if family == "qwen2" or config.get("attention_bias") else []
    if attention and family != "qwen2":
        attention.append("attention.output")
    mlp = ["mlp.gate", "mlp.up", "mlp.down"] if config.get("mlp_bias") else []
    model = {
        **{"layers": config["num_hidden_layers"], "hidden": hidden, "heads": heads},
        "kv_heads": config.get("num_key_value_heads") or heads,
        **{"ffn_hidden": config["intermediate_size"], "seq_len": longest, "vocab_size": config["vocab_size"]},
        **{"position": "rope", "rope_theta": _theta(config, "rope_theta")},
        **{"norm": "rmsnorm", "norm_eps": config.get("rms_norm_eps", 1e-6), "mlp": "swiglu"},
        "bias": bool(attention or mlp),
    }
    return Described(family, model, longest, frozenset([*attention, *mlp]))


def _gpt2(config: Mapping[str, Any], family: str) -> Described:
    hidden, longest = config["n_embd"], config["n_positions"]
    _require("activation_function", config.get("activation_function", "gelu_new"), *_TANH)
    _require("scale_attn_weights", config.get("scale_attn_weights", True), True)
    _require("scale_attn_by_inverse_layer_idx", config.get("scale_attn_by_inverse_layer_idx", False), False)
    _require("add_cross_attention", config.get("add_cross_attention", False), False)
    model = {
        **{"layers": config["n_layer"], "hidden": hidden, "heads": config["n_head"], "kv_heads": config["n_head"]},
        **{"ffn_hidden": config.get("n_inner") or 4 * hidden, "seq_len": longest, "vocab_size": config["vocab_size"]},
        **{"position": "learned", "norm": "layernorm", "norm_eps": config.get("layer_norm_epsilon", 1e-5), "mlp": "gelu"},
        "bias": True,
        **{"dropout": float(config.get("resid_pdrop", 0.0)), "attention_dropout": float(config.get("attn_pdrop", 0.0))},
    }
    return Described(family, model, longest, frozenset([*_ATTENTION, "mlp.up", "mlp.down"]))


def _gpt_neox(config: Mapping[str, Any], family: str) -> Described:
    hidden, heads, longest = config["hidden_size"], config["num_attention_heads"], config["max_position_embeddings"]
    _require("use_parallel_residual", config.get("use_parallel_residual", True), False)
    _require("hidden_act", config.get("hidden_act", "gelu"), *_TANH)
    rope = config.get("rope_parameters") or {}
    _require("rotary_pct", float(rope.get("partial_rotary_factor", config.get("rotary_pct", 0.25))), 1.0)
    attention = _ATTENTION if config.get("attention_bias", True) else ()
    model = {
        **{"layers": config["num_hidden_layers"], "hidden": hidden, "heads": heads, "kv_heads": heads},
        **{"ffn_hidden": config["intermediate_size"], "seq_len": longest, "vocab_size": config["vocab_size"]},
        **{"position": "rope", "rope_theta": _theta(config, "rotary_emb_base")},
        **{"norm": "layernorm", "norm_eps": config.get("layer_norm_eps", 1e-5), "mlp": "gelu", "bias": True},
        **{"dropout": float(config.get("hidden_dropout", 0.0)), "attention_dropout": float(config.get("attention_dropout", 0.0))},
    }
    return Described(family, model, longest, frozenset([*attention, "mlp.up", "mlp.down"]))


_ATTENTION = ("attention.query", "attention.key", "attention.value", "attention.output")


def _theta(config: Mapping[str, Any], key: str) -> float:
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    for each in (rope, scaling):
        _require("rope_type", each.get("rope_type", each.get("type", "default")), "default")
    return float(rope.get("rope_theta", config.get(key, 10_000.0)))


def _require(key: str, value: object, *allowed: object) -> None:
    if value not in allowed:
        raise ImportRefused(f"the source has {key} {value}, which this trainer's model does not compute; it has {allowed[0]}")


def pieces(source: Described, shape: GPTShape) -> dict[str, Piece | None]:
    """Where each parameter comes from, by its name; None for a bias that the source lacks, which is 0."""
    names = {"gpt2": _of_gpt2, "gpt_neox": _of_gpt_neox}.get(source.family, _of_llama)()
    return placed(source, shape, *names)


def placed(source: Described, shape: GPTShape, outer: Mapping[str, str], inner: Mapping[str, Piece]) -> dict[str, Piece | None]:
    """`pieces` from the names outside of the layers, and those in a layer, whose number takes the place of `{}`."""
    found: dict[str, Piece | None] = {}
    for weight in shape.weights():
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", weight.name)
        if match is None:
            found[weight.name] = Piece(outer[weight.name])
        elif match[3] == "bias" and not match[2].endswith("norm") and match[2] not in source.biases:
            found[weight.name] = None
        else:
            piece = inner[match[2]]
            # A bias has no columns to transpose.
            part = "whole" if match[3] == "bias" and piece.part == "transposed" else piece.part
            found[weight.name] = Piece(f"{piece.source.format(match[1])}.{match[3]}", part, piece.index)
    return found


def left_over(names: Sequence[str], used: Sequence[Piece | None], shape: GPTShape) -> list[str]:
    """Tensors of the source that nothing is made of: neither buffers nor a head that is the embedding."""
    known = {piece.source for piece in used if piece is not None}
    heads = {"lm_head.weight", "embed_out.weight"} if shape.tied else set()
    return sorted(name for name in names if name not in known | heads and not _BUFFERS.fullmatch(name))


def _of_llama() -> tuple[dict[str, str], dict[str, Piece]]:
    outer = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
    inner = {
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
    return outer, {ours: Piece(f"model.layers.{{}}.{theirs}") for ours, theirs in inner.items()}


def _of_gpt2() -> tuple[dict[str, str], dict[str, Piece]]:
    outer = {
        "embedding.weight": "transformer.wte.weight",
        "positions.weight": "transformer.wpe.weight",
        "norm.weight": "transformer.ln_f.weight",
        "norm.bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
    }
    layer = "transformer.h.{}."
    fused = {f"attention.{name}": Piece(f"{layer}attn.c_attn", "columns", index) for index, name in enumerate(_FUSED)}
    return outer, {
        "attention_norm": Piece(f"{layer}ln_1"),
        **fused,
        "attention.output": Piece(f"{layer}attn.c_proj", "transposed"),
        "mlp_norm": Piece(f"{layer}ln_2"),
        "mlp.up": Piece(f"{layer}mlp.c_fc", "transposed"),
        "mlp.down": Piece(f"{layer}mlp.c_proj", "transposed"),
    }


def _of_gpt_neox() -> tuple[dict[str, str], dict[str, Piece]]:
    outer = {
        "embedding.weight": "gpt_neox.embed_in.weight",
        "norm.weight": "gpt_neox.final_layer_norm.weight",
        "norm.bias": "gpt_neox.final_layer_norm.bias",
        "head.weight": "embed_out.weight",
    }
    layer = "gpt_neox.layers.{}."
    fused = {f"attention.{name}": Piece(f"{layer}attention.query_key_value", "heads", index) for index, name in enumerate(_FUSED)}
    return outer, {
        "attention_norm": Piece(f"{layer}input_layernorm"),
        **fused,
        "attention.output": Piece(f"{layer}attention.dense"),
        "mlp_norm": Piece(f"{layer}post_attention_layernorm"),
        "mlp.up": Piece(f"{layer}mlp.dense_h_to_4h"),
        "mlp.down": Piece(f"{layer}mlp.dense_4h_to_h"),
    }


_FUSED = ("query", "key", "value")
