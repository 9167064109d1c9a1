"""The process groups of a worker: how long they wait, and where in the store they find each other.

They wait for what the runtime asks for, in place of torch's 10 minutes (NCCL) or 30 (gloo). A script that passes no timeout, and
every group that is made behind its back (those of a device mesh among them), follow. Where it passes one of its own, that holds.
"""

import importlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit, urlunsplit

PREFIX_VARIABLE = "RESILIENT_STORE_PREFIX"


def wait_at_most(seconds: float) -> None:
    """The default timeout of process groups of this process, from now on."""
    from torch.distributed import distributed_c10d

    distributed_c10d.default_pg_timeout = timedelta(seconds=seconds)
    distributed_c10d.default_pg_nccl_timeout = timedelta(seconds=seconds)  # type: ignore[attr-defined]


def meet_below(prefix: str) -> None:
    """Have what joins by `env://` in this process, from now on, keep all its keys below a prefix that only the ranks know.

    A program of its own that a script starts joins where torchrun's environment says, without the prefix, and so do all its like.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    # By name, for torch.distributed has a function that is called the same.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    joined = handlers["env"]

    def join(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, world_size in joined(url, **options):
            yield PrefixStore(prefix, store), rank, world_size

    handlers["env"] = join


def meet_in_files_of(generation: int) -> None:
    """Have what joins by `file://` in this process, from now on, use a file of its own in each generation but the first one.

    The file of a generation that was killed is full of the addresses of its ranks.
    """
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    joined = handlers["file"]

    def join(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        parts = urlsplit(url)
        yield from joined(urlunsplit(parts._replace(path=f"{parts.path}.{generation}")), **options)

    if generation > 1:
        handlers["file"] = join
