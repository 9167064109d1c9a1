"""The process groups of a worker: how long they wait, and where in the store they find each other.

They wait for what the runtime asks for, in place of torch's 10 minutes (NCCL) or 30 (gloo). A script that passes no timeout, and
every group that is made behind its back (those of a device mesh among them), follow. Where it passes one of its own, that holds.
"""

import importlib
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit, urlunsplit

PREFIX_VARIABLE = "RESILIENT_STORE_PREFIX"
AGENT_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Address(NamedTuple):
    """At which a store is served."""

    host: str
    port: int


class Group(NamedTuple):
    """What a process joins: the address that its `init_method` names, its rank there, and how many ranks meet."""

    address: Address
    rank: int
    world_size: int


def wait_at_most(seconds: float) -> None:
    """The default timeout of process groups of this process, from now on."""
    from torch.distributed import distributed_c10d

    distributed_c10d.default_pg_timeout = timedelta(seconds=seconds)
    distributed_c10d.default_pg_nccl_timeout = timedelta(seconds=seconds)  # type: ignore[attr-defined]


def meet_below(prefix: str) -> None:
    """Have what joins by `env://` or `tcp://` in this process, from now on, meet in the runtime's store, below a prefix that only
    the ranks know.

    At an address of the script's own nobody serves a store: torch leaves that to the agent. Each group has keys of its own, for one
    that was destroyed leaves the addresses of its ranks behind. A program of its own that a script starts joins where torchrun's
    environment says, without the prefix, and so do all its like.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    # By name, for torch.distributed has a function that is called the same.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    ours = Address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    node, procs = os.environ.get("GROUP_RANK", "0"), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def join(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        group = asked_for(url, os.environ)
        if group is None or not served_by_agent(group, ours, os.environ):
            yield from torchs[urlsplit(url).scheme](url, **options)
            return
        for joined, rank, world_size in torchs["tcp"](url_at(ours, group), **options):
            store = PrefixStore(f"{prefix}/{place_of(group, ours, node, procs)}", joined)
            yield PrefixStore(str(number_of(store, rank)), store), rank, world_size

    torchs = {scheme: handlers[scheme] for scheme in ("env", "tcp")}
    handlers.update(dict.fromkeys(torchs, join))


def asked_for(url: str, environ: Mapping[str, str]) -> Group | None:
    """The group that a process joins by an `init_method`; None where something is missing or is no number: torch says so."""
    parts = urlsplit(url)
    said = dict(parse_qsl(parts.query))
    try:
        if parts.scheme == "env":
            address = Address(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
            said = {"rank": environ.get("RANK", ""), "world_size": environ.get("WORLD_SIZE", ""), **said}
        else:
            address = Address(parts.hostname or "", parts.port or 0)
        group = Group(address, int(said["rank"]), int(said["world_size"]))
    except (KeyError, ValueError):
        return None
    return group if all(address) else None


def served_by_agent(group: Group, ours: Address, environ: Mapping[str, str]) -> bool:
    """Whether no rank serves the store of this group: a script may have taken back that an agent does."""
    return group.address == ours or environ.get(AGENT_VARIABLE) == "True"


def place_of(group: Group, ours: Address, node: str, procs: int) -> str:
    """Where in the runtime's store the groups of an address meet, those of each size by themselves.

    Args:
        node: number of this node. On each node localhost is another one, unless the group has more ranks than the node.
        procs: ranks of this node.
    """
    if group.address == ours:
        return f"of {group.world_size}"
    host, port = group.address
    of_node = f" on node {node}" if host in _LOOPBACK and group.world_size <= procs else ""
    return f"of {group.world_size} at {host}:{port}{of_node}"


def number_of(store: Any, rank: int) -> int:
    """The number of the group that comes together in a place of the store: how often one has had this rank, this one included.

    A process that is in some of them only, or has another rank in each, so has the same number as those that it meets.
    """
    number: int = store.add(f"groups with rank {rank}", 1)
    return number


def url_at(address: Address, group: Group) -> str:
    """How torch's handler of `tcp://` joins this group at another address."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"tcp://{host}:{address.port}?rank={group.rank}&world_size={group.world_size}"


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
