"""`ckpt flush`: what the nodes of a dead run still hold becomes a committed checkpoint.

Owns finding the node shards, on this machine, and putting them together. A run that is alive does this by itself.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkpoint import commit, run_lease, safe_dir, shard_manifest
from checkpoint.errors import DamagedCheckpoint, in_words, naming
from checkpoint.fence import newest_generation
from checkpoint.marked import must_be_there
from checkpoint.naming import step_path, steps
from checkpoint.ownership import first_not_obeyed
from checkpoint.shard_manifest import ShardManifest
from checkpoint.source import DirectorySource
from checkpoint.tiers import copying, joint_commit
from checkpoint.tiers.copying import Copy
from checkpoint.tiers.pace import Pace
from checkpoint.tools.locations import STORAGE, directory, must_be_its_own, tiers
from checkpoint.tools.refusal import Refusal

IDENTITY = ".identity"
CONTROL = (STORAGE, "config.yaml", run_lease.LOCK, run_lease.LEASE)
"""Files of a run directory that say what is done."""


@dataclass(frozen=True)
class Held:
    """A snapshot of which every node shard is on this machine.

    Attributes:
        copies: of each node's shard the directories that hold it, fastest tier first.
    """

    step: int
    generation: int
    copies: tuple[tuple[Path, ...], ...]
    size_bytes: int


def newest(run_dir: Path, *, group: bool = False) -> tuple[Held | None, Path]:
    """The newest snapshot that can be put together, if it is newer than what is committed; and where those are.

    Args:
        group: whether what members of the caller's groups have written is trusted.

    Raises Refusal where there is no run, where it is alive, where somebody else could have written what this command goes by, and
    where the run directory was copied and its nodes' tiers are those of another.
    """
    run_dir = directory(run_dir)
    why = first_not_obeyed((run_dir, *(run_dir / name for name in CONTROL)), group=group)
    if why is not None:
        raise Refusal(f"{why}; --group trusts the members of your groups (of a run with `run_dir_mode: group`)")
    _refuse_if_alive(run_dir)
    if not (run_dir / STORAGE).is_file():
        raise Refusal(f"{run_dir} is not the directory of a run that was started: there is no {STORAGE}")
    found_tiers = tiers(run_dir)
    must_be_its_own(run_dir, found_tiers)
    *others, durable = found_tiers
    root = durable.roots[0]
    _must_be_mounted(run_dir, root)
    found: dict[tuple[int, int], dict[int, list[tuple[Path, ShardManifest]]]] = {}
    for tier in others:
        for node in tier.roots:
            if not safe_dir.is_safe(node, trusted=durable.roots[0] if node.is_relative_to(durable.roots[0]) else None):
                continue
            for place in (node, *sorted(node.glob("replica-*"))):
                for step in steps(place):
                    path = step_path(place, step)
                    try:
                        node_shard = shard_manifest.read(path)
                    except DamagedCheckpoint:
                        continue
                    found.setdefault((node_shard.step, node_shard.generation), {}).setdefault(node_shard.node, []).append(
                        (path, node_shard)
                    )
    for (step, generation), owners in sorted(found.items(), reverse=True):
        nodes = next(iter(owners.values()))[0][1].nodes
        if set(owners) == set(range(nodes)):
            if _is_committed(root, step):
                break
            copies = tuple(tuple(path for path, _ in owners[node]) for node in range(nodes))
            return Held(step, generation, copies, sum(owners[node][0][1].size_bytes for node in range(nodes))), root
    return None, root


def flush(held: Held, root: Path, progress: Callable[[int], None]) -> Path:
    """Commit a snapshot; its directory.

    Raises DamagedCheckpoint where a node shard is damaged on every copy; OSError, which names the directory where writing failed;
    CheckpointError.
    """
    target = step_path(root, held.step)
    attempt = max(newest_generation(root) or 0, held.generation)
    first: tuple[ShardManifest, dict[str, bytes]] | None = None
    for copies in held.copies:
        error: DamagedCheckpoint | None = None
        for path in copies:
            try:
                node_shard = shard_manifest.read(path)
                documents = shard_manifest.documents(path, node_shard)
                source = DirectorySource(path, chunks=node_shard.chunks)
                with naming(target):
                    copying.flush(source, node_shard, documents, root, attempt, Copy(Pace(None), threading.Event(), progress))
            except DamagedCheckpoint as damage:
                error = damage
                continue
            first = first or (node_shard, documents)
            error = None
            break
        if error is not None:
            raise error
    assert first is not None, "a snapshot has at least one node shard"
    with naming(target):
        joint_commit.finish(*first, root, attempt)
    return target


def _must_be_mounted(run_dir: Path, root: Path) -> None:
    """Raises Refusal where the durable tier's place is not the campaign's: what is made there would be hidden by it later.

    A run directory of an earlier version does not tell.
    """
    identity = json.loads((run_dir / STORAGE).read_bytes()).get("identity")
    if identity is None:
        root.mkdir(parents=True, exist_ok=True)
        return
    try:
        must_be_there(root, IDENTITY, identity)
    except FileNotFoundError as error:
        raise Refusal(f"{in_words(error)}; nothing was written") from error


def _is_committed(root: Path, step: int) -> bool:
    """Whether a checkpoint of this step or a newer one is there, and sound."""
    return any(commit.good(root, each) is not None for each in reversed(steps(root)) if each >= step)


def _refuse_if_alive(run_dir: Path) -> None:
    owner = run_lease.holder(run_dir, run_lease.PATIENCE_S)
    if owner is None:
        if not run_lease.flocked(run_dir):
            return
        owner, _ = run_lease.read(run_dir / run_lease.LEASE)  # it hangs on another machine, and the lock is seen from here
    raise Refusal(f"{run_dir} is in use by {owner or 'another process'}, which flushes by itself; stop that run instead")
