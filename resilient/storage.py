"""Storage of a campaign: what the configured tiers come to on the nodes. Pure but for what it is told of the machine.

Owns the places: `<tier>/<campaign>-<random>/node<k>` on a node's tier, so that nodes which share a file system, as those of one
machine do, keep out of each other's way, and so that nobody else on the machine can have made that directory first. The random part
is in the run directory's `storage.json`, where the next job finds it, and stays until a directory of that name is somebody else's.
Owns also the identity of a campaign, which lies with its durable checkpoints: where those are gone, nothing
that some tier still holds is taken for theirs, and where their whole place is gone, nothing is begun anew.
"""

import errno
import json
import logging
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from checkpoint import safe_dir
from checkpoint.errors import naming
from checkpoint.fence import fsync_directory
from checkpoint.naming import steps
from checkpoint.typed import built
from resilient.config import Config, ConfigError, Problem
from resilient.config.sections.fault_tolerance import Tier
from resilient.exits import EnvironmentUnusable, ForeseenError

log = logging.getLogger(__name__)

FILE = "storage.json"
IDENTITY = ".identity"
MEMORY = "memory"
_RAM = Path("/dev/shm")
_IN_RAM = ("tmpfs", "ramfs")

Kind = Literal["memory", "node", "durable"]


@dataclass(frozen=True)
class TierStorage:
    """One tier.

    Attributes:
        kind: memory that workers copy into; a slower tier of each node; the one that all nodes share.
        roots: of each node, or of the durable tier the one.
        every_steps, every_s: cadence; both None for a tier that is never due by itself.
        every_cost: in place of them, as often as snapshots take at most this share of the time; in RAM alone.
    """

    name: str
    kind: Kind
    durable: bool
    roots: tuple[str, ...]
    keep_last: int
    keep_every: int | None
    every_steps: int | Literal["auto"] | None
    every_s: float | None
    replicas: bool
    max_bytes_per_s: float | None
    every_cost: float | None = None


@dataclass(frozen=True)
class Storage:
    """All tiers, fastest first; the first one is memory, the last one durable.

    Attributes:
        buffers: snapshots that memory has room for on each node.
        domains: failure domain of each node; empty where the config names none.
        nonce: the random part of the places on the nodes; None in names as earlier versions made them.
    """

    identity: str
    tiers: tuple[TierStorage, ...]
    buffers: int
    domains: tuple[str, ...]
    nonce: str | None = None

    @property
    def memory(self) -> TierStorage:
        return self.tiers[0]

    @property
    def durable(self) -> TierStorage:
        return self.tiers[-1]


def arrange(config: Config, nodes: int, identity: str, in_ram: Mapping[Path, bool], nonce: str | None = None) -> Storage:
    """What the config's tiers come to.

    Args:
        nodes: of the allocation, spares included.
        in_ram: of each tier's path whether a file system in RAM is under it.
        nonce: see `Storage`.
    """
    checkpoint = config.checkpoint
    *before, last = checkpoint.tiers
    campaign = f"{config.name}-{identity}" if nonce is None else f"{config.name}-{identity}-{nonce}"
    memory = before.pop(0) if before and in_ram[before[0].path] else None

    def roots(path: Path, campaign: str = campaign) -> tuple[str, ...]:
        return tuple(str(path / campaign / f"node{node}") for node in range(nodes))

    def place(tier: Tier, kind: Kind, where: tuple[str, ...], keep: int, every: int | Literal["auto"]) -> TierStorage:
        timed = tier.every_s is not None
        return TierStorage(
            name=tier.name,
            kind=kind,
            durable=kind == "durable",
            roots=where,
            keep_last=keep if tier.keep_last == "auto" else tier.keep_last,
            keep_every=tier.keep_every,
            every_steps=None if timed else every if tier.every_steps is None else tier.every_steps,
            every_s=tier.every_s,
            replicas=kind == "memory" if tier.replicas == "auto" else tier.replicas > 0,
            max_bytes_per_s=None if tier.max_mib_s is None else tier.max_mib_s * 2**20,
        )

    if memory is not None:
        first = place(memory, "memory", roots(memory.path), 1, 1)
    else:
        taken = {tier.name for tier in checkpoint.tiers}
        name = next(each for each in (MEMORY, *(f"{MEMORY}{number}" for number in range(2, 99))) if each not in taken)
        own = f"resilient-{os.getuid()}"
        where = roots(_RAM / own) if nonce is None else roots(_RAM, f"{own}-{campaign}")
        cost = checkpoint.memory_cost if not before and checkpoint.memory_cost else None
        first = TierStorage(name, "memory", False, where, 1, None, None, None, False, None, cost)
    middle = [place(tier, "node", roots(tier.path), 2, checkpoint.every_steps) for tier in before]
    end = place(last, "durable", (str(last.path),), 3, checkpoint.every_steps)
    # One is being written; and in a tier that people ask for, one more is on its way to a slower tier.
    buffers = first.keep_last + (2 if memory is not None else 1)
    return Storage(identity, (first, *middle, end), buffers, tuple(config.cluster.domains or ()), nonce)


