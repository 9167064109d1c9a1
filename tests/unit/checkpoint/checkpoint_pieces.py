"""What tests of checkpoints save."""

import torch

from checkpoint import Piece


def pieces(fill: float = 0.0) -> list[Piece]:
    """Two small arrays whose values depend on `fill`, one of them in two pieces."""
    weight = torch.arange(24.0).reshape(6, 4) + fill
    return [
        Piece("model/weight", (6, 4), (0, 0), weight[:4].clone(), (2, 4)),
        Piece("model/weight", (6, 4), (4, 0), weight[4:].clone(), (2, 4)),
        Piece("optimizer/moment", (5,), (0,), torch.linspace(0, 1, 5) * fill, (5,)),
    ]
