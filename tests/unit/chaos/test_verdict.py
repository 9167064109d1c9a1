"""Every invariant of a verdict is broken once, and the verdict says which. Campaigns are told as the ledger would tell them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.fault import Expectation
from chaos.injectors.context import Target
from chaos.verdict.record import Injection
from chaos.verdict.verdict import OF_EACH, OF_THE_RUN, Checked, JobRun, Observation, Outcome, Weights, judge
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


def test_a_campaign_that_recovers_as_it_should_is_green():
    verdict = judge(usual())
    assert verdict.broken == []
    assert {check.name for check in verdict.checks} == {*OF_EACH, *OF_THE_RUN}
    first, second = verdict.outcomes
    assert (first.culprit, first.kinds, first.taken, first.lost_steps) == ("right", ["exit"], ["restart_workers"], 2)
    assert (first.detection_s, first.downtime_s) == (pytest.approx(0.2), pytest.approx(1.6))
    assert second.lost_steps == 3
    assert verdict.goodput == usual().account.goodput
    assert (verdict.steps, verdict.generations) == (STEPS, 3)


# -- every invariant, broken ---------------------------------------------------------------------------------------------


def lines(seen: Observation, which: Callable[[Any], bool], change: dict[str, Any], of: str = "events") -> Observation:
    """With the first line changed that fits."""
    changed = [dict(line) for line in getattr(seen, of)]
    next(line for line in changed if which(line)).update(change)
    return replace(seen, **{of: changed})


def without(seen: Observation, which: Callable[[Any], bool]) -> Observation:
    return replace(seen, events=[line for line in seen.events if not which(line)])


def first(seen: Observation, **changes: Any) -> Observation:
    return replace(seen, injections=[replace(seen.injections[0], **changes), *seen.injections[1:]])


def is_a(what: str) -> Callable[[Any], bool]:
    return lambda line: line["event"] == what


def damaged(step: int) -> Callable[[Observation], Observation]:
    def change(seen: Observation) -> Observation:
        return replace(seen, checkpoints=[replace(each, damage="c/0 is missing") if each.step == step else each
                                          for each in seen.checkpoints])  # fmt: skip

    return change


def never_again(seen: Observation) -> Observation:
    """Nothing is computed after the second fault, and nobody says that it did."""
    t = seen.injections[1].t or 0.0
    kept = [line for line in seen.events if not (line["event"] == "recovered" and line["t"] > t)]
    return replace(seen, metrics=[line for line in seen.metrics if line["t"] < t], events=kept, reference=None)


BREAKS: dict[str, tuple[set[str], Callable[[Observation], Observation]]] = {
    "one was not injected": ({"injected"}, lambda seen: replace(
        seen,
        injections=[*seen.injections, Injection("f3", "worker_kill", {}, Target(rank=0), 1100.0, failed="rank 0 does not run")],
        expected={**seen.expected, "f3": KILLED},
    )),
    "there is no evidence of one": ({"injected"}, lambda seen: first(seen, evidence={})),
    "it never went on": ({"recovered", "reached"}, never_again),
    "one was reported as something else": ({"told"}, lambda seen: lines(seen, is_a("fault"), {"kind": "hang"})),
    "nobody reported one": ({"told"}, lambda seen: without(seen, lambda line: line.get("fault_id") == first_id(seen))),
    "another rank was blamed": ({"culprit"}, lambda seen: lines(seen, is_a("fault"), {"ranks": [0]})),
    "nobody was blamed": ({"culprit"}, lambda seen: lines(seen, is_a("fault"), {"ranks": [], "nodes": []})),
    "a node was replaced": ({"rung"}, lambda seen: lines(seen, is_a("action"), {"name": "replace_node"})),
    "an older snapshot was gone on from": ({"lost steps"}, lambda seen: lines(
        seen, lambda line: line["event"] == "generation_started" and line["resumed_step"] == 25, {"resumed_step": 20}
    )),
    "the last job ended badly": ({"reached"}, lambda seen: replace(seen, jobs=[replace(seen.jobs[0], code=70)])),
    "a job ended early": ({"exits"}, lambda seen: replace(seen, jobs=[replace(seen.jobs[0], code=70), *seen.jobs])),
    "a fault was reported that nobody injected": ({"false alarms"}, lambda seen: replace(
        seen, injections=seen.injections[:1], expected={"f1": KILLED}
    )),
    "a checkpoint was refused that nobody damaged": ({"false alarms"}, lambda seen: replace(
        seen, events=[*seen.events, {"t": 1009.0, "event": "checkpoint_rejected", "generation": 2, "step": 5, "reason": "damaged"}]
    )),
    "a loss is off by the last bit": ({"losses"}, lambda seen: lines(
        seen, lambda line: line["step"] == 26, {"loss": loss(26) * (1 + 2**-52)}, "metrics"
    )),
    "a loss has no reference": ({"losses"}, lambda seen: replace(
        seen, reference=[line for line in seen.reference or () if line["step"] != 9])),
    "a step was never computed": ({"losses"}, lambda seen: replace(
        seen, metrics=[line for line in seen.metrics if line["step"] != 17], account=account(seen.events, [
            line for line in seen.metrics if line["step"] != 17])
    )),
    "bytes without a distance differ": ({"weights"}, lambda seen: replace(seen, weights=Weights(("generator",), 0.0))),
    "a weight differs": ({"weights"}, lambda seen: replace(seen, weights=Weights(("model/norm.weight",), 1e-7))),
    "the newest checkpoint is damaged": ({"checkpoints"}, damaged(40)),
    "an older one is damaged": ({"checkpoints"}, damaged(35)),
    "the last checkpoint is missing": ({"checkpoints"}, lambda seen: replace(seen, checkpoints=seen.checkpoints[:1])),
    "a process is left": ({"processes"}, lambda seen: replace(seen, left={**seen.left, "processes": ["process 77 (python)"]})),
    "a file is left": ({"files"}, lambda seen: replace(seen, left={**seen.left, "files": ["/dev/shm/resilient-0-x-node0"]})),
    "a rule is left": ({"machine"}, lambda seen: replace(seen, left={**seen.left, "machine": ["rule is new: -A INPUT -j DROP"]})),
    "a second is not accounted for": ({"account"}, lambda seen: with_part(seen, "idle", -1.0)),
    "a second is accounted for twice": ({"account"}, lambda seen: with_part(seen, "data", 1.0)),
    "more time than there was is accounted for": ({"account"}, lambda seen: replace(seen, wall_s=10.0)),
    "goodput is not known": ({"goodput", "account"}, lambda seen: replace(seen, account=account([], []))),
}  # fmt: skip


@pytest.mark.parametrize("back", [False, True])
def test_what_a_host_holds_that_was_lost_is_not_left_behind_unless_it_is_back(back: bool):
    seen = usual()
    common = {"t": seen.events[-1]["t"], "generation": 3, "host": "n1"}
    told: list[dict[str, Any]] = [
        {"event": "fault", "fault_id": "g3-1", "kind": "node_lost", "nodes": [1], "ranks": [1], "detail": ""}
    ]
    if back:
        told += [{"event": "generation_started", "members": [0, 1], "nodes": ["n1", "n2"], "world_size": 2, "resumed_step": STEPS}]
    lost = replace(seen, events=[*seen.events, *({**common, **line} for line in told)])
    for file, left in (("n2: /dev/shm/resilient-0-x-node1", back), ("n1: /dev/shm/resilient-0-x-node0", True)):
        assert ("files" in judge(replace(lost, left={"files": [file]})).broken) == left


def first_id(seen: Observation) -> str:
    return str(next(line["fault_id"] for line in seen.events if line["event"] == "fault"))


def with_part(seen: Observation, name: str, seconds: float) -> Observation:
    changed = account(seen.events, seen.metrics)
    changed.seconds[name] += seconds
    return replace(seen, account=changed)


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_invariant_is_named(name: str):
    broken, change = BREAKS[name]
    verdict = judge(change(usual()))
    assert set(verdict.broken) == broken
    assert not verdict.ok


def test_every_invariant_is_broken_by_some_case():
    assert {each for broken, _ in BREAKS.values() for each in broken} == {*OF_EACH, *OF_THE_RUN}


def test_an_experiment_that_injected_nothing_proves_nothing():
    assert judge(Tale().goes_to(STEPS).ends().seen()).broken == ["injected"]


def test_what_is_wrong_is_said_in_words():
    details = {check.name: check.detail for check in judge(BREAKS["another rank was blamed"][1](usual())).checks}
    assert details["culprit"] == "f1 (worker_kill): exit blames rank 0, and it was rank 1"


# -- which fault is of which injection -----------------------------------------------------------------------------------


def test_a_kill_while_another_is_recovered_from_is_an_injection_of_its_own():
    tale = Tale().goes_to(12).strikes(KILLED, 0)
    one = tale.tells("exit", "restart_workers", ranks=[0])
    tale.begins()
    tale.strikes(KILLED, 0)
    two = tale.tells("exit", "restart_workers", ranks=[0])
    tale.t += 0.5
    tale.begins()
    tale.recovers(one, 2)
    tale.event("recovered", fault_id=two, step=11, downtime_s=1.0, lost_steps=0)
    seen = tale.goes_to(STEPS).ends().seen()
    assert judge(seen).broken == []
    assert [each.covered_by for each in outcomes(seen)] == ["", ""]
    assert [each.lost_steps for each in outcomes(seen)] == [2, 0]


def test_of_two_at_once_one_may_be_told_of():
    tale = Tale().goes_to(12).strikes(KILLED, 0)
    seen = tale.killed(1).goes_to(STEPS).ends().seen()
    assert judge(seen).broken == []
    assert [(each.covered_by, each.culprit) for each in outcomes(seen)] == [("f2", "not asked"), ("", "right")]


def test_one_that_nobody_told_of_is_not_covered_by_another_that_is_long_over():
    seen = Tale().goes_to(12).killed(1).goes_to(20).strikes(KILLED, 0).goes_to(STEPS).ends().seen()
    assert judge(seen).broken == ["told"]


def test_the_wrong_rank_is_wrong_even_if_it_was_the_right_one_before():
    tale = Tale().goes_to(12).killed(0).goes_to(20).strikes(KILLED, 1)
    name = tale.tells("exit", "restart_workers", ranks=[0])
    tale.begins()
    seen = tale.recovers(name).goes_to(STEPS).ends().seen()
    assert judge(seen).broken == ["culprit"]
    assert [each.culprit for each in outcomes(seen)] == ["right", "wrong"]


def test_what_is_wrong_with_storage_may_be_told_again_and_again():
    tale = Tale().goes_to(12).strikes(STORAGE, None, lasts_s=3)
    for _ in range(2):
        tale.tells("storage", "degrade_tier", ranks=[])
        tale.goes_to(tale.step + 4)
    tale.recovers("s2")
    seen = tale.goes_to(STEPS).ends().seen()
    assert judge(seen).broken == []
    assert len(outcomes(seen)) == 1


def test_a_flap_that_costs_nothing_may_pass():
    seen = Tale().goes_to(12).strikes(LINK, None).goes_to(STEPS).ends().seen()
    assert judge(seen).broken == []
    assert (outcomes(seen)[0].kinds, outcomes(seen)[0].downtime_s) == ([], 0.0)


def test_what_need_not_be_told_may_be_told_by_what_is_done_about_it():
    """A short outage is waited for, whatever it is called; nothing else may be done."""
    patient = Expectation(actions=frozenset({"wait"}))

    def short(action: str) -> Observation:
        tale = Tale().goes_to(12).strikes(patient, None, lasts_s=2)
        name = tale.tells("collective_timeout", action)
        if action != "wait":
            tale.begins()
        return tale.recovers(name).goes_to(STEPS).ends().seen()

    assert judge(short("wait")).broken == []
    assert outcomes(short("wait"))[0].kinds == ["collective_timeout"]
    assert set(judge(short("restart_workers")).broken) == {"told", "rung"}


def test_a_checkpoint_that_was_damaged_may_be_refused():
    tale = Tale().goes_to(12).strikes(Expectation(rejected=True, lost_steps=None), None)
    tale.killed(1)
    tale.event("checkpoint_rejected", step=10, tier="durable", reason="c/0 has another checksum")
    assert judge(tale.goes_to(STEPS).ends().seen()).broken == []


def test_a_stall_that_was_waited_for_and_what_came_of_it_belong_to_the_same_outage():
    """Both have the same id in the ledger."""
    tale = Tale().goes_to(12).strikes(LINK, None, lasts_s=5)
    tale.tells("collective_timeout", "wait", name="g1-1")
    tale.t += 2
    tale.tells("node_lost", "restart_workers", name="g1-1")
    tale.begins()
    tale.recovers("g1-1", 2)
    seen = tale.goes_to(STEPS).ends().seen()
    (only,) = outcomes(seen)
    assert (only.kinds, only.taken, only.ok) == (["collective_timeout", "node_lost"], ["wait", "restart_workers"], True)


def test_a_stray_fault_of_a_kind_that_an_old_injection_expects_is_a_false_alarm():
    tale = Tale().goes_to(12).killed(1).goes_to(20)
    name = tale.tells("exit", "restart_workers", ranks=[1])
    tale.begins()
    seen = tale.recovers(name).goes_to(STEPS).ends().seen()
    assert judge(seen).broken == ["false alarms"]


def test_down_counts_from_the_injection_as_detected_does_however_late_the_failure_showed():
    tale = Tale().goes_to(12).strikes(KILLED)
    tale.t += 12.0
    name = tale.tells("exit", "restart_workers")
    tale.begins()
    seen = tale.recovers(name).goes_to(STEPS).ends().seen()  # which says that it took 1.5 s
    (only,) = outcomes(seen)
    assert (only.detection_s, only.downtime_s) == (pytest.approx(12.2), pytest.approx(13.2))


def test_down_does_not_count_the_time_in_which_steps_are_finished_after_an_injection():
    tale = Tale().goes_to(12).strikes(SPIKE, lasts_s=20).goes_to(17)
    one = tale.tells("loss_spike", "roll_back", step=10)
    tale.begins(resumed=10)
    two = tale.recovers(one).goes_to(14).tells("loss_spike", "roll_back", step=10)
    tale.begins(resumed=10)
    (only,) = outcomes(tale.recovers(two).goes_to(STEPS).ends().seen())
    assert only.downtime_s == pytest.approx(1.2 + 1.2)


# -- jobs that end -------------------------------------------------------------------------------------------------------


def test_a_driver_that_is_killed_ends_its_job_and_no_other_may():
    tale = Tale().goes_to(12).strikes(DRIVER, None, node=None)
    tale.event("committed", step=10, tier="durable")  # nothing that the account would know
    tale.t += 0.1
    tale.ends(-9)
    tale.t += 5
    tale.started()
    seen = tale.goes_to(STEPS).ends().seen()
    assert judge(seen).broken == []
    assert outcomes(seen)[0].lost_steps == 2
    assert outcomes(seen)[0].downtime_s == pytest.approx(8.6)
    assert judge(replace(seen, jobs=[replace(seen.jobs[0], code=-11), seen.jobs[1]])).broken == ["exits"]


def test_a_drained_job_loses_nothing():
    def drained(held: int) -> Observation:
        tale = Tale().goes_to(13).strikes(STOPPED, None)
        tale.tells("preempted", "finish_drain", ranks=[])
        tale.goes_to(14)
        tale.event("snapshot", step=14, tier="memory", stall_s=0.0)
        tale.event("drain", signal="SIGTERM", deadline_s=30, took_s=1.1, step=14)
        tale.ends(75)
        tale.held = held
        tale.t += 5
        tale.started()
        return tale.goes_to(STEPS).ends().seen()

    assert judge(drained(14)).broken == []
    assert outcomes(drained(14))[0].lost_steps == 0


def test_a_kill_during_a_drain_finishes_the_drain():
    tale = Tale().goes_to(13).strikes(STOPPED, None)
    tale.tells("preempted", "finish_drain", ranks=[])
    tale.strikes(KILLED, 1)
    tale.tells("exit", "finish_drain", ranks=[1])
    tale.event("drain", signal="SIGTERM", deadline_s=30, took_s=0.9, step=13)
    tale.ends(75)
    tale.t += 5
    tale.started()
    seen = tale.goes_to(STEPS).ends().seen()
    assert judge(seen).broken == []
    calm = without(seen, is_a("drain"))
    assert judge(calm).broken == ["rung"]


# -- numbers that may differ ---------------------------------------------------------------------------------------------


def test_what_was_rolled_back_is_void_and_what_was_left_out_is_not_missed():
    def spiked(**fields: Any) -> Observation:
        tale = Tale().goes_to(13).strikes(SPIKE)
        tale.goes_to(14)
        tale.metrics[-1]["loss"] = 99.0
        name = tale.tells("loss_spike", "roll_back", step=10, **fields)
        tale.begins(resumed=10)
        return tale.recovers(name, 4).goes_to(STEPS).ends().seen()

    assert judge(spiked(skip=[])).broken == []
    seen = spiked(skip=[[12, 12]])
    kept = [line for line in seen.metrics if line["step"] != 12]
    seen = replace(seen, metrics=kept, account=account(seen.events, kept))
    assert judge(seen).broken == []
    assert judge(replace(seen, events=spiked(skip=[]).events)).broken == ["losses"]


@pytest.mark.parametrize(("tolerance", "broken"), [(0.0, ["losses", "weights"]), (1e-6, [])])
def test_after_shrinking_numbers_are_equal_within_the_tolerance(tolerance: float, broken: list[str]):
    tale = Tale().goes_to(12).strikes(replace(KILLED, actions=frozenset({"restart_workers", "shrink"})))
    name = tale.tells("exit", "restart_workers", "shrink")
    tale.begins(world=1)
    seen = tale.recovers(name, 2).goes_to(STEPS).ends().seen()
    seen = lines(seen, lambda line: line["step"] == 30, {"loss": loss(30) * (1 + 1e-8)}, "metrics")
    seen = replace(seen, weights=Weights(("model/a",), 1e-7), tolerance=tolerance)
    assert judge(seen).broken == broken
    before = lines(seen, lambda line: line["step"] == 5, {"loss": loss(5) * (1 + 1e-8)}, "metrics")
    assert "losses" in judge(before).broken


@pytest.mark.parametrize(("evidence", "step", "broken"), [
    ({"file": "/run/checkpoints/step-00000035/model/a"}, 35, []),
    ({"file": "/run/checkpoints/step-00000030/model/a"}, 35, ["checkpoints"]),
    ({"file": "/run/checkpoints/step-00000040/model/a"}, 40, ["checkpoints"]),
])  # fmt: skip
def test_a_checkpoint_may_stay_as_an_injection_has_spoilt_it_but_the_newest_one_may_not(
    evidence: dict[str, str], step: int, broken: list[str]
):
    seen = first(damaged(step)(usual()), evidence=evidence)
    assert judge(seen).broken == broken


# -- all schedules -------------------------------------------------------------------------------------------------------

schedules = st.lists(st.tuples(st.integers(1, STEPS - 2), st.integers(0, 1), st.booleans()), min_size=1, max_size=8)


def told(schedule: list[tuple[int, int, bool]]) -> Tale:
    tale = Tale()
    raised = replace(KILLED, kinds=frozenset({"exception"}))
    for step, rank, by_hand in sorted(schedule):
        tale.goes_to(step)
        tale.killed(rank, *((KILLED, "exit") if by_hand else (raised, "exception")))
    return tale.goes_to(STEPS).ends()


@settings(max_examples=40, deadline=None)
@given(schedules)
def test_whatever_is_struck_when_a_recovered_campaign_is_green(schedule: list[tuple[int, int, bool]]):
    seen = told(schedule).seen()
    assert judge(seen).broken == []
    assert len(judge(seen).outcomes) == len(schedule)


@settings(max_examples=40, deadline=None)
@given(schedules, st.data())
def test_no_injection_can_be_left_out_of_the_record(schedule: list[tuple[int, int, bool]], data: st.DataObject):
    seen = told(schedule).seen()
    gone = data.draw(st.integers(0, len(schedule) - 1))
    kept = [each for number, each in enumerate(seen.injections) if number != gone]
    assert not judge(replace(seen, injections=kept)).ok


@settings(max_examples=40, deadline=None)
@given(schedules, st.data())
def test_no_loss_can_be_altered(schedule: list[tuple[int, int, bool]], data: st.DataObject):
    seen = told(schedule).seen()
    metrics = [dict(line) for line in seen.metrics]
    metrics[data.draw(st.integers(0, len(metrics) - 1))]["loss"] += 1e-12
    assert judge(replace(seen, metrics=metrics)).broken == ["losses"]


def test_what_was_lost_before_is_not_charged_to_the_next_fault():
    tale = Tale().goes_to(22)
    tale.strikes(replace(KILLED, lost_steps=None))
    name = tale.tells("exit", "restart_workers")
    tale.t += 0.4
    tale.begins(resumed=5)  # all snapshots since were lost
    tale.recovers(name, 17)
    seen = tale.goes_to(12).killed().goes_to(STEPS).ends().seen()
    last = judge(seen).outcomes[-1]
    assert "lost steps" not in last.wrong, last.wrong
    behind = lines(seen, lambda line: line["event"] == "generation_started" and line["resumed_step"] == 10, {"resumed_step": 5})
    assert "lost steps" in judge(behind).outcomes[-1].wrong


@pytest.mark.parametrize(("copied", "gone", "fine"), [(10, 1, True), (15, 1, False), (10, 0, False)])
def test_without_a_node_the_newest_copy_counts(copied: int, gone: int, fine: bool):
    """Snapshots up to 15, of which copies lie elsewhere up to `copied`: the run goes on from step 10, on one node."""
    tale = Tale().goes_to(15)
    tale.event("replicated", step=copied, tier="memory")
    tale.goes_to(17)
    tale.strikes(NODE, None, node=gone)
    name = tale.tells("node_lost", "shrink", nodes=[gone])
    tale.begins(1, resumed=10)
    seen = tale.recovers(name, 7).goes_to(STEPS).ends().seen()
    (only,) = judge(seen).outcomes
    assert ("lost steps" in only.wrong) is not fine, only.wrong
