"""Mistakes in the control core that its machine must find. Each is one that a programmer makes."""

from mutation import Mutant

MUTANTS = (
    Mutant(
        "messages of a generation that is over are taken for those of the present one",
        "resilient.control.coordinator",
        "current = message.generation == self.generation",
        "current = message.generation <= self.generation",
    ),
    Mutant(
        "the outcome of a fence that was given up starts the next generation",
        "resilient.control.generations",
        "if self.state is not State.FENCING or generation != self._fenced or self._awaited",
        "if self.state is not State.FENCING or self._awaited",
    ),
    Mutant(
        "the outcome of a quarantine that was given up starts the next generation",
        "resilient.control.generations",
        """if self.state is not State.FENCING or generation != self._fenced:
            return None
        if error is not None:
            return f"a checkpoint""",
        """if self.state is not State.FENCING:
            return None
        if error is not None:
            return f"a checkpoint""",
    ),
    Mutant(
        "a fence that nobody answers is waited for, for ever",
        "resilient.control.generations",
        '        if self._awaited == "fence":\n            return self.fence_raised(',
        '        if self._awaited == "fence":\n            return None\n            return self.fence_raised(',
    ),
    Mutant(
        "what nodes came for while the fence was raised is forgotten with the start",
        "resilient.control.generations",
        "        self.stand_by()  # who came",
        "        self._grown_from = None  # who came",
    ),
    Mutant(
        "the number of a fence that was given up is used again",
        "resilient.control.generations",
        "self._fenced = max(self._fenced, self.generation) + 1",
        "self._fenced = self.generation + 1",
    ),
    Mutant(
        "a node that is lost while the fence is raised is told to start",
        "resilient.control.generations",
        "if self.state is State.FENCING and node in self._chosen:",
        "if self.state is State.FENCING and node == self._chosen[0]:",
    ),
    Mutant(
        "a start goes to the nodes in the order of their numbers, not of their ranks",
        "resilient.control.generations",
        "for node_rank, node in enumerate(members):",
        "for node_rank, node in enumerate(sorted(members)):",
    ),
    Mutant(
        "a spare that takes part is not told to start",
        "resilient.control.generations",
        "            out.send(node, message)\n\n    # -- while it runs",
        "            if node < membership.wanted:\n                out.send(node, message)\n\n    # -- while it runs",
    ),
    Mutant(
        "ranks are told where to go back to only once, although the generation may end before a step",
        "resilient.control.generations",
        "            out.send(node, message)\n\n    # -- while it runs",
        "            out.send(node, message)\n        self._roll_backs.go_back_to = None\n\n    # -- while it runs",
    ),
    Mutant(
        "a generation counts as begun by the heartbeat of any node, not by what rank 0 says",
        "resilient.control.generations",
        "if run is None or not (run.announced or from_rank_0):",
        "if run is None:",
    ),
    Mutant(
        "a restart is counted twice",
        "resilient.control.incidents",
        "            self.faults.append((now, fault))\n",
        "            self.faults += [(now, fault), (now, fault)]\n",
    ),
    Mutant(
        "a fault that was recovered from is told again with the next one",
        "resilient.control.incidents",
        "self._stopped_ranks, self._stalls = [], []\n\n    def recovered",
        "self._stalls = []\n\n    def recovered",
    ),
    Mutant(
        "of faults in a row only the last one is ever over",
        "resilient.control.incidents",
        "            self._stopped_ranks.append((fault, happened_t))",
        "            self._stopped_ranks = [(fault, happened_t)]",
    ),
    Mutant(
        "faults that stop no rank share an id with the next one",
        "resilient.control.incidents",
        "        self._reported += 1\n",
        '        self._reported += action.name != "restart_agent"\n',
    ),
    Mutant(
        "silence is counted for time for which the driver was away",
        "resilient.control.attendance",
        "            self._away_s += gap_s",
        "            self._away_s += min(gap_s, 0.0)",
    ),
    Mutant(
        "a node that was looked at once is never looked at again",
        "resilient.control.presence",
        "        for entry in again:\n            heapq.heappush(self._heap, entry)",
        "        for entry in again:\n            if entry[1] in found:\n                heapq.heappush(self._heap, entry)",
    ),
    Mutant(
        "a node that returns is still as silent as the one that was lost",
        "resilient.control.presence",
        "        self._last_message_s[node] = now_s\n        if node not in self._queued:",
        "        self._last_message_s.setdefault(node, now_s)\n        if node not in self._queued:",
    ),
    Mutant(
        "the agent of a node that is lost is not started anew",
        "resilient.control.membership",
        "            self._launch_s[index], node.until_s = now_s, now_s + self._rejoin_s",
        "            node.until_s = now_s + self._rejoin_s",
    ),
    Mutant(
        "a node that was told to start still counts as ready for the next start",
        "resilient.control.membership",
        "self.nodes[index].ready_port, self.nodes[index].gone = None, False",
        "self.nodes[index].gone = False",
    ),
    Mutant(
        "a member that still ends its workers is not waited for",
        "resilient.control.membership",
        "if self.nodes[index].joined or now_s < self.nodes[index].until_s:",
        "if now_s < self.nodes[index].until_s:",
    ),
    Mutant(
        "a node that stands by is forgotten once a generation has started",
        "resilient.control.membership",
        "self._standing_by = {index for index, node in enumerate(self.nodes) if node.ready and index not in self._node_ranks}",
        "self._standing_by = set()",
    ),
    Mutant(
        "a node that is not fit takes part",
        "resilient.control.membership",
        "        return self.ready_port is not None and not self.unfit",
        "        return self.ready_port is not None",
    ),
    Mutant(
        "a failure that blames a peer outlives the generation in which it happened",
        "resilient.control.response",
        "        self._core.inspector.drop()\n        self._core.ends.over()\n        self._core.generations.regather(when, out)",
        "        self._core.inspector.drop()\n        self._core.generations.regather(when, out)",
    ),
    Mutant(
        "ranks are stopped at a boundary that one of them has passed",
        "resilient.control.drain",
        "Arm(generation=generation, target=self._checked + 1)",
        "Arm(generation=generation, target=self._checked)",
    ),
    Mutant(
        "ranks are stopped before all have said how far they are",
        "resilient.control.drain",
        "        self._checked = max(self._checked, checked)\n        if not self._waiting:",
        "        self._checked = max(self._checked, checked)\n        if len(self._waiting) <= 1:",
    ),
    Mutant(
        "workers of a generation that starts while a stop is asked for are never asked to stop",
        "resilient.control.shutdown",
        "        for node in self._membership.members:\n            self.propose_to(node, out)",
        "        for node in self._membership.members[:-1]:\n            self.propose_to(node, out)",
    ),
    Mutant(
        "the job ends before daemons have settled what workers left",
        "resilient.control.shutdown",
        "        if not saving.waiting:\n            snapshots.save_newest",
        "        if not saving.waiting or snapshots.newest is None:\n            snapshots.save_newest",
    ),
    Mutant(
        "the job ends although the newest snapshot is not durable",
        "resilient.control.shutdown",
        "            if not snapshots.behind:\n                self.finish(saving.code",
        "            if not snapshots.behind or snapshots.durable_step:\n                self.finish(saving.code",
    ),
    Mutant(
        "records are acknowledged before they are to be written",
        "resilient.control.workers",
        "        for record in message.records:\n"
        "            self._on_record(node, record, message.generation, when, out)\n"
        "        if message.records:\n"
        "            out.append(AcknowledgeRecords(node, len(message.records)))\n",
        "        if message.records:\n"
        "            out.append(AcknowledgeRecords(node, len(message.records)))\n"
        "        for record in message.records:\n"
        "            self._on_record(node, record, message.generation, when, out)\n",
    ),
    Mutant(
        "where an earlier generation went on from is taken for where this one does",
        "resilient.control.workers",
        "if generation == self._generation and isinstance(step, int):",
        "if isinstance(step, int):",
    ),
    Mutant(
        "trouble of the run directory that lasts is a new fault each time",
        "resilient.control.run_dir",
        "        if self._since_s is not None:\n            return None\n        self._since_s",
        "        self._since_s",
    ),
)
