"""Data: text to tokens, tokens to samples.

`prepare` and `build` make an indexed dataset as Megatron-LM reads it; `open_split` gives samples of it in an order that is a pure
function of seed, epoch and index. torch is not imported here.
"""

from trainer.data.errors import DataError
from trainer.data.samples import Samples, open_split

__all__ = ["DataError", "Samples", "open_split"]