def needed(found: Storage, tier: TierStorage, nodes: int, size: tuple[int, int], same: int = 1) -> tuple[int, int]:
    """Bytes and files that a tier must have room for: on each node, or the durable one for all of them.

    Args:
        size: bytes and files of one checkpoint.
        same: nodes that hold the same of the state; memory needs no replicas then.
    """
    copies = found.buffers if tier.kind == "memory" else tier.keep_last + 1
    share = 1 if tier.kind == "durable" else nodes // same
    twice = 2 if tier.replicas and nodes > 1 and (same == 1 or tier.kind != "memory") else 1
    return copies * size[0] // share * twice, copies * size[1] * twice


def cost_of_a_kill(found: Storage) -> str:
    """What is computed again after a worker has died."""
    if found.memory.every_cost is not None:
        share = f"{100 * found.memory.every_cost:g} %"
        return (
            f"one step, where a snapshot in RAM of every step takes at most {share} of the time; else as many as make it so little"
        )
    soonest = min((tier.every_steps for tier in found.tiers if isinstance(tier.every_steps, int)), default=None)
    timed = min((tier.every_s for tier in found.tiers if tier.every_s is not None), default=None)
    if soonest == 1:
        return "one step"
    words = [f"up to {soonest} steps"] if soonest is not None else []
    words += [f"what {timed:g} s have brought"] if timed is not None else []
    return ", or ".join(words) or "what was done since the last snapshot, by the interval of Young and Daly"


def lies_in_ram(path: Path) -> bool:
    """Whether a file system in RAM is under a path, which need not be there yet."""
    path = Path(os.path.abspath(path))  # noqa: PTH100 - links are not followed
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    for each in (path, *path.parents):
        if each in mounts:
            return mounts[each] in _IN_RAM
    return False


def storage_of(config: Config, nodes: int, committed: int | None = None) -> Storage:
    """The campaign's storage on this machine. Its identity is made with its durable tier.

    Args:
        committed: the newest step that the ledger tells as durable; None where there is none.

    Raises:
        EnvironmentUnusable: that step was committed in this place, and nothing of the campaign is there now; or a place cannot be
            read, which says nothing of what is there; or the identity is lost.
        ConfigError: it was committed in another place than the one that the config names now, which has nothing of the campaign.
        OSError: a place cannot be written.
    """
    durable = config.checkpoint.tiers[-1].path
    try:
        before = _before(config.run_dir)
        identity, is_new = _identity(config.run_dir, durable, before)
        begun = identity is not None and identity == before.get("identity", identity)
        nothing = committed is not None and not begun and not steps(durable)
    except OSError as error:
        raise EnvironmentUnusable(f"cannot read {error.filename or durable}: {error.strerror}") from error
    if nothing and committed is not None:
        raise _nothing_there(config, committed, before)
    if identity is None:
        identity, is_new = secrets.token_hex(6), True
    if is_new:
        durable.mkdir(parents=True, exist_ok=True)
        _put(durable / IDENTITY, f"{identity}\n")
    in_ram = {tier.path: lies_in_ram(tier.path) for tier in config.checkpoint.tiers}
    nonce = _NO_NONCE if _is_copy(config.run_dir, before) else _nonce_before(before, identity)
    if nonce != _NO_NONCE:
        found = arrange(config, nodes, identity, in_ram, nonce)
        if not taken(found):
            return found
    return arrange(config, nodes, identity, in_ram, secrets.token_hex(8))


