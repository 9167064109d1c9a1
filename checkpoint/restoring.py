"""Restoring: all ranks go on from the newest step that is whole, wherever its node shards lie.

Owns the choice: newest first, and of one step the nearest copy first; every rank reads what it needs and checks each chunk of it,
and all agree before they go on. Each byte is read once: what no rank needs is verified by the first.
"""

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from checkpoint import manifest, metadata
from checkpoint.agreement import Ranks
from checkpoint.asking import answers
from checkpoint.candidates import Candidate
from checkpoint.copies import Copies
from checkpoint.errors import (
    PAUSES_S,
    CheckpointMismatch,
    DamagedCheckpoint,
    NoReachableCheckpoint,
    NoUsableCheckpoint,
    UnreachableCheckpoint,
)
from checkpoint.loading import Seals, contents_of, fill
from checkpoint.local_shard import LocalShard
from checkpoint.metadata import Contents
from checkpoint.naming import step_path, steps
from checkpoint.source import Source
from checkpoint.state import JSON
from checkpoint.verification import verify_rest

log = logging.getLogger(__name__)

LIST_S = 20.0  # for a directory of committed checkpoints, where nodes hold something to go on from

NO_RANK_S = "each rank has written a part of what all should have had alike, and they differed: together it is no rank's state"

LocalShardsFor = Callable[[Mapping[str, JSON]], Sequence[LocalShard]]
Alike = Callable[[], Sequence[Hashable]]


@dataclass(frozen=True)
class Restored:
    """What was gone on from."""

    step: int
    tier: str
    state: Mapping[str, JSON]


def restore(
    root: Path,
    local_shards: LocalShardsFor,
    *,
    tier: str = "durable",
    held: Sequence[Candidate] = (),
    group: dist.ProcessGroup | None = None,
    on_reject: Callable[[int, str, str], None] | None = None,
    alike: Alike | None = None,
    durable_step: int = 0,
) -> Restored | None:
    """Fill the local shards' tensors from the newest step that is whole. Collective: all ranks return or raise alike.

    Args:
        root: of committed checkpoints, shared by all ranks.
        local_shards: this rank's, for a checkpoint with such a state.
        tier: what `root` is called.
        held: steps of which nodes hold shards; the same steps in the same order on all ranks.
        group: as for `save`.
        on_reject: called on rank 0 with step, tier and reason of each one that is damaged.
        alike: of what was just read, values of which all that the ranks have must be equal: they stand for what several ranks wrote
            a part of each, and where they differ these are parts of different things, and the step counts as damaged.
        durable_step: the newest step that is known to be committed: where `root` cannot be listed, nothing older is gone on from.

    Returns None if there is nothing at all. Raises NoUsableCheckpoint if there is something and nothing is good;
    NoReachableCheckpoint if there is something that may be good, but nobody answers where it is; CheckpointMismatch if it is of
    another model; CheckpointError if the directory cannot be read.
    """
    ranks = Ranks(group)
    committed, away = ranks.first(lambda: _committed(root, wanted=not held))
    choices = [Candidate(step, tier, step_path(root, step)) for step in committed]
    rejected: list[tuple[int, str]] = []
    unreachable = bool(away)
    if away and durable_step:
        held = [each for each in held if each.step >= durable_step]
        rejected.append((durable_step, away))
    for choice in sorted([*held, *choices], key=lambda each: (-each.step, each.path is not None)):
        found = _restore_one(choice, local_shards, alike, ranks)
        if isinstance(found, Restored):
            return found
        unreachable |= found.unreachable
        rejected.append((choice.step, found.reason))
        if ranks.rank == 0 and on_reject is not None:
            on_reject(choice.step, choice.tier, found.reason)
    if unreachable:
        raise NoReachableCheckpoint(root, rejected)
    if rejected:
        raise NoUsableCheckpoint(root, rejected)
    return None


