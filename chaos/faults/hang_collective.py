"""A worker waits in a collective that the others never come to."""

from chaos.fault import Expectation, Inside
from chaos.injectors.context import RankContext


class HangCollective(Inside):
    """A worker waits in a collective that the others never come to, and they for it in theirs."""

    def expects(self) -> Expectation:
        return Expectation(frozenset({"collective_timeout", "hang"}), frozenset({"restart_workers"}), culprit=True)

    def strike(self, context: RankContext) -> None:
        import torch
        import torch.distributed as dist

        device = "cuda" if "nccl" in dist.get_backend() and torch.cuda.is_available() else "cpu"
        while True:
            dist.broadcast(torch.zeros(1, device=device), src=(context.rank + 1) % context.world_size)