def _identity(run_dir: Path, durable: Path, before: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Of the campaign whose durable tier is there, and whether its file is to be written anew; None where there is none.

    Args:
        before: see `_before`.

    Raises:
        OSError: it cannot be read.
        EnvironmentUnusable: its file is damaged, and nothing else tells.
    """
    path = durable / IDENTITY
    try:
        found = path.read_bytes().strip()
    except FileNotFoundError:
        return None, False
    if _IDENTITY.fullmatch(found):
        return found.decode(), False
    kept = before.get("identity", "")
    if _IDENTITY.fullmatch(kept.encode()) and Path(before["tiers"][-1]["roots"][0]) == durable:
        log.warning("%s is damaged, as a crash of its file system leaves it; it is written anew of %s", path, run_dir / FILE)
        return kept, True
    if (run_dir / FILE).exists() or steps(durable):
        raise EnvironmentUnusable(
            f"{path} is damaged, as a crash of its file system leaves it, and {run_dir / FILE} does not tell what was in it: 12 "
            "hexadecimal digits, which the places of snapshots on the nodes have in their names. Write them there; "
            "or delete the file, to go on from the newest durable checkpoint"
        )
    return None, False


_IDENTITY = re.compile(rb"[0-9a-f]{12}")


def _nothing_there(config: Config, step: int, before: Mapping[str, Any]) -> ForeseenError:
    """Nothing of a campaign that has a durable checkpoint is where the config says. Args: before: see `_before`."""
    last = len(config.checkpoint.tiers) - 1
    durable, key = config.checkpoint.tiers[last].path, f"checkpoint.tiers.{last}.path"
    if not before:  # the first job of a fork
        why = f"the campaign goes on from step {step}, and nothing of it is in {durable}: is it mounted?"
        return EnvironmentUnusable(f"{key}: {why}")
    old = Path(before["tiers"][-1]["roots"][0])
    told, anew = f"the ledger says that step {step} was committed on {old}", "To begin anew take another run_dir"
    if old == durable:
        return EnvironmentUnusable(
            f"{told}, where nothing of the campaign is now: is it mounted? If it was moved, name its place as {key}. {anew}"
        )
    why = f"{told}, and nothing of the campaign is in {durable}: set the path back, or move there what lies in the old one. {anew}"
    return ConfigError([Problem(key, str(durable), why)])


_NO_NONCE = ""


def _before(run_dir: Path) -> Mapping[str, Any]:
    """What an earlier job of the campaign has written; empty where there was none, or it is damaged. Raises OSError."""
    try:
        return read(run_dir)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        log.warning("%s; snapshots that an earlier job has left on the nodes are not found", error)
        return {}


def _is_copy(run_dir: Path, before: Mapping[str, Any]) -> bool:
    """Whether what was written is of another run directory, which is still there: its campaign may use the same machines."""
    other = before.get("run_dir")
    if not isinstance(other, str) or other == os.path.abspath(run_dir):  # noqa: PTH100 - as it was written
        return False
    return (Path(other) / FILE).exists() and not Path(other).samefile(run_dir)  # else it was moved


def _nonce_before(before: Mapping[str, Any], identity: str) -> str | None:
    """The random part that an earlier job of the campaign had; `_NO_NONCE` where there was none."""
    nonce = before.get("nonce") if before.get("identity") == identity else _NO_NONCE
    return nonce if nonce is None or (isinstance(nonce, str) and re.fullmatch("[0-9a-f]{16}", nonce)) else _NO_NONCE


def taken(found: Storage) -> list[Path]:
    """Directories of the campaign on this machine's tiers that are not this user's alone: somebody else has made them."""
    places = dict.fromkeys(Path(root).parent for tier in found.tiers if not tier.durable for root in tier.roots)
    return [place for place in places if os.path.lexists(place) and not safe_dir.is_private(place)]


def must_be_there(durable: Path) -> None:
    """Raises FileNotFoundError where the durable tier of a run that has begun is gone; nothing may be made in its place."""
    if not (durable / IDENTITY).exists():
        raise FileNotFoundError(errno.ENOENT, f"{IDENTITY} is not there any more: is the file system mounted?", str(durable))


def write(run_dir: Path, storage: Storage) -> None:
    """Leave it where agents and tools look; it names the run directory, so that a copy is known for one. Raises OSError."""
    written_for = os.path.abspath(run_dir)  # noqa: PTH100 - spelled as the tiers' paths in it are
    _put(run_dir / FILE, json.dumps({"run_dir": written_for, **asdict(storage)}, indent=1))


def _put(path: Path, text: str) -> None:
    """Write a file durably, at once or not at all. Raises OSError."""
    new = path.with_name(f"{path.name}.new")
    with naming(new), new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    fsync_directory(path.parent)


def nonce_of(described: Mapping[str, Any]) -> str:
    """What tells a campaign from all others that have been in its run directory, or in one of the same path.

    Args:
        described: as of `read`; of a campaign that an earlier version began, the identity tells it.
    """
    return str(described.get("nonce") or described["identity"])


def read(run_dir: Path) -> dict[str, Any]:
    """What `write` left, as JSON. Raises OSError, ValueError."""
    try:
        found: dict[str, Any] = json.loads((run_dir / FILE).read_bytes())
        msgspec.convert(found, built(Storage))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{run_dir / FILE} does not describe the tiers of a campaign: {error}") from None
    if not found["tiers"]:
        raise ValueError(f"{run_dir / FILE} names no tier")
    return found
