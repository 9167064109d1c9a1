"""What the arguments that Megatron-LM keeps in a checkpoint say of the model, as the trainer's own keys. Pure.

Owns refusals: what the trainer's model does not compute is refused by the name of the argument.
"""

from collections.abc import Mapping
from typing import Any

from trainer.conversion.families import Described, ImportRefused

_ATTENTION = ("attention.query", "attention.key", "attention.value")
_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "rotary": "rope", "none": "none", "alibi": "alibi"}

# Arguments that change what is computed, and the values with which they do not; one that is not there changes nothing.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "num_experts": (None, 0),
    "multi_latent_attention": (False, None),
    "mtp_num_layers": (None, 0),
    "qk_layernorm": (False, None),
    "qk_l2_norm": (False, None),
    "attention_output_gate": (False, None),
    "window_size": (None,),
    "apply_layernorm_1p": (False, None),
    "layernorm_zero_centered_gamma": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "squared_relu": (False, None),
    "quick_geglu": (False, None),
    "onnx_safe": (False, None),
    "rotary_interleaved": (False, None),
    "rotary_percent": (1.0, None),
    "rotary_seq_len_interpolation_factor": (None, 1, 1.0),
    "use_rope_scaling": (False, None),
    "no_rope_freq": (None,),
    "softmax_type": ("vanilla", None),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "experimental_attention_variant": (None,),
    "linear_attention_type": (None,),
    "enable_hyper_connections": (False, None),
    "use_mup": (False, None),
    "bert_binary_head": (True, False, None),
    "num_layers_at_start_in_bf16": (0, 1, None),
}


def model_of(args: Mapping[str, Any]) -> Described:
    """The model of a checkpoint's arguments. Raises ImportRefused."""
    for key, allowed in _PLAIN.items():
        if args.get(key) not in allowed:
            raise ImportRefused(f"the source has {key} {args[key]!r}, which this trainer's model does not compute")
    try:
        return _described(args)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise ImportRefused(f"the arguments in the checkpoint are not those of a GPT of Megatron-LM: {error!r}") from error


def _described(args: Mapping[str, Any]) -> Described:
    hidden, heads = _count(args, "hidden_size"), _count(args, "num_attention_heads")
    if (args.get("kv_channels") or hidden // heads) != hidden // heads:
        raise ImportRefused(f"the source has kv_channels {args['kv_channels']}; this trainer's model has {hidden // heads}")
    grouped = bool(args.get("group_query_attention")) and args.get("num_query_groups")
    norm = str(args.get("normalization") or "LayerNorm")
    if norm not in ("LayerNorm", "RMSNorm"):
        raise ImportRefused(f"the source has normalization {norm!r}; this trainer's model has LayerNorm or RMSNorm")
    gated, linear = bool(args.get("swiglu")), bool(args.get("add_bias_linear", True))
    # The exact GELU is computed where the fused one, which is the tanh form, is not.
    if not gated and not args.get("openai_gelu") and not (args.get("bias_gelu_fusion", True) and linear):
        raise ImportRefused("the source has GELU without bias_gelu_fusion, the exact one; this trainer's model has its tanh form")
    biases = set(_ATTENTION) if linear or args.get("add_qkv_bias") else set[str]()
    biases |= {"attention.output", "mlp.gate", "mlp.up", "mlp.down"} if linear else set()
    longest = _count(args, "max_position_embeddings")
    model: dict[str, Any] = {
        **{"layers": _count(args, "num_layers"), "hidden": hidden, "heads": heads},
        **{"kv_heads": _count(args, "num_query_groups") if grouped else heads},
        **{"ffn_hidden": _count(args, "ffn_hidden_size"), "seq_len": longest},
        **_vocabulary(args),
        **_position(args),
        **{"norm": norm.lower(), "norm_eps": float(args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5)},
        **{"mlp": "swiglu" if gated else "gelu", "bias": bool(biases) or norm == "LayerNorm"},
        **{"dropout": float(args.get("hidden_dropout") or 0), "attention_dropout": float(args.get("attention_dropout") or 0)},
        "tie_embeddings": not args.get("untie_embeddings_and_output_weights"),
        "init_std": float(args.get("init_method_std") or 0.02),
    }
    return Described("megatron", model, longest, frozenset(biases), rows=_count(args, "padded_vocab_size"))


def _count(args: Mapping[str, Any], key: str) -> int:
    found = args[key]
    if type(found) is not int or found < 1:
        raise ImportRefused(f"the source has {key} {found!r}, which is no count")
    return found


def _vocabulary(args: Mapping[str, Any]) -> dict[str, int]:
    """Tokens, and the multiple of which there is room for: the padding is that of the source where it follows from both."""
    padded, known = _count(args, "padded_vocab_size"), args.get("vocab_size")
    multiple = (args.get("make_vocab_size_divisible_by") or 1) * (args.get("tensor_model_parallel_size") or 1)
    if type(known) is int and 0 < known <= padded and type(multiple) is int and -(-known // multiple) * multiple == padded:
        return {"vocab_size": known, "vocab_multiple": multiple}
    return {"vocab_size": padded, "vocab_multiple": 1}


def _position(args: Mapping[str, Any]) -> dict[str, Any]:
    given = args.get("position_embedding_type")
    kind = getattr(given, "name", given)
    if args.get("use_rotary_position_embeddings"):
        kind = "rope"
    elif kind is None:
        kind = "learned_absolute" if args.get("add_position_embedding", True) else "none"
    if kind not in _POSITIONS:
        raise ImportRefused(f"the source has position_embedding_type {kind!r}; this trainer's model has {', '.join(_POSITIONS)}")
    theta = {"rope_theta": float(args.get("rotary_base") or 10_000)} if _POSITIONS[kind] == "rope" else {}
    return {"position": _POSITIONS[kind], **theta}
