"""The process groups of a layout: those that communicate, and no others."""

from itertools import product
from math import prod

import pytest
import torch
from trainer_ranks import run_ranks

from resilient.config import Config, Layout, layout
from trainer.parallel import make_ranks

Place = tuple[int, int, int, int]  # in pp, dp, cp, tp
Members = tuple[int, ...]


def _groups(laid_out: Layout) -> tuple[list[tuple[str, Members]], Place, Members]:
    """On one rank: its groups by backend and ranks, its place, and who shards parameters with it."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    dist.init_process_group("gloo")
    ranks = make_ranks(torch.device("cpu"), laid_out)
    found = [(backend, tuple(dist.get_process_group_ranks(group))) for group, (backend, _) in _world.pg_map.items()]
    place = (ranks.pp_rank, ranks.dp_rank, ranks.cp_rank, ranks.tp_rank)
    dist.barrier()  # who leaves while others still connect looks to them as if it had died
    return found, place, tuple(ranks.shards.mesh.flatten().tolist())


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 1, 2), (2, 1, 1, 2), (2, 2, 1, 1), (1, 1, 2, 2), (1, 2, 2, 1)], ids=str
)
def test_ranks_connect_only_within_dimensions_of_more_than_one(sizes: Place):
    pp, _, cp, tp = sizes
    world = prod(sizes)
    config = Config.model_validate({"parallel": {"tp": tp, "cp": cp, "pp": pp}, "cluster": {"procs_per_node": world}})
    places = list(product(*map(range, sizes)))

    def together(place: Place, varying: tuple[int, ...]) -> Members:
        """Ranks that differ from a place in these dimensions alone."""
        return tuple(
            r
            for r, other in enumerate(places)
            if all(a == b or n in varying for n, (a, b) in enumerate(zip(place, other, strict=True)))
        )

    found = run_ranks(world, _groups, layout(config, cpu_count=world, gpu_count=0))
    for (groups, place, shards), expected in zip(found, places, strict=True):
        wanted = {together(expected, varying) for varying in [(0,), (1,), (2,), (3,), (1, 2)]} | {tuple(range(world))}
        talking = [members for backend, members in groups if backend != "fake"]
        shared = [together(expected, (1, 2))] if cp > 1 and sizes[1] == 1 else []  # beside that of cp, so that both run at once
        assert sorted(talking) == sorted([*shared, *(members for members in wanted if len(members) > 1 or world == 1)])
        assert (place, shards) == (expected, together(expected, (1, 2)))
