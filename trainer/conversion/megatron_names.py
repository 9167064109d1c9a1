"""What Megatron-LM calls the parameters of a GPT, in its releases since 2021, and where those of the trainer lie in them. Pure.

One vocabulary for all releases: that of Megatron-core's plain layers, with the global number of the layer.
"""

import re
from collections.abc import Iterable
from typing import Literal

from trainer.conversion.families import Described, Piece, placed
from trainer.shape import GPTShape

Merge = Literal["rows", "columns", "halves", "same"]

_IGNORED = re.compile(r".*(_extra_state.*|inv_freq|\.masked_bias)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_RENAMED = (
    (re.compile(r"^(module\.|model\.)+"), ""),
    (re.compile(r"^language_model\."), ""),
    (re.compile(r"^(encoder|transformer)\."), "decoder."),
    (re.compile(r"^word_embeddings_for_head\."), "output_layer."),
    (re.compile(r"\.(attention|self_attention)\.query_key_value\."), ".self_attention.linear_qkv."),
    (re.compile(r"\.(attention|self_attention)\.dense\."), ".self_attention.linear_proj."),
    (re.compile(r"\.dense_h_to_4h\."), ".linear_fc1."),
    (re.compile(r"\.dense_4h_to_h\."), ".linear_fc2."),
    (re.compile(r"\.linear_qkv\.layer_norm_(weight|bias)$"), r".input_norm.\1"),
    (re.compile(r"\.self_attention\.input_norm\."), ".input_norm."),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r".post_attention_norm.\1"),
    (re.compile(r"\.input_norm\."), ".input_layernorm."),
    (re.compile(r"\.(post_attention_norm|post_attention_layernorm)\."), ".pre_mlp_layernorm."),
    (re.compile(r"\.final_norm\."), ".final_layernorm."),
)

_OUTER = {
    "embedding.weight": "embedding.word_embeddings.weight",
    "positions.weight": "embedding.position_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "norm.bias": "decoder.final_layernorm.bias",
    "head.weight": "output_layer.weight",
}
_INNER = {
    "attention_norm": Piece("input_layernorm"),
    "attention.query": Piece("self_attention.linear_qkv", "groups", 0),
    "attention.key": Piece("self_attention.linear_qkv", "groups", 1),
    "attention.value": Piece("self_attention.linear_qkv", "groups", 2),
    "attention.output": Piece("self_attention.linear_proj"),
    "mlp_norm": Piece("pre_mlp_layernorm"),
    "mlp.gate": Piece("mlp.linear_fc1", "halves", 0),
    "mlp.down": Piece("mlp.linear_fc2"),
}


def settled(name: str) -> str | None:
    """A name of any release, with or without the number of its layer, as Megatron-core's; None of what is no parameter."""
    if _IGNORED.fullmatch(name):
        return None
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def layer_of(name: str) -> tuple[int, str] | None:
    """Number and rest of a parameter's name; None of one outside the layers."""
    found = _LAYER.fullmatch(name)
    return (int(found[1]), found[2]) if found else None


def merge_of(name: str, *, gated: bool) -> Merge:
    """How the parts of tensor-parallel ranks make the whole: one below the other, side by side, the halves of each apart, or all
    have the same."""
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return "columns"
    if gated and ".linear_fc1." in name:
        return "halves"
    return "rows" if re.search(r"(linear_qkv|linear_fc1)\.|word_embeddings\.|output_layer\.", name) else "same"


def pieces(source: Described, shape: GPTShape) -> dict[str, Piece | None]:
    """Where each parameter comes from, by its name; None for a bias that the source lacks, which is 0."""
    up = Piece("mlp.linear_fc1", "halves", 1) if shape.gated else Piece("mlp.linear_fc1")
    inner = {
        ours: Piece(f"decoder.layers.{{}}.{each.source}", each.part, each.index) for ours, each in {**_INNER, "mlp.up": up}.items()
    }
    return placed(source, shape, _OUTER, inner)


def left_over(names: Iterable[str], made: Iterable[Piece | None], *, tied: bool) -> list[str]:
    """Tensors of the source that nothing is made of; a tied head is the embedding."""
    known = {piece.source for piece in made if piece is not None} | ({"output_layer.weight"} if tied else set())
    return sorted(set(names) - known)
