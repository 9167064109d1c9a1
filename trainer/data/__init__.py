"""Data: text to tokens, tokens to samples.

`trainer.data.build` makes an indexed dataset as Megatron-LM reads it; `open_split` gives samples of it in an order that is a pure
function of seed, epoch and index. torch is not imported here, and numpy and tokenizers only with the first name that needs them, so
that the command line can load its `data` group for nothing.
"""

import importlib
from typing import TYPE_CHECKING

from trainer.data.errors import DataError, StorageError

if TYPE_CHECKING:
    from trainer.data.build import Prepared, prepare
    from trainer.data.samples import Samples, open_split

__all__ = ["DataError", "Prepared", "Samples", "StorageError", "open_split", "prepare"]

_HOMES = {"Prepared": "build", "prepare": "build", "Samples": "samples", "open_split": "samples"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
