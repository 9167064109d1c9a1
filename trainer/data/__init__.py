"""Data: text to tokens, tokens to samples.

`trainer.data.build` makes an indexed dataset as Megatron-LM reads it; `trainer.data.samples` gives samples of it in an order that
is a pure function of seed, epoch and index. Neither imports torch, and nothing is imported here.
"""
