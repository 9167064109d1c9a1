"""Parallelism, applied to a plain model from outside.

`ranks` is the mesh; `tensor`, `recompute` and `data` change a model in place, in this order; `build` applies them.
"""

from trainer.parallel.build import build_stages
from trainer.parallel.data import begin_backward, reshard
from trainer.parallel.pipeline import ReducingStage
from trainer.parallel.ranks import Ranks, make_ranks, sharing

__all__ = ["Ranks", "ReducingStage", "begin_backward", "build_stages", "make_ranks", "reshard", "sharing"]