def _committed(root: Path, *, wanted: bool) -> tuple[list[int], str]:
    """The committed steps; none where their directory cannot be listed, and why.

    Args:
        wanted: there is nothing else to go on from. Raises OSError then, and waits for it.
    """
    if wanted:
        return steps(root), ""
    answer = answers(steps, [root], LIST_S).get(root)
    if isinstance(answer, list):
        return answer, ""
    away = f"{root} cannot be read: {f'no answer within {LIST_S:g} s' if answer is None else answer.strerror}"
    log.warning("%s", away)
    return [], away


@dataclass(frozen=True)
class _Rejection:
    """Why a step cannot be gone on from. `unreachable`: it may be sound, but nobody answers where it is."""

    reason: str
    unreachable: bool = False


def _restore_one(choice: Candidate, local_shards: LocalShardsFor, alike: Alike | None, ranks: Ranks) -> Restored | _Rejection:
    """Go on from one step. Collective; what cannot be reached is tried again. Raises CheckpointMismatch."""
    for pause_s in (*PAUSES_S, None):
        attempt = _attempt(choice, local_shards)
        values = tuple(alike()) if alike is not None and attempt.complete else ()
        outcomes: list[_Outcome] = ranks.all(_Outcome(attempt.rejection, attempt.mismatch, values))
        if any(outcome.mismatch for outcome in outcomes):
            raise CheckpointMismatch(next(outcome.mismatch for outcome in outcomes if outcome.mismatch))
        rejections = [outcome.rejection for outcome in outcomes if outcome.rejection is not None]
        if not rejections and len({value for outcome in outcomes for value in outcome.values}) > 1:
            rejections = [_Rejection(NO_RANK_S)]
        if not rejections and choice.path is not None:
            rejections = [each for each in [_rest(ranks, choice.path, attempt.seals)] if each is not None]
        if not rejections:
            return Restored(choice.step, choice.tier, attempt.state)
        worst = min(rejections, key=lambda each: each.unreachable)
        if pause_s is None or not worst.unreachable:
            break
        time.sleep(pause_s)
    return worst


@dataclass(frozen=True)
class _Outcome:
    rejection: _Rejection | None = None
    mismatch: str | None = None
    values: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class _Attempt:
    rejection: _Rejection | None = None
    mismatch: str | None = None
    state: Mapping[str, JSON] = field(default_factory=dict)
    seals: Seals = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.rejection is None and self.mismatch is None


def _attempt(choice: Candidate, local_shards: LocalShardsFor) -> _Attempt:
    """Fill this rank's tensors."""
    away: list[UnreachableCheckpoint] = []
    try:
        with ExitStack() as opened:
            contents, sources = _sources(choice, away, opened)
            where = choice.path or next(iter(sources)).path
            return _Attempt(None, None, contents.state, fill(where, contents, sources, local_shards(contents.state)))
    except DamagedCheckpoint as error:
        cause = away[0] if away else error
        return _Attempt(_Rejection(cause.reason, isinstance(cause, UnreachableCheckpoint)))
    except CheckpointMismatch as error:
        return _Attempt(mismatch=str(error))


def _sources(choice: Candidate, away: list[UnreachableCheckpoint], opened: ExitStack) -> tuple[Contents, Iterable[Source]]:
    """What a step holds, and where. Args: away: to it are added the copies that may be there, and do not answer."""
    if choice.path is not None:
        contents, source = contents_of(choice.path)
        opened.callback(source.close)
        return contents, [source]
    copies = opened.enter_context(closing(Copies(choice, away)))
    return copies.contents, copies


def _rest(ranks: Ranks, path: Path, seals: Seals) -> _Rejection | None:
    """What is wrong with a committed checkpoint beyond the chunks that the ranks have read; the same answer on all."""
    shares = ranks.to_first(seals)

    def check() -> _Rejection | None:
        read: Seals = {}
        for share in shares:
            for name, found in share.items():
                read.setdefault(name, {}).update(found)
        try:
            contents = manifest.read(path)
            verify_rest(path, contents, metadata.read(path, contents.files).arrays, read)
        except DamagedCheckpoint as error:
            return _Rejection(error.reason, isinstance(error, UnreachableCheckpoint))
        return None

    return ranks.first(check)
