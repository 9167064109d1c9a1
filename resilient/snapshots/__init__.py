"""PROVISIONAL: stands in for the snapshots core until that is merged.

Custody: who holds which part of which step, and what becomes of it; as a state machine without input or output.

A snapshot is in parts, numbered by node rank in the generation that took it; nodes hold parts, their own and their buddies', and
may leave and return. A step is *complete* on a tier once every part is there. What is complete in memory goes on to the tiers that
want it, one job at a time on each, the newest first; to the durable tier in two rounds, for it counts only once all nodes have
flushed and one of them has committed. Keepers forget nothing before they are told that something newer is complete.

News of keepers go in (see `checkpoint.tiers.keeper`), effects come out.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from checkpoint import protocol as p
from resilient.outbox import Outbox, RequestDaemon, WriteEvent
from resilient.protocol.messages import Candidate, Holder, pack
from resilient.rollback import Committed, Void, telling
from resilient.storage import buddies


@dataclass(frozen=True)
class Send:
    node: int
    message: Mapping[str, Any]


Effect = Send | WriteEvent

Key = tuple[int, int]
"""A snapshot: its step, and the generation that took it."""

News = Mapping[str, Any]

FAILURES = 3  # of a job, until its step is given up on that tier
CANDIDATES = 6
LOST = "a node was lost"
CANCELLED = "cancelled"  # the keepers' word for a job that ended because it was told to
SILENT_STEPS = 3  # of which a node has told what became of them; those before are sealed, or will never be


@dataclass(frozen=True)
class TierPlan:
    """What must be known of a tier.

    Attributes:
        keep_last: steps that are kept on a node's tier.
        replicas: whether a buddy keeps a copy of each node's part.
    """

    name: str
    keep_last: int
    replicas: bool = False


@dataclass(frozen=True)
class StoragePlan:
    """The tiers of a campaign, fastest first.

    Attributes:
        memory: where workers copy to.
        others: the nodes' slower tiers.
        durable: which all nodes share.
        slabs: on each node.
        domains: failure domain of each node of the allocation; replicas are kept in another one. Empty: each is its own.
        durable_step: the newest step that is committed.
        durable_steps: all that are committed.
        voids: what earlier jobs have made void.
    """

    memory: TierPlan
    others: tuple[TierPlan, ...]
    durable: TierPlan
    slabs: int
    domains: tuple[str, ...] = ()
    durable_step: int = 0
    durable_steps: tuple[int, ...] = ()
    voids: tuple[Void, ...] = ()

    def tier(self, name: str) -> TierPlan:
        return next(each for each in (self.memory, *self.others, self.durable) if each.name == name)


@dataclass
class Job:
    """One step on its way to one tier.

    Attributes:
        sources: of each part the node that copies it.
        waiting: for these parts.
    """

    number: int
    tier: str
    key: Key
    kind: Literal["copy", "flush", "commit"]
    sources: dict[int, int]
    waiting: set[int]
    began_t: float
    ended_badly: str = ""
    troubled: bool = False


@dataclass
class Replication:
    """One step on its way to the buddies.

    Attributes:
        waiting: of each part that is under way the number of the order, and the nodes it goes from and to.
    """

    key: Key
    waiting: dict[int, tuple[int, int, int]]
    failed: bool = False


@dataclass(frozen=True)
class Held:
    """Where a node has a part on one of its tiers, and whether only for another node."""

    directory: str
    replica: bool


@dataclass
class Snapshot:
    """What is known of a snapshot: of each part who holds it, by (node, tier), and what it cost."""

    parts: int
    holders: dict[int, dict[tuple[int, str], Held]] = field(default_factory=dict)
    size_bytes: int = 0
    stall_s: float = 0.0
    write_s: float = 0.0
    wants: frozenset[str] = frozenset()
    failures: dict[str, int] = field(default_factory=dict)

    def whole_on(self, tier: str) -> bool:
        """Whether a tier has every part, on whatever nodes."""
        return all(any(on == tier for _, on in self.holders.get(part, {})) for part in range(self.parts))

    def whole(self) -> bool:
        """Whether somebody has every part, anywhere."""
        return all(self.holders.get(part) for part in range(self.parts))

    def sources(self) -> dict[int, int]:
        """Of each part the node to copy it from: its own where that is there. Of a whole one."""

        def best(part: int) -> int:
            holders = self.holders[part]
            return min(holders, key=lambda where: (holders[where].replica, where))[0]

        return {part: best(part) for part in range(self.parts)}

    def own(self, tier: str) -> dict[int, tuple[int, Held]]:
        """Of each part the node that has it as its own on a tier, and where."""
        return {
            part: (node, held)
            for part, holders in self.holders.items()
            for (node, on), held in holders.items()
            if on == tier and not held.replica
        }


@dataclass
class _Trouble:
    fault_id: str
    tier: str
    since_t: float


class Custody:
    """See the module. `now` is unix seconds."""

    def __init__(self, plan: StoragePlan) -> None:
        self.plan = plan
        self.durable_step = plan.durable_step
        self.rate_bytes_per_s: float | None = None
        self._members: tuple[int, ...] = ()
        self._buddies: tuple[int | None, ...] = ()
        self._generation = 0
        self._addresses: dict[int, str] = {}
        self._snapshots: dict[Key, Snapshot] = {}
        self._complete: dict[str, list[Key]] = {plan.memory.name: [], **{tier.name: [] for tier in plan.others}}
        self._jobs: dict[str, Job] = {}
        self._pending: dict[str, Key] = {}
        self._replications: dict[str, Replication] = {}
        self._unreached: set[int] = set()  # parts whose node did not answer its buddy the last time
        self._protected: dict[str, Key] = {}  # the newest step of which the buddies have all parts
        self._unprotected: dict[str, Key] = {}  # what buddies could not get hold of
        self._decided = 0
        self._left_out: set[int] = set()  # steps beyond the one that was decided on, which some node does not have
        self._told: dict[int, set[int]] = {}  # by node, the steps beyond that one of which it has said what became of them
        self._holding = True
        self._numbers = itertools.count(1)
        self._troubles: dict[tuple[int, str], _Trouble] = {}
        self._faults = 0
        self._committed_steps = Committed.found(plan.durable_steps, plan.durable.keep_last)
        self._voids = list(plan.voids)
        self._voids_due = bool(plan.voids)  # keepers and the durable tier have not been told of them yet

    # -- what is there -------------------------------------------------------------------------------------------------

    def inventory(self, node: int, news: News) -> None:
        """All that a node holds; whatever was known of it before is forgotten."""
        self._addresses[node] = news["address"]
        self._without(node)
        for entry in news["parts"]:
            if self._void((entry["step"], entry["generation"])):
                self._voids_due = True  # of a keeper that was not there to be told, or died over it
            else:
                self._holds(node, entry)
        self._still_complete()

    def lost(self, node: int) -> list[Effect]:
        """A node is gone, with what it holds, for as long as it does not return."""
        self._addresses.pop(node, None)
        self._without(node)
        self._still_complete()
        effects: list[Effect] = []
        for tier, job in list(self._jobs.items()):
            gone = {part for part in job.waiting if job.sources[part] == node}
            if gone:
                job.waiting -= gone
                effects += self._cancel(job, LOST)
                if not job.waiting:
                    del self._jobs[tier]
                    self._pending.setdefault(tier, job.key)
        for tier, replication in list(self._replications.items()):
            for part, (number, source, buddy) in list(replication.waiting.items()):
                if node == source:  # of one that does not answer, the buddy would wait for long, and all that comes later with it
                    effects.append(self._order(buddy, {"do": "cancel", "id": number}))
                if node in (source, buddy):
                    effects += self._replicated(tier, part, number, failed=True)
        return effects

    def _without(self, node: int) -> None:
        for snapshot in self._snapshots.values():
            for holders in snapshot.holders.values():
                for where in [each for each in holders if each[0] == node]:
                    del holders[where]

    def _still_complete(self) -> None:
        for tier, keys in self._complete.items():
            self._complete[tier] = [key for key in keys if self._snapshots[key].whole_on(tier)]

    def _holds(self, node: int, entry: News) -> Snapshot:
        key = (entry["step"], entry["generation"])
        snapshot = self._snapshots.setdefault(key, Snapshot(entry["nodes"]))
        held = Held(entry["directory"], entry["replica"])
        snapshot.holders.setdefault(entry["owner"], {})[(node, entry["tier"])] = held
        return snapshot

    def candidates(self, node: int) -> list[dict[str, Any]]:
        """What the workers of a node may go on from, newest first; of each part the nearest copy first."""
        order = [self.plan.memory.name, *(tier.name for tier in self.plan.others)]
        found = []
        for key, snapshot in sorted(self._snapshots.items(), reverse=True):
            if snapshot.whole():
                best = [min(order.index(tier) for _, tier in snapshot.holders[part]) for part in range(snapshot.parts)]
                holdings = []
                for part in range(snapshot.parts):
                    copies = sorted(snapshot.holders[part].items(), key=lambda item: (item[0][0] != node, order.index(item[0][1])))
                    for (holder, _), held in copies:
                        if holder == node:
                            holdings.append({"directory": held.directory})
                        elif holder in self._addresses:
                            holdings.append({"address": self._addresses[holder], "path": held.directory})
                holdings.sort(key=lambda each: "address" in each)
                found.append({"step": key[0], "tier": order[max(best)], "holdings": holdings})
        return found[:CANDIDATES]

    @property
    def checkpoints(self) -> list[int]:
        """The steps that can be gone on from, ascending."""
        held = {key[0] for key, snapshot in self._snapshots.items() if snapshot.whole()}
        return sorted(held.union(self._committed_steps.steps))

    @property
    def beginning(self) -> bool:
        """Whether no checkpoint was ever given up for a newer one, so that to start over loses no more than they do."""
        return self._committed_steps.beginning

    # -- what is void --------------------------------------------------------------------------------------------------

    def roll_back(self, step: int, reason: str) -> list[Effect]:
        """What was computed beyond a step is void, whoever holds it; it is removed before the next generation begins."""
        self._voids = telling([*self._voids, Void(self._generation, step)])
        self._voids_due = True
        effects: list[Effect] = []
        order = [self.plan.memory.name, *(tier.name for tier in self.plan.others)]
        for key, snapshot in sorted(self._snapshots.items()):
            if self._void(key) and snapshot.whole():
                tier = min((tier for holders in snapshot.holders.values() for _, tier in holders), key=order.index)
                fields = {"step": key[0], "tier": tier, "reason": reason}
                effects.append(WriteEvent("checkpoint_rejected", fields, self._generation))
        for job in self._jobs.values():
            if self._void(job.key) and not job.ended_badly:
                effects += self._cancel(job, "superseded")
        self._forget(self._void)
        self._committed_steps.roll_back(step)
        self.durable_step = min(self.durable_step, max(self._committed_steps.steps, default=0))
        return effects

    def _void(self, key: Key) -> bool:
        return any(void.covers(*key) for void in self._voids)

    def _forget(self, unwanted: Callable[[Key], bool]) -> None:
        """Know nothing of some snapshots any more."""
        for key in [key for key in self._snapshots if unwanted(key)]:
            del self._snapshots[key]
        for tier, keys in self._complete.items():
            self._complete[tier] = [key for key in keys if key in self._snapshots]
        self._pending = {tier: key for tier, key in self._pending.items() if key in self._snapshots}

    def _clear_voids(self) -> Iterator[Effect]:
        """Have removed what is void. No worker runs, so there will be no more of it; nor a commit, behind the fence."""
        if not self._voids_due:
            return
        yield from ()

    # -- a generation --------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Let keepers forget nothing until the next generation goes on: what they say they have is what it may need."""
        self._holding = True

    def begin(self, generation: int, members: Sequence[int]) -> list[Effect]:
        """A generation of these nodes, by node rank, begins; all have told their inventories.

        What was under way starts anew, on its behalf.
        """
        self._generation = generation
        self._left_out, self._told = set(), {}
        self._members = tuple(members)
        domains = [self.plan.domains[node] for node in members] if self.plan.domains else None
        count = len(self._members)
        ring = tuple((number + 1) % count if count > 1 else None for number in range(count))
        self._buddies = buddies(count, domains) if domains is not None else ring
        self._decided = 0
        effects: list[Effect] = []
        for tier, job in list(self._jobs.items()):
            if tier not in self._pending or job.key > self._pending[tier]:
                self._pending[tier] = job.key
            effects += [self._order(node, {"do": "cancel", "id": job.number}) for node in self._addresses]
        self._jobs, self._replications, self._unreached = {}, {}, set()
        self._protected, self._unprotected = {}, {}
        for key in [key for key, snapshot in self._snapshots.items() if not snapshot.whole()]:
            del self._snapshots[key]
        for tier in self._complete:
            self._complete[tier] = sorted(key for key, snapshot in self._snapshots.items() if snapshot.whole_on(tier))
        self._pending = {tier: key for tier, key in self._pending.items() if key in self._snapshots}
        return [*effects, *self._clear_voids()]

    def resumed(self, step: int, now: float) -> list[Effect]:
        """The workers go on from this step: what is newer belongs to a past that was left, or was found damaged."""
        self._decided = max(self._decided, step)
        self._holding = False
        self._forget(lambda key: key[0] > step and key[1] < self._generation)
        self._committed_steps.roll_back(step)
        self.durable_step = min(self.durable_step, max(self._committed_steps.steps, default=0))
        effects = [effect for tier in self._complete for effect in self._keep(tier)]
        return [*effects, *self._schedule(now)]

    # -- news ----------------------------------------------------------------------------------------------------------

    def heard(self, node: int, news: News, now: float) -> list[Effect]:
        """News of a node's keeper."""
        match news["what"]:
            case "listening":
                self._addresses[node] = news["address"]
                return []
            case "inventory":  # of a keeper that was started anew: what it does not have by now it will never have
                self.inventory(node, news)
                here = {entry["step"] for entry in news["parts"] if not entry["replica"]}
                self._left_out |= {step for step in self._undecided() if step not in here}
                return list(self._again(node))
            case "held":
                return list(self._held(node, news, now))
            case "skipped" | "stale":
                return list(self._skipped(node, news, now))
            case "flushed" | "committed" | "failed":
                return list(self._job_news(node, news, now))
            case "trouble":
                return list(self._trouble(node, news, now))
            case "well":
                return list(self._well(node, news, now))
        return []

    def _held(self, node: int, news: News, now: float) -> Iterator[Effect]:
        key, tier = (news["step"], news["generation"]), news["tier"]
        if self._void(key):
            return
        own = tier == self.plan.memory.name and not news["replica"]
        if own and key[0] in self._left_out and not news["again"]:
            yield from self._tells(node, key[0])
            return  # too late: others have been told that it is not needed, and may hold something else by now
        snapshot = self._holds(node, news)
        if news["replica"]:
            yield from self._replicated(tier, news["owner"], news["id"])
            return
        if key in self._complete.get(tier, ()):
            return  # the inventory was faster than the news
        if own:
            self._left_out.discard(key[0])  # it was taken again
            yield from self._tells(node, key[0])
            snapshot.size_bytes += news["bytes"]
            snapshot.stall_s = max(snapshot.stall_s, news["stall_s"])
            snapshot.write_s = max(snapshot.write_s, news["write_s"])
            snapshot.wants |= frozenset(news["wants"])
        if own:
            if snapshot.whole_on(tier) and key[0] > self._decided:
                yield from self._completed(tier, key, snapshot.write_s, now)
        else:
            yield from self._job_news(node, news, now)

    def _gone(self, tier: str, key: Key) -> None:
        """A tier holds a step no more."""
        self._complete[tier].remove(key)
        snapshot = self._snapshots[key]
        for holders in snapshot.holders.values():
            for where in [each for each in holders if each[1] == tier]:
                del holders[where]
        if not any(snapshot.holders.values()):
            del self._snapshots[key]

    def _completed(self, tier: str, key: Key, write_s: float, now: float) -> Iterator[Effect]:
        """Every node's part of a step is on a tier."""
        snapshot = self._snapshots[key]
        self._complete[tier] = [*self._complete[tier], key]
        if tier == self.plan.memory.name:
            self._decided = key[0]
            self._left_out = {step for step in self._left_out if step > key[0]}
            self._told = {node: {step for step in told if step > key[0]} for node, told in self._told.items()}
        yield self._snapshot_event(tier, key, snapshot, write_s)
        if tier == self.plan.memory.name:
            for other in (*self.plan.others, self.plan.durable):
                if other.name in snapshot.wants:
                    self._pending[other.name] = key
                    job = self._jobs.get(other.name)
                    if job is not None and job.troubled and not job.ended_badly:
                        yield from self._cancel(job, "superseded")
        yield from self._schedule(now)
        yield from self._replicate(tier)
        yield from self._keep(tier)

    def _replicate(self, tier: str) -> Iterator[Effect]:
        """Let the buddies fetch the newest step that a tier holds, unless they are at another one."""
        complete = self._complete[tier]
        if not self.plan.tier(tier).replicas or tier in self._replications or not complete:
            return
        key = complete[-1]
        own = self._snapshots[key].own(tier)
        if key in (self._protected.get(tier), self._unprotected.get(tier)) or len(self._members) == 1:
            return
        if {part: node for part, (node, _) in own.items()} != dict(enumerate(self._members)):
            return  # of other nodes than those of today, who will soon have something newer
        replication = self._replications[tier] = Replication(key, {})
        for part, (node, held) in own.items():
            buddy = self._buddies[part]
            assert buddy is not None
            number = next(self._numbers)
            replication.waiting[part] = (number, node, self._members[buddy])
            order = {"do": "replicate", "id": number, "tier": tier, "step": key[0], "generation": key[1], "owner": part}
            order |= {"address": self._addresses[node], "directory": held.directory}
            yield self._order(self._members[buddy], order)

    def _replicated(self, tier: str, part: int, number: int, *, failed: bool = False) -> Iterator[Effect]:
        replication = self._replications.get(tier)
        if replication is None or part not in replication.waiting or replication.waiting[part][0] != number:
            return
        del replication.waiting[part]
        replication.failed |= failed
        if not replication.waiting:
            del self._replications[tier]
            (self._unprotected if replication.failed else self._protected)[tier] = replication.key
            if not replication.failed:
                yield WriteEvent("replicated", {"step": replication.key[0], "tier": tier}, replication.key[1])
            yield from self._replicate(tier)
            yield from self._keep(tier)

    def _snapshot_event(self, tier: str, key: Key, snapshot: Snapshot, write_s: float) -> Effect:
        fields = {"step": key[0], "tier": tier, "bytes": snapshot.size_bytes}
        costs = {"stall_s": round(snapshot.stall_s, 6), "write_s": round(write_s, 4)}
        return WriteEvent("snapshot", {**fields, **costs}, key[1])

    def _skipped(self, node: int, news: News, now: float) -> Iterator[Effect]:
        if news["generation"] == self._generation:
            self._left_out.add(news["step"])
            yield from self._tells(node, news["step"])
        if news["what"] == "stale":
            detail = f"step {news['step']} carries the same bytes as step {news['before']} although training went on: refused"
            yield self._fault(node, self.plan.memory.name, detail, now, step=news["step"])
        yield from self._keep(self.plan.memory.name)

    def _undecided(self) -> list[int]:
        """Steps of this generation of which a part is held, and that may become whole."""
        return [key[0] for key in self._snapshots if key[1] == self._generation and self._decided < key[0] not in self._left_out]

    def _tells(self, node: int, step: int) -> Iterator[Effect]:
        """A node has said what became of a step. Of one before several such it will say nothing any more."""
        told = self._told.setdefault(node, set())
        told.add(step)
        silent = [each for each in self._undecided() if each not in told and sum(later > each for later in told) >= SILENT_STEPS]
        if silent:
            self._left_out.update(silent)
            yield from self._keep(self.plan.memory.name)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _schedule(self, now: float) -> Iterator[Effect]:
        for tier in (*self.plan.others, self.plan.durable):
            key = self._pending.get(tier.name)
            if key is None or tier.name in self._jobs:
                continue
            del self._pending[tier.name]
            if not self._at_hand(key):
                newest = [each for each in self._complete[self.plan.memory.name] if self._at_hand(each)]
                if not newest:
                    continue
                key = max(newest)
            if tier is self.plan.durable and key[0] <= self.durable_step:
                continue
            kind: Literal["copy", "flush"] = "flush" if tier is self.plan.durable else "copy"
            snapshot = self._snapshots[key]
            if kind == "copy" and len(snapshot.own(self.plan.memory.name)) < snapshot.parts:
                continue  # what is left of it are replicas, and those lie where they are to lie
            sources = snapshot.sources()
            job = Job(next(self._numbers), tier.name, key, kind, sources, set(sources), now)
            self._jobs[tier.name] = job
            for part, node in sources.items():
                yield self._order(node, self._job_order(job, part))

    def _at_hand(self, key: Key) -> bool:
        """Whether nodes that are there have every part."""
        snapshot = self._snapshots.get(key)
        return snapshot is not None and snapshot.whole()

    def _job_order(self, job: Job, part: int) -> dict[str, Any]:
        order = {"do": job.kind, "id": job.number, "tier": job.tier, "step": job.key[0], "generation": job.key[1]}
        return {**order, "owner": part, "attempt": self._generation}

    def _job_news(self, node: int, news: News, now: float) -> Iterator[Effect]:
        if news["what"] == "failed" and news["job"] == "replicate":
            # Of a node that does not answer once, its own loss tells soon enough.
            if news["detail"] != CANCELLED and (not news["unreachable"] or news["owner"] in self._unreached):
                detail = f"the replica of part {news['owner']} of step {news['step']}: {news['detail']}"
                yield self._fault(node, news["tier"], detail, now, step=news["step"])
            if news["unreachable"] and news["detail"] != CANCELLED:
                self._unreached.add(news["owner"])
            yield from self._replicated(news["tier"], news["owner"], news["id"], failed=True)
            return
        job = self._jobs.get(news["tier"])
        if job is None or job.number != news["id"]:
            return
        job.waiting.discard(news["owner"])
        if news["what"] == "failed":
            if not job.ended_badly:
                yield from self._cancel(job, news["detail"])
            job.ended_badly = job.ended_badly or news["detail"]
        if job.waiting:
            return
        snapshot = self._snapshots.get(job.key)
        if job.ended_badly:
            del self._jobs[job.tier]
            if job.ended_badly == LOST:
                self._pending.setdefault(job.tier, job.key)
            elif snapshot is not None and job.ended_badly not in ("superseded", CANCELLED):
                snapshot.failures[job.tier] = snapshot.failures.get(job.tier, 0) + 1
                if snapshot.failures[job.tier] < FAILURES:
                    self._pending.setdefault(job.tier, job.key)
                else:
                    yield self._fault(node, job.tier, f"step {job.key[0]} is given up: {job.ended_badly}", now, step=job.key[0])
        elif job.kind == "flush":
            job.kind, job.waiting = "commit", {0}
            yield self._order(job.sources[0], self._job_order(job, 0))
            return
        else:
            del self._jobs[job.tier]
            if job.kind == "copy":
                yield from self._completed(job.tier, job.key, now - job.began_t, now)
            else:
                yield from self._committed(job, news, snapshot, now)
        yield from self._schedule(now)
        yield from self._keep(self.plan.memory.name)

    def _committed(self, job: Job, news: News, snapshot: Snapshot | None, now: float) -> Iterator[Effect]:
        self.durable_step = max(self.durable_step, job.key[0])
        self._committed_steps.add(job.key[0])
        took = max(1e-3, now - job.began_t)
        self.rate_bytes_per_s = news["bytes"] / took
        if snapshot is not None:
            yield self._snapshot_event(job.tier, job.key, snapshot, took)
        fields = {"step": job.key[0], "tier": job.tier, "bytes": news["bytes"], "files": news["files"]}
        yield WriteEvent("committed", fields, self._generation)

    def _cancel(self, job: Job, why: str) -> Iterator[Effect]:
        job.ended_badly = why
        for part in job.waiting:
            yield self._order(job.sources[part], {"do": "cancel", "id": job.number})

    def _again(self, node: int) -> Iterator[Effect]:
        """A node's keeper is a new one: it is told once more what it has to do."""
        for tier in self._complete:
            yield from self._keep(tier, [node])
        for tier, replication in list(self._replications.items()):
            for part, (number, *ends) in list(replication.waiting.items()):
                if node in ends:
                    yield from self._replicated(tier, part, number, failed=True)
        for job in self._jobs.values():
            for part in job.waiting:
                if job.sources[part] == node:
                    yield self._order(node, self._job_order(job, part))

    # -- what may be forgotten -----------------------------------------------------------------------------------------

    def _keep(self, tier: str, nodes: Sequence[int] | None = None) -> Iterator[Effect]:
        if self._holding:
            return
        plan = self.plan.tier(tier)
        complete = list(reversed(self._complete[tier]))
        wanted = complete[:1]
        if tier in self._replications:
            wanted.append(self._replications[tier].key)
        if tier in self._protected:
            wanted.append(self._protected[tier])
        if tier == self.plan.memory.name:
            wanted += [*(job.key for job in self._jobs.values()), *self._pending.values()]
        wanted = list(dict.fromkeys([*wanted, *complete[: plan.keep_last]]))
        if tier == self.plan.memory.name:
            wanted = wanted[: self.plan.slabs - 1]
        copied = [job.key for job in self._jobs.values()]  # which keepers do not overwrite meanwhile
        for key in complete:
            if key not in wanted and key not in copied:
                self._gone(tier, key)
        # What is newer than the newest that is complete may be on its way.
        upto = self._decided if tier == self.plan.memory.name else max((step for step, _ in complete), default=0)
        order = {"do": "keep", "tier": tier, "steps": sorted(step for step, _ in wanted), "upto": upto}
        order["left_out"] = sorted(self._left_out) if tier == self.plan.memory.name else []
        for node in nodes if nodes is not None else list(self._addresses):
            yield self._order(node, {**order, "generation": self._generation})

    def _order(self, node: int, order: Mapping[str, Any]) -> Effect:
        return Send(node, {"type": "storage", "order": order})

    # -- trouble -------------------------------------------------------------------------------------------------------

    def _trouble(self, node: int, news: News, now: float) -> Iterator[Effect]:
        tier = news["tier"]
        job = self._jobs.get(tier)
        if job is not None:
            job.troubled = True
        if (node, tier) not in self._troubles:
            effect = self._fault(node, tier, news["detail"], now, evidence=f"errno {news['errno']}" if news.get("errno") else "")
            self._troubles[(node, tier)] = _Trouble(f"s{self._faults}", tier, now)
            yield effect
            yield WriteEvent(
                "action",
                {"fault_id": f"s{self._faults}", "name": "degrade_tier", "reason": f"{tier} is tried again; training goes on"},
                self._generation,
            )

    def _well(self, node: int, news: News, now: float) -> Iterator[Effect]:
        trouble = self._troubles.pop((node, news["tier"]), None)
        if trouble is not None:
            fields = {"fault_id": trouble.fault_id, "step": self._decided, "downtime_s": 0.0, "lost_steps": 0}
            yield WriteEvent("recovered", fields, self._generation)

    def _fault(self, node: int, tier: str, detail: str, now: float, *, step: int | None = None, evidence: str = "") -> Effect:
        self._faults += 1
        fields = {"fault_id": f"s{self._faults}", "kind": "storage", "ranks": [], "nodes": [node], "step": step}
        what = {"detail": f"tier {tier}: {detail}", "evidence": evidence, "detect_s": 0.0}
        return WriteEvent("fault", {**fields, **what}, self._generation)

    @property
    def may_go_on_without_the_fence(self) -> bool:
        """Whether there is a snapshot to go on from, although the durable tier cannot be written."""
        return any(snapshot.whole() for snapshot in self._snapshots.values())

    # -- the end -------------------------------------------------------------------------------------------------------

    @property
    def newest(self) -> Key | None:
        """The newest snapshot of which nodes that are there have every part."""
        return max((key for key in self._snapshots if self._at_hand(key)), default=None)

    @property
    def behind(self) -> bool:
        """Whether something newer than what is durable is held."""
        newest = self.newest
        return newest is not None and newest[0] > self.durable_step

    @property
    def troubled(self) -> bool:
        """Whether the durable tier does not work at present."""
        return any(trouble.tier == self.plan.durable.name for trouble in self._troubles.values())

    def save_newest(self, now: float) -> list[Effect]:
        """Make the newest snapshot durable, whatever the cadence."""
        newest = self.newest
        if newest is None or newest[0] <= self.durable_step:
            return []
        job = self._jobs.get(self.plan.durable.name)
        if job is None or job.key != newest:
            self._pending[self.plan.durable.name] = newest
        return list(self._schedule(now))

    def given_up(self) -> bool:
        """Whether the newest snapshot cannot be made durable: it was tried often enough."""
        newest = self.newest
        return newest is not None and self._snapshots[newest].failures.get(self.plan.durable.name, 0) >= FAILURES

    def cost(self, key: Key) -> tuple[int, float]:
        """Bytes of a snapshot, and the seconds that training stood still for it."""
        snapshot = self._snapshots[key]
        return snapshot.size_bytes, snapshot.stall_s

    def superseded(self, *, ended: bool) -> list[str]:
        """The tiers that hold nothing that is needed: memory, and at the end of a campaign the nodes' other tiers too.

        Args:
            ended: no job goes on from here.
        """
        if self.behind:
            return []
        return [self.plan.memory.name, *(tier.name for tier in self.plan.others if ended)]


