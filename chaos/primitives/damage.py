"""Damage to checkpoints: which one is hit, and what makes that it is read.

A damaged checkpoint shows only when something reads it. So these faults end a rank, after they have damaged what the next attempt
will read first; where that is a durable checkpoint, what nodes hold that is newer is lost as well. An injector does that on its own
machine alone, which therefore has to be that of all nodes.
"""

import contextlib
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import psutil
from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext, Target
from chaos.injectors.guard import Guard
from chaos.primitives.processes import TAKES_S, continues, end, is_gone, until
from chaos.primitives.tiers import TargetTier, find_tier, find_tiers
from checkpoint.naming import step_path, steps

SETTLE_S = 0.2  # in which a snapshot daemon seals what was copied
POLL_S = 0.01


class Damage(Outside):
    """Base of faults that damage a checkpoint."""

    aim = Aim.RANK
    needs = frozenset({Need.ONE_MACHINE})
    undone = "not: the damaged checkpoint stays, passed over by every reader, until retention deletes it"

    tier: Literal["durable", "memory"] = Field("durable", description="whose newest checkpoint is hit")
    then_kill: bool = Field(
        True,
        description="kill the rank that is aimed at, so that it is read; for a durable one, all that nodes here hold in parts is "
        "lost as well",
    )

    def expects(self) -> Expectation:
        if not self.then_kill:
            return Expectation(rejected=True)
        # A snapshot that was being taken while all of them were lost is told of as well.
        kinds, actions = frozenset({"exit", "storage"}), frozenset({"restart_workers", "degrade_tier"})
        return Expectation(kinds, actions, lost_steps=None, rejected=True)

    def inject(self, context: InjectionContext) -> Evidence:
        tier = find_tier(context, self.tier)
        with contextlib.ExitStack() as paused:
            stopped = paused.enter_context(_workers_stopped(context, tier)) if tier.kind == "memory" else []
            with _daemons_stopped(context):
                step = _newest(tier)
                evidence = self.damage(step_path(tier.root, step), context)
                if self.then_kill:
                    end(context.worker())
                    if tier.kind == "durable":
                        for each in find_tiers(context):
                            lose(each, context.guard)
            if self.then_kill:
                _wait_for_their_ends(stopped)
        return {"step": step, "tier": tier.name, **evidence}

    def damage(self, checkpoint: Path, context: InjectionContext) -> Evidence:
        """Do it to this one; where, and what was there."""
        raise NotImplementedError


def lose(tier: TargetTier, guard: Guard) -> list[str]:
    """Delete all parts that this machine's nodes have on a tier, at once as far as a reader sees; which directories.

    Args:
        guard: goes on with it where this process is killed meanwhile.
    """
    gone = []
    for root in tier.roots if tier.kind != "durable" else ():
        with contextlib.suppress(FileNotFoundError):
            aside = root.with_name(f".lost-{root.name}-{secrets.token_hex(4)}")
            guard.add(["rm", "-rf", str(aside)])
            root.rename(aside)
            shutil.rmtree(aside)
            gone.append(str(root))
    return gone


def _newest(tier: TargetTier) -> int:
    """The step to hit. Raises CannotInject where there would be nothing left to go back to."""
    found = steps(tier.root) if tier.kind == "durable" else sorted(_held(tier))
    if len(found) < 2:
        raise CannotInject(f"tier {tier.name} has {len(found)} checkpoints: none is left to go back to")
    return found[-1]


def _held(tier: TargetTier) -> set[int]:
    """The steps of which every node here has a part."""
    return set.intersection(*({int(path.name[5:]) for path in root.glob("step-*")} for root in tier.roots if root.exists()))


@contextlib.contextmanager
def _workers_stopped(context: InjectionContext, tier: TargetTier) -> Iterator[list[psutil.Process]]:
    """No snapshot is taken meanwhile, and those that were are sealed. Short enough not to be taken for a fault of its own."""
    workers = context.workers()
    for worker in workers:
        context.guard.add(continues(worker))
        worker.suspend()
    try:
        seen, since = _held(tier), time.monotonic()
        while time.monotonic() - since < SETTLE_S:
            time.sleep(POLL_S)
            if (now := _held(tier)) != seen:
                seen, since = now, time.monotonic()
        yield workers
    finally:
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.resume()


def _wait_for_their_ends(stopped: list[psutil.Process]) -> None:
    """Return when the runtime has ended these peers of a rank that was killed, or some seconds later.

    A peer that went on before could finish the snapshot of the next step, of which the killed rank had copied its part: a later
    one than that which was damaged, and sound.
    """
    with contextlib.suppress(CannotInject):
        until(lambda: all(is_gone(each) for each in stopped), "")


@contextlib.contextmanager
def _daemons_stopped(context: InjectionContext) -> Iterator[None]:
    """No snapshot is sealed meanwhile, and none is on its way to the durable tier."""
    daemons = [replace(context, target=Target(node=node)).snapshot_daemon() for node in range(context.config.cluster.slots)]
    durable = find_tier(context, "durable")
    for daemon in daemons:
        context.guard.add(continues(daemon))

    def stop() -> bool:
        for daemon in daemons:
            daemon.suspend()
        if not any(durable.root.glob("step-*.tmp")):
            return True
        for daemon in daemons:
            daemon.resume()
        return False

    until(stop, f"tier {durable.name} is being written to for {TAKES_S:.0f} s on end")
    try:
        yield
    finally:
        for daemon in daemons:
            daemon.resume()
