"""Delay, loss, reordering between nodes, new daemons and stale messages, in whatever order: a machine plays them, and looks on."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from snapshot_daemons import BEGIN_SESSION, BUFFERS, DURABLE, NVME, RAM, TAKE_INVENTORY, Daemon, DurableTier, Work

from checkpoint.protocol import DaemonNews, Held, Inventory, Replicate, SnapshotKey, StartJob
from resilient.outbox import Outbox, RequestDaemon
from resilient.protocol.messages import unpack
from resilient.rollback import InvalidationRule
from resilient.snapshots import Snapshots, StoragePlan, TierPlan

MEMBERS = 3
NODES = MEMBERS + 1

nodes = st.integers(0, NODES - 1)


class Campaign(RuleBasedStateMachine):
    """A driver's snapshot core, four nodes of which three are members, and what lies between them."""

    def __init__(self) -> None:
        super().__init__()
        plan = StoragePlan(TierPlan(RAM, 1, True), (TierPlan(NVME, 2, True),), TierPlan(DURABLE, 3), BUFFERS)
        self.core = Snapshots(plan)
        self.durable = DurableTier(MEMBERS)
        self.daemons = [Daemon(node, self.durable) for node in range(NODES)]
        self.state = "gathering"
        self.ready: set[int] = set()
        self.members: list[int] = []
        self.generation = 0
        self.base = 0  # the step that the generation goes on from
        self.now = 0.0
        self.invalid: list[InvalidationRule] = []
        self.past: list[tuple[int, DaemonNews]] = []  # which may arrive once more
        self.outstanding: dict[str, tuple[int, dict[int, int]]] = {}  # by tier the job, and of its shards the node

    # -- the driver ----------------------------------------------------------------------------------------------------

    def do(self, method: str, *arguments: Any) -> None:
        """One turn of the core; its requests are on their way."""
        out = Outbox()
        getattr(self.core, method)(*arguments, out)
        for effect in out.take():
            if isinstance(effect, RequestDaemon):
                if isinstance(effect.request, StartJob):
                    self.started(effect.node, effect.request)
                if self.daemons[effect.node].alive:
                    self.daemons[effect.node].inbox.append(effect.request)

    def started(self, node: int, request: StartJob) -> None:
        job_id, shards = self.outstanding.get(request.tier, (request.job_id, {}))
        if job_id != request.job_id:
            assert not shards, f"a second job begins on {request.tier} while shards {shards} of the first are under way"
            shards = {}
        self.outstanding[request.tier] = (request.job_id, {**shards, request.shard: node})

    def answered(self, node: int, news: DaemonNews | None) -> None:
        """A node has done a shard of a job, or (no news) all that it was to do will never be done."""
        for job_id, shards in self.outstanding.values():
            for shard in [shard for shard, by in shards.items() if by == node]:
                if news is None or (getattr(news, "job_id", None) == job_id and self.shard_of(news) == shard):
                    del shards[shard]

    @staticmethod
    def shard_of(news: Any) -> int:
        found: int = news.shard.shard if isinstance(news, Held) else news.shard
        return found

    def gather(self) -> None:
        """The generation ends: workers are stopped, and nodes asked what they hold."""
        self.core.hold()
        self.state, self.ready = "gathering", set()
        for daemon in self.daemons:
            daemon.rank = None
            if daemon.alive:
                daemon.inbox.append(TAKE_INVENTORY)

    def maybe_begin(self) -> None:
        """All members that are wanted are there."""
        if self.state != "gathering" or len(self.ready) < MEMBERS:
            return
        self.generation += 1
        self.durable.fence = self.generation
        if due := self.core.invalidated_due():
            for step, key in list(self.durable.committed.items()):
                if any(each.covers(key.step, key.generation) for each in due):
                    del self.durable.committed[step]
            self.do("quarantine_done")
        assert self.core.invalidated_due() == ()
        self.members = sorted(self.ready)[:MEMBERS]
        self.outstanding = {}
        self.do("begin", self.generation, self.members)
        for rank, node in enumerate(self.members):
            self.daemons[node].rank, self.daemons[node].generation = rank, self.generation
            self.daemons[node].inbox.append(BEGIN_SESSION)
        self.state = "starting"

    def resume(self) -> None:
        """Workers have read the newest that there is."""
        self.base = max([each.key.step for each in unpack(self.core.candidates())] + list(self.durable.committed), default=0)
        for node in self.members:
            self.daemons[node].step = self.base
        self.do("resumed", self.base, self.now)
        self.state = "running"

    # -- rules ---------------------------------------------------------------------------------------------------------

    @initialize()
    def connect(self) -> None:
        self.gather()
        self.settle()

    @rule(takers=st.lists(nodes, max_size=3))
    def next_step(self, takers: list[int]) -> None:
        """All members take a snapshot, and these are a step ahead of the others."""
        if self.state == "starting":
            self.resume()
        for node in (*self.members, *takers):
            self.take(node)

    def take(self, node: int) -> None:
        daemon = self.daemons[node]
        if self.state == "running" and daemon.rank is not None:
            slowest = min(self.daemons[member].step for member in self.members)
            if daemon.step <= slowest + 1:
                step = daemon.step + 1
                daemon.take(tuple(tier for tier, every in ((NVME, 2), (DURABLE, 3)) if step % every == 0))

    @rule(moves=st.lists(st.tuples(nodes, st.integers(0, 4), st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=8))
    def get_on(self, moves: list[tuple[int, int, int, int]]) -> None:
        """Nodes get requests, end jobs and are heard, so many of each."""
        for node, requests, news, jobs in moves:
            daemon = self.daemons[node]
            for _ in range(min(requests, len(daemon.inbox))):
                daemon.handle()
            for _ in range(min(jobs, len(daemon.work))):
                self.end(daemon, daemon.work[0], succeeds=True)
            for _ in range(news):
                self.news_arrive(node)

    def news_arrive(self, node: int) -> None:
        daemon = self.daemons[node]
        if not daemon.outbox:
            return
        news, asked = daemon.outbox.popleft()
        self.now += 0.01
        newest, durable_step = self.core.newest, self.core.durable_step
        self.answered(node, None if isinstance(news, Inventory) else news)
        if isinstance(news, Inventory) and asked:
            self.core.inventory(node, news)
            self.ready.add(node)
            self.maybe_begin()
            return
        self.do("on_news", node, news, self.now)
        assert self.core.durable_step >= durable_step, "what is durable was taken back"
        if not isinstance(news, Inventory):
            assert newest is None or (self.core.newest or SnapshotKey(0, 0)) >= newest, f"{newest} was let go for nothing newer"
            if not isinstance(news, Held):
                self.past.append((node, news))

    @rule(node=nodes, which=st.integers(0, 5), succeeds=st.booleans())
    def job_ends(self, node: int, which: int, succeeds: bool) -> None:
        """Out of turn."""
        daemon = self.daemons[node]
        if daemon.work:
            self.end(daemon, daemon.work[which % len(daemon.work)], succeeds=succeeds)

    def end(self, daemon: Daemon, work: Work, *, succeeds: bool) -> None:
        source = None
        if isinstance(work.request, Replicate):
            source = next(each for each in self.daemons if each.address == work.request.address)
        daemon.finish(work, source, succeeds=succeeds)

    @precondition(lambda self: self.past)
    @rule(which=st.integers(0, 30))
    def stale_news_arrive(self, which: int) -> None:
        node, news = self.past[-1 - which % len(self.past)]
        durable_step = self.core.durable_step
        self.do("on_news", node, news, self.now)
        assert self.core.durable_step == durable_step, "stale news made something durable"

    @rule(node=nodes)
    def daemon_restarts(self, node: int) -> None:
        if self.daemons[node].alive:
            self.daemons[node].restart()

    @rule(node=nodes, keeps=st.sampled_from([(), (NVME,), (RAM, NVME)]))
    def node_is_lost(self, node: int, keeps: tuple[str, ...]) -> None:
        daemon = self.daemons[node]
        if not daemon.alive:
            return
        member = daemon.rank is not None or self.state == "gathering"
        daemon.die(keeps=keeps)
        self.ready.discard(node)
        self.answered(node, None)
        if member:
            self.core.hold()
        self.do("lost", node)
        if member and self.state != "gathering":
            self.gather()

    @rule(node=nodes)
    def node_returns(self, node: int) -> None:
        daemon = self.daemons[node]
        if not daemon.alive:
            daemon.alive = True
            daemon.inbox.append(TAKE_INVENTORY)

    @precondition(lambda self: self.state == "running")
    @rule()
    def worker_dies(self) -> None:
        self.gather()

    @precondition(lambda self: self.state == "running")
    @rule(back=st.integers(0, 3))
    def numbers_are_bad(self, back: int) -> None:
        step = max(0, max(self.daemons[node].step for node in self.members) - back)
        self.invalid.append(InvalidationRule(self.generation, step))
        self.do("roll_back", step, "bad numbers")
        self.gather()

    @rule(steps=st.integers(1, 4))
    def undisturbed(self, steps: int) -> None:
        """Training goes on for a while, and everything arrives between the steps."""
        for _ in range(steps):
            self.settle()
            self.next_step([])

    @rule()
    def settle(self) -> None:
        """All that is on its way arrives, and what is under way succeeds."""
        for _ in range(100):
            busy = False
            for daemon in self.daemons:
                while daemon.inbox:
                    daemon.handle()
                    busy = True
                while daemon.work:
                    self.end(daemon, daemon.work[0], succeeds=True)
                    busy = True
                while daemon.outbox:
                    self.news_arrive(daemon.node)
                    busy = True
            if not busy:
                return
        raise AssertionError("it never comes to rest")

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def what_is_promised_is_there(self) -> None:
        for candidate in unpack(self.core.candidates()):
            assert len(candidate.shards) == MEMBERS and all(candidate.shards), f"{candidate.key} is not whole"
            assert not any(each.covers(candidate.key.step, candidate.key.generation) for each in self.invalid)
            for number, holders in enumerate(candidate.shards):
                for holder in holders:
                    held = self.daemons[holder.node].will_hold()
                    there = {Daemon.directory(place) for place in held if place[1:3] == (candidate.key, number)}
                    assert holder.directory in there, f"{candidate.key}: node {holder.node} will not hold {holder.directory}"

    @invariant()
    def what_is_durable_is_committed(self) -> None:
        covered = any(each.generation >= self.generation for each in self.invalid)
        step = self.core.durable_step
        assert step == 0 or covered or step in self.durable.committed, f"step {step} was never committed"

    @invariant()
    def little_is_remembered(self) -> None:
        assert len(self.core._catalog.snapshots) <= 40

    def teardown(self) -> None:
        """With all nodes back, the newest snapshot becomes durable."""
        for node in range(NODES):
            self.node_returns(node)
        self.settle()
        if self.state == "starting":
            self.resume()
        self.settle()
        newest = self.core.newest
        for _ in range(3):
            self.do("save_newest", self.now)
            self.settle()
        assert not self.core.behind, f"{newest} does not become durable"
        assert newest is None or self.core.durable_step >= newest.step


def play(examples: int, steps: int = 60) -> None:
    run_state_machine_as_test(
        Campaign,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_whatever_happens_what_is_promised_is_there_and_the_newest_snapshot_becomes_durable() -> None:
    play(60)


@pytest.mark.soak
def test_whatever_happens_for_long_what_is_promised_is_there_and_the_newest_snapshot_becomes_durable() -> None:
    play(1500, 150)
