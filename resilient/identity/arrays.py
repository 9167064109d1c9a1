"""Which changes of a config give the model, or its optimizer, other arrays than its checkpoints hold. Pure.

Owns what the keys say of shapes, as the schema describes them. What is not known, such as the vocabulary of a dataset that was
prepared elsewhere, is not judged: whoever loads a checkpoint compares it with what it has.
"""

from collections.abc import Mapping
from typing import Any

Keys = Mapping[str, Any]

OPTIMIZER = "optimizer.name"


def reshaped(before: Keys, now: Keys) -> tuple[str, ...]:
    """The keys that have changed, and give arrays of other names or shapes.

    Args:
        before, now: what keys come to, as a fingerprint has them.
    """
    old, new = _shapes(before), _shapes(now)
    differ = [names for names in old if None not in (old[names], new[names]) and old[names] != new[names]]
    return tuple(name for names in differ for name in names if before.get(name) != now.get(name))


def _shapes(keys: Keys) -> dict[tuple[str, ...], Any]:
    """By the keys that it follows from: each number, or name, that arrays follow from; None where it is not known."""
    alone = ("layers", "hidden", "ffn_hidden", "mlp", "bias", "tie_embeddings")
    return {
        **{(key,): keys.get(key) for key in (f"model.{name}" for name in alone)},
        ("model.norm",): _norm(keys),
        ("model.heads", "model.kv_heads"): _kv_width(keys),
        ("model.position", "model.seq_len"): _positions(keys),
        ("model.vocab_size", "model.vocab_multiple", "data.tokenizer.vocab_size"): _vocabulary(keys),
        (OPTIMIZER,): keys.get(OPTIMIZER),
    }


def _norm(keys: Keys) -> str | None:
    """Norms have gains; those of layernorm have biases too, where the model has any."""
    norm, bias = keys.get("model.norm"), keys.get("model.bias")
    return None if bias is None else norm if bias else "gain"


def _kv_width(keys: Keys) -> int | None:
    hidden, heads, kv_heads = (_count(keys.get(f"model.{name}")) for name in ("hidden", "heads", "kv_heads"))
    return None if hidden is None or heads is None or kv_heads is None else hidden // heads * kv_heads


def _positions(keys: Keys) -> int | None:
    """Rows of learned positions."""
    position = keys.get("model.position")
    return None if position is None else _count(keys.get("model.seq_len")) if position == "learned" else 0


def _vocabulary(keys: Keys) -> int | None:
    """Rows of the embedding. A tokenizer that is trained on the data has as many tokens as it was asked for."""
    tokens = keys.get("model.vocab_size")
    count = _count(keys.get("data.tokenizer.vocab_size") if tokens == "auto" else tokens)
    multiple = _count(keys.get("model.vocab_multiple"))
    return None if count is None or multiple is None else -(-count // multiple) * multiple


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None
