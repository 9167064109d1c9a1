"""What tests of checkpoints save."""

import torch

from checkpoint import LocalShard


def local_shards(fill: float = 0.0) -> list[LocalShard]:
    """Two small arrays whose values depend on `fill`, one of them in two local shards."""
    weight = torch.arange(24.0).reshape(6, 4) + fill
    return [
        LocalShard("model/weight", (6, 4), (0, 0), weight[:4].clone(), (2, 4)),
        LocalShard("model/weight", (6, 4), (4, 0), weight[4:].clone(), (2, 4)),
        LocalShard("optimizer/moment", (5,), (0,), torch.linspace(0, 1, 5) * fill, (5,)),
    ]