def _entry(shard: p.NodeShard) -> dict[str, Any]:
    where = {"tier": shard.tier, "directory": shard.directory, "step": shard.key.step, "generation": shard.key.generation}
    return {**where, "owner": shard.shard, "nodes": shard.shards, "bytes": shard.size_bytes, "replica": shard.replica}


def _inventory(news: p.Inventory) -> dict[str, Any]:
    return {"what": "inventory", "address": news.address, "parts": [_entry(each) for each in news.shards]}


def _job(what: str, news: Any) -> dict[str, Any]:
    where = {"tier": news.tier, "step": news.key.step, "generation": news.key.generation, "owner": news.shard, "id": news.job_id}
    return {"what": what, **where}


def _news(news: p.DaemonNews) -> dict[str, Any]:
    match news:
        case p.Listening():
            return {"what": "listening", "address": news.address}
        case p.Inventory():
            return _inventory(news)
        case p.Held():
            costs = {"stall_s": news.stall_s, "write_s": news.write_s, "wants": news.wants, "again": news.again, "id": news.job_id}
            return {"what": "held", **_entry(news.shard), **costs}
        case p.Skipped():
            return {"what": "skipped", "step": news.step, "generation": news.generation}
        case p.Stale():
            return {"what": "stale", "step": news.step, "before": news.before, "generation": news.generation}
        case p.Flushed():
            return {**_job("flushed", news), "bytes": news.size_bytes, "write_s": news.write_s}
        case p.Committed():
            return {**_job("committed", news), "bytes": news.size_bytes, "files": news.files, "write_s": news.write_s}
        case p.JobFailed():
            detail = CANCELLED if news.cancelled else news.reason
            return {**_job("failed", news), "job": news.kind, "detail": detail, "unreachable": news.unreachable}
        case p.TierTrouble():
            return {"what": "trouble", "tier": news.tier, "detail": news.detail, "errno": news.errno}
        case p.TierWell():
            return {"what": "well", "tier": news.tier, "down_s": news.down_s}
    return {"what": "nothing"}


