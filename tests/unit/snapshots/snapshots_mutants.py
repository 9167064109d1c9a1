"""Mistakes in the snapshot core that its machine must find. Each is one that a programmer makes."""

from mutation import Mutant

MUTANTS = (
    Mutant(
        "a step is complete in memory although a node has not taken it",
        "resilient.snapshots.snapshots",
        "snapshot.owners.get(memory) == len(self._members)",
        "snapshot.owners.get(memory, 0) >= len(self._members) - 1",
    ),
    Mutant(
        "a step is whole as soon as there are as many copies as shards, whatever they are of",
        "resilient.snapshots.catalog",
        "return len(self.copies) == self.shards",
        "return sum(self.copies.values()) >= self.shards",
    ),
    Mutant(
        "what a lost node held is still counted",
        "resilient.snapshots.catalog",
        "        self.addresses.pop(node, None)\n        self.replace(node, ())",
        "        self.replace(node, ())",
    ),
    Mutant(
        "candidates that were packed once are used although a copy is gone",
        "resilient.snapshots.catalog",
        '        """Remove one location. What is left of a snapshot may be nothing."""\n        self.version += 1\n',
        '        """Remove one location. What is left of a snapshot may be nothing."""\n',
    ),
    Mutant(
        "an invalidated snapshot is a candidate once a node returns with it",
        "resilient.snapshots.snapshots",
        "        valid = [shard for shard in news.shards if not self._invalidation.covers(shard.key)]\n",
        "        valid = list(news.shards)\n",
    ),
    Mutant(
        "daemons are told what to forget while nodes are gathered",
        "resilient.snapshots.retention",
        '        """Tell all daemons what is needed of a tier."""\n        if self.holding:\n            return\n',
        '        """Tell all daemons what is needed of a tier."""\n',
    ),
    Mutant(
        "what was asked to be forgotten is counted when a daemon lists it",
        "resilient.snapshots.snapshots",
        "[each for each in there if with_forgotten or self._retention.expects(each.tier, each.key)]",
        "there",
        400,
    ),
    Mutant(
        "a step is replicated once the first buddy has its shard",
        "resilient.snapshots.replication",
        "        if found.waiting:\n            return False\n",
        "",
    ),
    Mutant(
        "a buddy whose daemon is a new one is still waited for",
        "resilient.snapshots.snapshots",
        "        for tier in self._replication.new_daemon(node, generation, out):\n            self._on_replicated(tier, out)\n",
        "",
        600,
    ),
    Mutant(
        "a round of replication that failed counts as one that succeeded",
        "resilient.snapshots.replication",
        "if found.failed or snapshot is None or not snapshot.replicated_on(tier):",
        "if False:",
    ),
    Mutant(
        "a replica is asked for of a node that is no member any more",
        "resilient.snapshots.replication",
        "        if members != self._members:\n            self._members, self._buddies",
        "        if len(members) != len(self._members):\n            self._members, self._buddies",
    ),
    Mutant(
        "a new daemon is not told again what it has to transfer",
        "resilient.snapshots.transfers",
        "                if job.unwanted is None:\n                    self._request(job, shard, generation, out)",
        "                if job.unwanted is None:\n                    continue",
        400,
    ),
    Mutant(
        "a commit that was superseded and made all the same does not count",
        "resilient.snapshots.snapshots",
        "if not self._invalidation.covers(job.key):",
        "if job.unwanted is None:",
    ),
    Mutant(
        "a step that is taken again is left out by what a node says of the time before",
        "resilient.snapshots.left_out",
        "        if again < known:\n            return self._report(node, step)\n",
        "",
    ),
    Mutant(
        "a step that is taken again is left out by what a new daemon has found",
        "resilient.snapshots.left_out",
        "self._held.difference(held) - self.again.keys()",
        "self._held.difference(held)",
    ),
)
