"""A campaign told step by step, as its ledger would tell it, and what a verdict sees of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chaos.fault import Expectation
from chaos.injectors.context import Target
from chaos.verdict.record import Injection
from chaos.verdict.verdict import Checked, JobRun, Observation, Outcome, Weights, judge
from resilient.account import account

STEPS = 40
EVERY = 5
KILLED = Expectation(frozenset({"exit"}), frozenset({"restart_workers"}), culprit=True)
LINK = Expectation(frozenset({"collective_timeout", "node_lost"}), frozenset({"wait", "restart_workers"}), may_pass=True)
STORAGE = Expectation(frozenset({"storage"}), frozenset({"degrade_tier"}))
DRIVER = Expectation(exits=frozenset({-9}))
NODE = Expectation(frozenset({"node_lost"}), frozenset({"shrink"}), culprit=True)
STOPPED = Expectation(frozenset({"preempted"}), frozenset({"finish_drain"}), exits=frozenset({75}), lost_steps=0)
SPIKE = Expectation(frozenset({"loss_spike"}), frozenset({"roll_back"}))


def loss(step: int) -> float:
    return 10 / step + 0.1


@dataclass
class Tale:
    """A campaign as it writes its ledger: a step a second, a snapshot every five."""

    t: float = 1000.0

    def __post_init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self.injections: list[Injection] = []
        self.expected: dict[str, Expectation] = {}
        self.jobs: list[JobRun] = []
        self.generation = self.step = self.held = 0
        self.started()

    def event(self, what: str, **fields: Any) -> None:
        self.events.append({"t": self.t, "event": what, "generation": self.generation, **fields})

    def started(self, world: int = 2) -> None:
        self.event("run_started")
        self.job_t = self.t
        self.t += 2
        self.begins(world)

    def begins(self, world: int = 2, resumed: int | None = None) -> None:
        self.generation += 1
        self.step = self.held if resumed is None else resumed
        hosts = {"members": list(range(world)), "nodes": [f"n{node + 1}" for node in range(world)]}
        self.event("generation_started", world_size=world, resumed_step=self.step, **hosts)

    def goes_to(self, step: int) -> "Tale":
        while self.step < step:
            self.t += 1
            self.step += 1
            line = {"t": self.t, "step": self.step, "step_s": 1.0, "loss": loss(self.step), "generation": self.generation}
            self.metrics.append(line)
            if self.step % EVERY == 0:
                self.held = self.step
                self.event("snapshot", step=self.step, tier="memory", stall_s=0.0)
        return self

    def strikes(self, expected: Expectation, rank: int | None = 1, *, lasts_s: float = 0.0, node: int | None = 0) -> "Tale":
        self.t += 0.3
        name = f"f{len(self.injections) + 1}"
        where = Target(rank=rank, node=node)
        self.injections.append(Injection(name, "worker_kill", {}, where, self.t, self.t, self.t + lasts_s + 0.01, {"pid": 7}))
        self.expected[name] = expected
        return self

    def tells(
        self, kind: str, *actions: str, ranks: Sequence[int] = (1,), nodes: Sequence[int] = (0,), name: str = "", **fields: Any
    ) -> str:
        self.t += 0.2
        name = name or f"g{self.generation}-{len(self.events)}"
        self.event("fault", fault_id=name, kind=kind, ranks=list(ranks), nodes=list(nodes), detail="of a test", detect_s=0.1)
        for action in actions:
            self.event("action", fault_id=name, name=action, reason="", **fields)
        return name

    def recovers(self, name: str, lost_steps: int = 0) -> "Tale":
        self.goes_to(self.step + 1)
        self.event("recovered", fault_id=name, step=self.step, downtime_s=1.5, lost_steps=lost_steps)
        return self

    def killed(self, rank: int = 1, expected: Expectation = KILLED, kind: str = "exit") -> "Tale":
        """A worker is killed, and all is as it should be."""
        self.strikes(expected, rank)
        done = self.step
        name = self.tells(kind, "restart_workers", ranks=[rank])
        self.t += 0.4
        self.begins()
        return self.recovers(name, done - self.held)

    def ends(self, code: int = 0) -> "Tale":
        self.t += 0.5
        if code >= 0:
            self.event("run_finished", exit_code=code, step=self.step)
        self.jobs.append(JobRun(self.job_t - 1, self.t + 0.1, code))
        return self

    def seen(self) -> Observation:
        return Observation(
            experiment="test",
            seed=3,
            target_step=STEPS,
            injections=self.injections,
            expected=self.expected,
            events=self.events,
            metrics=self.metrics,
            jobs=self.jobs,
            account=account(self.events, self.metrics),
            reference=[{"step": step, "loss": loss(step)} for step in range(1, STEPS + 1)],
            weights=Weights(),
            checkpoints=[Checked(f"/run/checkpoints/step-{step:08}", step) for step in (35, 40)],
            left={"processes": [], "files": [], "machine": []},
        )


def usual() -> Observation:
    return Tale().goes_to(12).killed(1).goes_to(28).killed(0).goes_to(STEPS).ends().seen()


def outcomes(seen: Observation) -> list[Outcome]:
    return list(judge(seen).outcomes)