class Snapshots:
    """The interface of the snapshots core, over the old custody."""

    def __init__(self, plan: StoragePlan) -> None:
        self._custody = Custody(plan)

    def inventory(self, node: int, news: p.Inventory) -> None:
        self._custody.inventory(node, _inventory(news))

    def lost(self, node: int, out: Outbox) -> None:
        self._do(self._custody.lost(node), out)

    def hold(self) -> None:
        self._custody.hold()

    def begin(self, generation: int, members: Sequence[int], out: Outbox) -> None:
        self._do(self._custody.begin(generation, members), out)

    def resumed(self, step: int, now: float, out: Outbox) -> None:
        self._do(self._custody.resumed(step, now), out)

    def on_news(self, node: int, news: p.DaemonNews, now: float, out: Outbox) -> None:
        self._do(self._custody.heard(node, _news(news), now), out)

    def roll_back(self, step: int, reason: str, out: Outbox) -> None:
        self._do(self._custody.roll_back(step, reason), out)

    def invalidated_due(self) -> tuple[Void, ...]:
        return tuple(self._custody._voids) if self._custody._voids_due else ()

    def quarantine_done(self, out: Outbox) -> None:
        if not self._custody._voids_due:
            return
        self._custody._voids_due = False
        for void in self._custody._voids:
            for node in self._custody._addresses:
                self._do([Send(node, {"order": {"do": "void", "step": void.step, "generation": void.generation}})], out)

    def candidates(self) -> bytes:
        custody, found = self._custody, []
        order = [custody.plan.memory.name, *(tier.name for tier in custody.plan.others)]
        for key, snapshot in sorted(custody._snapshots.items(), reverse=True):
            if not snapshot.whole():
                continue
            worst = max(min(order.index(tier) for _, tier in holders) for holders in snapshot.holders.values())
            shards = []
            for part in range(snapshot.parts):
                held = sorted(snapshot.holders[part].items(), key=lambda item: order.index(item[0][1]))
                shards.append(tuple(Holder(n, custody._addresses[n], h.directory) for (n, _), h in held if n in custody._addresses))
            found.append(Candidate(key=p.SnapshotKey(*key), tier=order[worst], shards=tuple(shards)))
        return pack(found[:CANDIDATES])

    @property
    def checkpoints(self) -> list[int]:
        return self._custody.checkpoints

    @property
    def beginning(self) -> bool:
        return self._custody.beginning

    @property
    def newest(self) -> p.SnapshotKey | None:
        key = self._custody.newest
        return p.SnapshotKey(*key) if key is not None else None

    @property
    def behind(self) -> bool:
        return self._custody.behind

    @property
    def troubled(self) -> bool:
        return self._custody.troubled

    @property
    def durable_step(self) -> int:
        return self._custody.durable_step

    @property
    def rate_bytes_per_s(self) -> float | None:
        return self._custody.rate_bytes_per_s

    @property
    def may_start_without_fence(self) -> bool:
        return self._custody.may_go_on_without_the_fence

    def save_newest(self, now: float, out: Outbox) -> None:
        self._do(self._custody.save_newest(now), out)

    def given_up(self) -> bool:
        return self._custody.given_up()

    def cost(self, key: p.SnapshotKey) -> tuple[int, float]:
        return self._custody.cost((key.step, key.generation))

    def superseded(self, *, ended: bool) -> list[str]:
        return self._custody.superseded(ended=ended)

    def _do(self, effects: Sequence[Effect], out: Outbox) -> None:
        for effect in effects:
            if isinstance(effect, WriteEvent):
                out.append(effect)
            else:
                out.append(RequestDaemon(effect.node, self._request(effect.message["order"])))

    def _request(self, order: Mapping[str, Any]) -> p.DriverRequest:
        generation = self._custody._generation
        match order["do"]:
            case "keep":
                steps, left_out = tuple(order["steps"]), tuple(order["left_out"])
                return p.Retain(generation=generation, tier=order["tier"], steps=steps, upto=order["upto"], left_out=left_out)
            case "void":
                return p.Discard(generation=generation, step=order["step"], invalid_generation=order["generation"])
            case "cancel":
                return p.Cancel(generation=generation, job_id=order["id"])
        key = p.SnapshotKey(order["step"], order["generation"])
        where = {"job_id": order["id"], "tier": order["tier"], "key": key, "shard": order["owner"]}
        if order["do"] == "replicate":
            return p.Replicate(generation=generation, address=order["address"], directory=order["directory"], **where)
        return p.StartJob(generation=order["attempt"], kind=order["do"], **where)
