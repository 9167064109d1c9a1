"""Configs and models so small that a test builds one in a moment."""

from resilient.worker import Config
from trainer.model import GPT
from trainer.shape import GPTShape, shape_of


def config(**sections: dict[str, object]) -> Config:
    small = {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 32, **sections.pop("model", {})}
    return Config.model_validate({"model": small, **sections})


def gpt(given: Config, vocab: int = 100) -> tuple[GPT, GPTShape]:
    shape = shape_of(given, vocab)
    return GPT(shape), shape


SHAPES = [
    {},
    {"mlp": "gelu"},
    {"norm": "layernorm"},
    {"kv_heads": 2},
    {"tie_embeddings": True},
    {"ffn_hidden": 96},
    {"bias": True, "norm": "layernorm", "position": "learned"},
]
