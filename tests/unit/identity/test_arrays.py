"""Which changes give a model other arrays than its checkpoints hold."""

import pytest

from resilient.config import load
from resilient.identity.arrays import reshaped
from resilient.identity.fingerprint import keys_of
from resilient.run_words import NO_CONFIG

LEARNED, FEW = "model.position=learned", "model.kv_heads=2"


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ((), ("model.layers=2",), ("model.layers",)),
        ((), ("model.hidden=512",), ("model.hidden", "model.ffn_hidden")),
        ((), ("model.ffn_hidden=64",), ("model.ffn_hidden",)),
        ((), ("model.mlp=gelu",), ("model.ffn_hidden", "model.mlp")),
        ((), ("model.bias=true",), ("model.bias",)),
        ((), ("model.tie_embeddings=true",), ("model.tie_embeddings",)),
        ((), ("optimizer.name=adan",), ("optimizer.name",)),
        # Keys of which only some values are another width, or another vocabulary.
        ((), ("model.heads=4",), ()),
        ((FEW,), (FEW, "model.heads=4"), ("model.heads",)),
        ((), (FEW,), ("model.kv_heads",)),
        ((), ("model.position=alibi",), ()),
        ((), (LEARNED,), ("model.position",)),
        ((), ("model.seq_len=512",), ()),
        ((LEARNED,), (LEARNED, "model.seq_len=512"), ("model.seq_len",)),
        ((), ("model.norm=layernorm",), ()),
        (("model.bias=true",), ("model.bias=true", "model.norm=layernorm"), ("model.norm",)),
        ((), ("data.tokenizer.vocab_size=4090",), ()),
        ((), ("data.tokenizer.vocab_size=600",), ("data.tokenizer.vocab_size",)),
        ((), ("model.vocab_size=4096",), ()),
        ((), ("model.vocab_size=5000",), ("model.vocab_size",)),
        ((), ("model.vocab_multiple=5000",), ("model.vocab_multiple",)),
        # What is not known of one of the two is not judged.
        ((), ("data.text=null", "data.path=x"), ()),
        (("entrypoint=train.py",), ("model.layers=2",), ()),
        # What leaves all arrays as they are.
        ((), ("seed=7", "model.norm_eps=0.1", "model.rope_theta=1", "model.dropout=0.1", "optimizer.beta1=0.5"), ()),
    ],
)
def test_the_keys_that_change_arrays_are_named(before: tuple[str, ...], after: tuple[str, ...], named: tuple[str, ...]):
    assert reshaped(*(keys_of(load(NO_CONFIG, settings), None) for settings in (before, after))) == named


def test_what_a_damaged_or_older_fingerprint_does_not_say_is_not_judged():
    whole = keys_of(load(NO_CONFIG, [LEARNED, FEW]), None)
    assert reshaped({}, whole) == () == reshaped(whole, {})
    assert reshaped({**whole, "model.heads": 0, "model.seq_len": "x", "model.vocab_multiple": True}, whole) == ()
