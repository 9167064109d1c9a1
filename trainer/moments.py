"""What an optimizer keeps of each parameter, by the config's name of it. Without torch."""

from trainer.shape import GPTShape, Weight

ADAMW = ("exp_avg", "exp_avg_sq")
_KEPT = {
    "adamw": ADAMW,
    "adan": ("exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad"),
    "muon": ("momentum_buffer",),
}


def rule(name: str, weight: Weight) -> str:
    """By which optimizer a parameter is updated: Muon is for the inner matrices alone, AdamW beside it for the rest."""
    return "adamw" if name == "muon" and weight.kind != "matrix" else name


def moments(name: str, weight: Weight) -> tuple[str, ...]:
    """The tensors of its size that are kept of a parameter."""
    return _KEPT[rule(name, weight)]


def all_moments(name: str, shape: GPTShape) -> tuple[int, int, int]:
    """Of a whole model: numbers that are kept, arrays of a checkpoint that hold them, and kinds of them."""
    outside = [*shape.first(), *shape.last()]
    layer = shape.layer(0)
    numbers = sum(weight.size * len(moments(name, weight)) for weight in outside)
    numbers += shape.layers * sum(weight.size * len(moments(name, weight)) for weight in layer)
    kinds = [each for weight in (*outside, *layer) for each in moments(name, weight)]
    return numbers, len(kinds), len(set(kinds))
