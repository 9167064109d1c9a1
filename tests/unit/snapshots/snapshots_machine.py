"""Delay, loss, reordering between nodes, new daemons and stale messages, in whatever order: a machine plays them, and looks on.

Beside what always holds, it holds the core to its word: what it calls complete is there, what it calls committed is on the durable
tier, and what it calls replicated outlives the loss of any one node, until something newer takes its place.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from snapshot_daemons import BEGIN_SESSION, BUFFERS, DURABLE, NVME, RAM, Daemon, DurableTier, Work

from checkpoint.protocol import Committed, DaemonNews, Held, Inventory, Replicate, SnapshotKey, StartJob, TierTrouble, TierWell
from resilient.outbox import Outbox, RequestDaemon, WriteEvent
from resilient.protocol.candidates import unpack
from resilient.recovery.rollback import InvalidationRule
from resilient.snapshots import Snapshots, StoragePlan, TierPlan

MEMBERS = 3
NODES = MEMBERS + 1

Moves = list[tuple[int, int, int, int]]
"""Of nodes so many requests, news and jobs, one after the other."""

nodes = st.integers(0, NODES - 1)
moves = st.lists(st.tuples(nodes, st.integers(0, 4), st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=8)


class Campaign(RuleBasedStateMachine):
    """A driver's snapshot core, four nodes of which three are members, and what lies between them.

    Attributes:
        wanted: members.
        shards: of a snapshot; members whose ranks are as many apart hold the same.
    """

    wanted = MEMBERS
    shards = MEMBERS

    def __init__(self) -> None:
        super().__init__()
        plan = StoragePlan(TierPlan(RAM, 1, True), (TierPlan(NVME, 2, True),), TierPlan(DURABLE, 3), BUFFERS)
        self.core = Snapshots(plan)
        self.durable = DurableTier(self.shards)
        self.daemons = [Daemon(node, self.durable) for node in range(NODES)]
        self.state = "gathering"
        self.ready: set[int] = set()
        self.members: list[int] = []
        self.generation = 0
        self.base = 0  # the step that the generation goes on from
        self.now = 0.0
        self.holds = True  # nothing was found by the last call
        self.invalid: list[InvalidationRule] = []
        self.quarantining = False  # what is invalid is being renamed on the durable tier
        self.protected: SnapshotKey | None = None  # the newest that was replicated, and has lost no copy by a loss since
        self.newer = 0  # snapshots that are complete in memory and newer than that
        self.past: list[tuple[int, DaemonNews]] = []  # which may arrive once more
        self.outstanding: dict[str, tuple[int, dict[int, int]]] = {}  # by tier the job, and of its shards the node

    # -- the driver ----------------------------------------------------------------------------------------------------

    def do(self, method: str, *arguments: Any) -> None:
        """One turn of the core; its requests are on their way."""
        out, self.holds = Outbox(), False
        getattr(self.core, method)(*arguments, out)
        for effect in out.take():
            if isinstance(effect, WriteEvent):
                self.is_told(effect)
            if isinstance(effect, RequestDaemon):
                assert self.daemons[effect.node].alive, f"{effect.request} goes to node {effect.node}, which is gone"
                if isinstance(effect.request, StartJob):
                    self.started(effect.node, effect.request)
                if isinstance(effect.request, Replicate):
                    source = next(each for each in self.daemons if each.address == effect.request.address)
                    assert source.alive, f"a replica is to come from node {source.node}, which is gone"
                    assert {source.node, effect.node} <= set(self.members), "replicas lie on members, and are of members"
                self.daemons[effect.node].inbox.append(effect.request)
        self.holds = True

    def is_told(self, event: WriteEvent) -> None:
        """What the ledger says has come to be."""
        match event.event:
            case "snapshot" if event.fields["tier"] == RAM and self.protected is not None:
                self.newer += 1
                if self.newer >= BUFFERS - 1:  # they and the next one take all buffers: buddies do not keep up
                    self.protected = None
        match event.event:
            case "committed":
                step = event.fields["step"]
                assert step in self.durable.committed, f"step {step} is told as committed, and is not"
            case "snapshot" if event.fields["tier"] != DURABLE:
                key = SnapshotKey(event.fields["step"], event.generation)  # type: ignore[arg-type]
                held = self.places(str(event.fields["tier"]), key)
                missing = set(range(self.shards)) - {number for _, number, _ in held}
                assert not missing, f"{key} is told as complete, and nobody has its shards {missing}"
            case "replicated":
                key = SnapshotKey(event.fields["step"], event.generation)  # type: ignore[arg-type]
                held = self.places(str(event.fields["tier"]), key)
                alone = [number for number in range(self.shards) if len({node for node, each, _ in held if each == number}) < 2]
                assert not alone, f"{key} is told as replicated, and only one node has its shards {alone}"
                if self.protected is None or key > self.protected:
                    self.protected = key
                    self.newer = sum(each > key for each in self.core._catalog.complete[RAM])

    def places(self, tier: str, key: SnapshotKey) -> set[tuple[int, int, bool]]:
        """Where a snapshot lies on a tier: node, number of the shard, and whether it is a replica."""
        return {
            (daemon.node, place[2], place[3])
            for daemon in self.daemons
            for place in daemon.held
            if daemon.alive and place[:2] == (tier, key)
        }

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
                daemon.ask()

    def maybe_begin(self) -> None:
        """All members that are wanted are there."""
        if self.state != "gathering" or len(self.ready) < self.wanted:
            return
        self.durable.fence = self.generation + 1
        if due := self.core.invalidated_due():
            for step, key in list(self.durable.committed.items()):
                if any(each.covers(key.step, key.generation) for each in due):
                    del self.durable.committed[step]
        self.generation += 1
        self.members = sorted(self.ready)[: self.wanted]
        self.outstanding = {}
        self.do("begin", self.generation, self.members)
        self.do("quarantine_done")
        assert self.core.invalidated_due() == ()
        for rank, node in enumerate(self.members):
            self.daemons[node].rank, self.daemons[node].generation = rank, self.generation
            self.daemons[node].inbox.append(BEGIN_SESSION)
        self.state = "starting"

    def resume(self, damaged: int = 0) -> None:
        """Workers have read the newest that there is, but for so many that were damaged."""
        found = {0, *(each.key.step for each in unpack(self.core.candidates())), *self.durable.committed}
        self.base = sorted(found)[-1 - min(damaged, len(found) - 1)]
        if damaged or (self.protected is not None and self.protected.step > self.base):
            self.protected = None  # what was damaged may have taken its place
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
        self.train(takers)

    @precondition(lambda self: self.state == "starting")
    @rule(damaged=st.integers(1, 3))
    def starts_from_an_older_one(self, damaged: int) -> None:
        """Some of what is there cannot be read."""
        self.resume(damaged)

    def train(self, takers: list[int]) -> None:
        if self.state == "starting":
            self.resume()
        for node in (*self.members, *takers):
            self.take(node)

    def take(self, node: int, *, left_out: bool = False) -> None:
        daemon = self.daemons[node]
        if self.state == "running" and daemon.rank is not None:
            slowest = min(self.daemons[member].step for member in self.members)
            if daemon.step <= slowest + 1:
                while BEGIN_SESSION in daemon.inbox:  # before, there is no buffer for them
                    daemon.handle()
                step = daemon.step + 1
                wants = tuple(tier for tier, every in ((NVME, 2), (DURABLE, 3)) if step % every == 0)
                daemon.take(wants, left_out=left_out)

    @precondition(lambda self: self.state == "running")
    @rule(left_out_by=st.sets(nodes, min_size=1), before=moves, after=moves)
    def workers_end(self, left_out_by: set[int], before: Moves, after: Moves) -> None:
        """Some members leave the last step out, so that all take it again; nothing else happens until it is durable."""
        last = max(self.daemons[member].step for member in self.members) + 1
        while (slowest := min(self.daemons[member].step for member in self.members)) < last:
            for member in self.members:
                if self.daemons[member].step == slowest:
                    self.take(member, left_out=slowest + 1 == last and member in left_out_by)
        self.get_on(before)
        taken = [self.daemons[member].take_again((DURABLE,)) for member in self.members]
        self.get_on(after)
        self.what_is_promised_is_there()
        self.settle()
        for _ in range(3):
            self.do("save_newest", self.now)
            self.settle()
        assert self.core.durable_step == last or not all(taken), f"step {last} was taken again by all, and is not durable"
        self.gather()

    @rule(moves=moves)
    def get_on(self, moves: Moves) -> None:
        """Nodes get requests, end jobs and are heard, so many of each."""
        for node, requests, news, jobs in moves:
            daemon = self.daemons[node]
            for _ in range(min(requests, len(daemon.inbox))):
                daemon.handle()
            for _ in range(min(jobs, len(daemon.work))):
                self.end(daemon, daemon.work[0], succeeds=True)
            for _ in range(news):
                self.news_arrive(node)

    @property
    def newest(self) -> SnapshotKey | None:
        """The newest snapshot that is let go only for a newer one."""
        return self.core.newest

    def news_arrive(self, node: int) -> None:
        daemon = self.daemons[node]
        if not daemon.outbox:
            return
        news, asked = daemon.outbox.popleft()
        self.now += 0.01
        newest, durable_step = self.newest, self.core.durable_step
        owed = isinstance(news, Committed) and news.shard in self.outstanding.get(news.tier, (0, {}))[1]
        self.answered(node, None if isinstance(news, Inventory) else news)
        if isinstance(news, Inventory) and asked:
            self.core.inventory(node, news)
            self.ready.add(node)
            self.maybe_begin()
            return
        self.do("on_news", node, news, self.now)
        assert self.core.durable_step >= durable_step, "what is durable was taken back"
        if isinstance(news, Committed) and owed and news.key.step in self.durable.committed:
            invalid = any(each.covers(news.key.step, news.key.generation) for each in self.invalid)
            assert invalid or self.core.durable_step >= news.key.step, f"{news.key} is committed, and does not count"
        if not isinstance(news, Inventory):
            assert newest is None or (self.core.newest or SnapshotKey(0, 0)) >= newest, f"{newest} was let go for nothing newer"
            if not isinstance(news, Held | TierTrouble | TierWell):
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
        self.protected = None
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
            daemon.ask()

    @precondition(lambda self: self.state == "running")
    @rule()
    def worker_dies(self) -> None:
        self.gather()

    @precondition(lambda self: self.state == "running")
    @rule(back=st.integers(0, 3))
    def numbers_are_bad(self, back: int) -> None:
        step = max(0, max(self.daemons[node].step for node in self.members) - back)
        self.invalid.append(InvalidationRule(self.generation, step))
        if self.protected is not None and (self.protected.step > step or self.has_a_successor(self.protected, step)):
            self.protected = None
        self.do("roll_back", step, "bad numbers")
        self.gather()

    def has_a_successor(self, key: SnapshotKey, step: int) -> bool:
        """Whether a newer snapshot than this, of after the step, is whole: then this one may have been let go of."""
        there = {place[1:3] for daemon in self.daemons if daemon.alive for place in daemon.will_hold()}
        newer = {each for each, _ in there if each > key and each.step > step}
        return any(all((each, number) in there for number in range(self.shards)) for each in newer)

    @rule(steps=st.integers(1, 4))
    def undisturbed(self, steps: int) -> None:
        """Training goes on for a while, and everything arrives between the steps."""
        for _ in range(steps):
            self.settle()
            self.train([])

    @rule(kind=st.sampled_from(["copy", "flush", "commit"]), steps=st.integers(3, 7))
    def stands_still(self, kind: str, steps: int) -> None:
        """Training goes on while jobs of one kind do not get on; they may end well all the same."""
        for _ in range(steps):
            self.train([])
            self.settle(but=kind)
            for daemon in self.daemons:
                for work in daemon.work:
                    daemon.trouble(work)
            self.settle(but=kind)

    @rule()
    def settle(self, but: str | None = None) -> None:
        """All that is on its way arrives, and what is under way succeeds, but for jobs of one kind."""
        for _ in range(100):
            busy = False
            for daemon in self.daemons:
                while daemon.inbox:
                    daemon.handle()
                    busy = True
                for work in [each for each in daemon.work if not but or getattr(each.request, "kind", None) != but]:
                    self.end(daemon, work, succeeds=True)
                    busy = True
                while daemon.outbox:
                    self.news_arrive(daemon.node)
                    busy = True
            if not busy:
                under_way = {tier: shards for tier, (_, shards) in self.outstanding.items() if shards}
                waits = not but and bool(under_way or self.core._transfers.jobs or self.core._replication.rounds)
                assert not waits or self.state == "gathering", f"{under_way} wait for an answer that nobody owes"
                return
        raise AssertionError("it never comes to rest")

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def what_is_promised_is_there(self) -> None:
        for candidate in unpack(self.core.candidates()):
            assert len(candidate.shards) == self.shards and all(candidate.shards), f"{candidate.key} is not whole"
            assert not any(each.covers(candidate.key.step, candidate.key.generation) for each in self.invalid)
            for number, holders in enumerate(candidate.shards):
                for holder in holders:
                    if self.state == "gathering" and holder.node not in self.ready:
                        continue  # it will say what it holds before anybody counts on that
                    held = self.daemons[holder.node].will_hold()
                    there = {Daemon.directory(place) for place in held if place[1:3] == (candidate.key, number)}
                    assert holder.directory in there, f"{candidate.key}: node {holder.node} will not hold {holder.directory}"

    @invariant()
    def what_is_replicated_outlives_any_one_node(self) -> None:
        if self.protected is None:
            return
        held = [{place[1:3] for place in daemon.will_hold()} if daemon.alive else set() for daemon in self.daemons]
        for lost in range(NODES):
            there = set().union(*(each for node, each in enumerate(held) if node != lost))
            keys = {key for key, _ in there if key >= self.protected}
            whole = [key for key in keys if all((key, number) in there for number in range(self.shards))]
            assert whole, f"{self.protected} was replicated, but with node {lost} nothing would be left that is as new"

    @invariant()
    def what_is_durable_is_committed(self) -> None:
        covered = any(each.generation >= self.generation for each in self.invalid)
        step = self.core.durable_step
        assert step == 0 or covered or step in self.durable.committed, f"step {step} was never committed"

    @invariant()
    def little_is_remembered(self) -> None:
        assert len(self.core._catalog.snapshots) <= 40

    def teardown(self) -> None:
        """With all nodes back, training goes on, snapshots get complete and replicated, and the newest becomes durable."""
        if not self.holds:
            return
        for node in range(NODES):
            self.node_returns(node)
        self.settle()
        if self.state == "starting":
            self.resume()
        self.settle()
        last = max(self.daemons[member].step for member in self.members) + 3
        while (slowest := min(self.daemons[member].step for member in self.members)) < last:
            for member in self.members:
                if self.daemons[member].step == slowest:
                    self.take(member)
            self.settle()
        newest = self.core.newest
        assert newest is not None and newest.step == last, f"step {last} was taken by all, and {newest} is the newest"
        assert self.protected == newest, f"{newest} is not replicated, but {self.protected}"
        for _ in range(3):
            self.do("save_newest", self.now)
            self.settle()
        assert not self.core.behind, f"{newest} does not become durable"
        for daemon in self.daemons:
            lying = sorted({place[1] for place in daemon.held if place[0] == NVME})
            assert len(lying) <= 3, f"node {daemon.node} keeps {lying} although two are to be kept, and one may be on its way"
        assert newest is None or self.core.durable_step >= newest.step


class HybridCampaign(Campaign):
    """Four members, of which two and two have the same shards."""

    wanted = 4
    shards = 2

    @property
    def newest(self) -> SnapshotKey | None:
        """One that some members left out may be whole by those that have the same shards, and is forgotten as if it were not."""
        return max((key for keys in self.core._catalog.complete.values() for key in keys), default=None)
