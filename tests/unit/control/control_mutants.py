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
        examples=2_000,
    ),
    Mutant(
        "the number of a fence that was given up is used again",
        "resilient.control.generations",
        "self._fenced = max(self._fenced, self.generation) + 1",
        "self._fenced = self.generation + 1",
    ),
    Mutant(
        "a start goes to the nodes in the order of their numbers, not of their ranks",
        "resilient.control.generations",
        "for node_rank, node in enumerate(members):",
        "for node_rank, node in enumerate(sorted(members)):",
        examples=1_000,
    ),
    Mutant(
        "a spare that takes part is not told to start",
        "resilient.control.generations",
        "            out.send(node, message)\n\n    # -- while it runs",
        "            if node < membership.wanted:\n                out.send(node, message)\n\n    # -- while it runs",
    ),
    Mutant(
        "the restart that is decided on counts among those before it",
        "resilient.recovery.policy",
        "self.left, self._counts)\n\n    @cached_property\n    def lost_alone",
        "self.left, self._counts) + 1\n\n    @cached_property\n    def lost_alone",
        examples=1_000,
    ),
    Mutant(
        "a fault that was recovered from is told again with the next one",
        "resilient.control.incidents",
        "self._stopped_ranks, self._stalls = [], []\n        self._incident_id",
        "self._stalls = []\n        self._incident_id",
    ),
    Mutant(
        "an incident that is over goes on with the next fault",
        "resilient.control.incidents",
        '        self._incident_id = ""\n\n    def recovered',
        "\n    def recovered",
    ),
    Mutant(
        "a fault that meets another one is an incident of its own",
        "resilient.control.incidents",
        "            self._incident_id = self._incident_id or fault.fault_id\n",
        "            self._incident_id = fault.fault_id\n",
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
        "the agent of a node that is lost is not started anew",
        "resilient.control.membership",
        "        self._launch_s[index] = now_s\n        if before.works:\n            self",
        "        self._launch_s[index] = now_s + 1e6 * before.works\n        if before.works:\n            self",
    ),
    Mutant(
        "ranks are stopped at a boundary that one of them has passed",
        "resilient.control.hold",
        "Arm(generation=self._generation, target=self._checked + 1)",
        "Arm(generation=self._generation, target=self._checked)",
    ),
    Mutant(
        "workers of a generation that starts while a stop is asked for are never asked to stop",
        "resilient.control.generations",
        "            for node in self._membership.members:\n                self.hold.propose(node, out)",
        "            for node in self._membership.members[:-1]:\n                self.hold.propose(node, out)",
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
        "            if not snapshots.behind:\n                self.finish(*self._saved_all",
        "            if not snapshots.behind or snapshots.durable_step:\n                self.finish(*self._saved_all",
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
        "trouble of the run directory that lasts is a new fault each time",
        "resilient.control.run_dir",
        "        if self._since_s is not None:\n            return None\n        self._since_s",
        "        self._since_s",
    ),
)
