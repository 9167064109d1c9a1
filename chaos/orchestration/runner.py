"""The runner: carries out a plan on a campaign, watches it recover, and starts it again where a fault has ended it as it should.

Owns the order of things. One loop, without threads: it reads what the campaign and the injectors report, and takes the next step.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from chaos import faults
from chaos.experiment import Limits
from chaos.fault import Aim, Outside
from chaos.injectors.context import Target
from chaos.injectors.injector import InjectionRequest
from chaos.injectors.injector_process import InjectorProcess
from chaos.injectors.moments import Moment
from chaos.orchestration.active_injection import ActiveInjection
from chaos.orchestration.campaign import Campaign, by_signal, is_one_of
from chaos.orchestration.sites import Site
from chaos.orchestration.watch import Watch
from chaos.planning import PREPARED, Group, Plan, Spread, Strike, again, blamed
from chaos.verdict import record
from chaos.verdict.matching import DEGRADED
from chaos.verdict.record import Injection
from resilient.exits import Exit

POLL_S = 0.02
MOST_TRIES = 3  # of a fault of a mix
ARM_AHEAD_S = 3.0  # of the step or the time at which a fault is to strike
CALM_STEPS = 5  # between faults: what is seldom, as the first steps after a recovery, is watched with more patience
PHASE_S = 120.0  # for a phase to come
LASTING = frozenset({"straggler", "storage", "not_finite", "loss_spike"})  # kinds that ranks which go on may be reported for later
HEED_S = 30.0  # for an injector to undo what it did after it was let go of


class Display(Protocol):
    """Shows a person what happens."""

    def note(self, text: str) -> None:
        """A sentence."""

    def event(self, event: Mapping[str, Any]) -> None:
        """A line of the ledger."""


@dataclass(frozen=True)
class Terms:
    """On which terms faults are injected.

    Attributes:
        minutes: for so many faults come by chance, at most, counted from the moment at which the first one might.
        to_target: the campaign goes on to its target afterwards; else it is stopped.
        own: the campaign is this command's own, to be started, and started again.
    """

    limits: Limits
    steady_steps: int
    minutes: float | None = None
    to_target: bool = True
    own: bool = True


@dataclass(frozen=True)
class Outcome:
    """How an experiment went, beside what is on disk.

    Attributes:
        finished: whether the campaign ended as it should.
        why: it is over.
        step: that was finished last.
        steady_step_s: seconds of a step in the steady state, median; None if it was not reached.
        finite: whether the losses were finite then.
        target: the step that is the campaign's target in place of the one of its config: since it was stopped there, or has none.
    """

    finished: bool
    why: str
    step: int
    steady_step_s: float | None
    finite: bool
    target: int | None = None


class Runner:
    """One experiment on one campaign.

    Args:
        injector_environ: added to the environment of injectors.

    Attributes:
        injections: what became of each fault, once `run` has returned.
        left_out: what was not to be injected after all, with the reason.
    """

    def __init__(
        self, plan: Plan, campaign: Campaign, site: Site, terms: Terms, display: Display, injector_environ: Mapping[str, str]
    ) -> None:
        self._groups = list(plan.groups)
        self._missing, self.left_out = plan.missing, dict(plan.left_out)
        self._campaign, self._site, self._terms, self._display = campaign, site, terms, display
        self._injector_environ = injector_environ
        self._watch = Watch(campaign.run_dir)
        self._active: list[ActiveInjection] = []
        self._past: list[ActiveInjection] = []
        self._hit: set[int] = set()  # nodes
        self.injections: list[Injection] = []
        self._unwritten: list[Injection] = []
        self._begun_t = self._steady_t = self._calm_t = self._started_t = self._due_t = 0.0
        self._chance_t: float | None = None  # since when faults come by chance
        self._steady: tuple[float, bool] | None = None
        self._stopping = False

    def run(self) -> Outcome:
        """Until the campaign is over; no injector is left then."""
        self._begun_t = time.time()
        for strike, why in self._missing:
            self._fail(strike, f"left out: {why}")
        if self._terms.own:
            self._start()
        try:
            while (outcome := self._turn(time.time())) is None:
                time.sleep(POLL_S)
        finally:
            self._recall()
        return outcome

    def _turn(self, now: float) -> Outcome | None:
        self._poll()
        self._hear()
        code = self._campaign.ended() if self._terms.own else self._watch.ended(self._campaign.run_dir)
        if code is not None:
            return self._after(code)
        if now > self._begun_t + 60 * self._terms.limits.minutes:
            return self._over(False, f"it did not end within {self._terms.limits.minutes:g} minutes (limits.minutes)")
        if self._steady is None:
            self._check_steadiness(now)
        else:
            return self._follow(now) if self._active else self._begin(now)
        return None

    # -- the campaign --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._started_t = time.time()
        self._campaign.start()

    @property
    def _job_t(self) -> float:
        """When the newest job was started, here or, of a campaign that is not this command's own, by whoever does."""
        return self._started_t if self._terms.own else self._watch.started_t

    def _poll(self) -> None:
        for event in self._watch.poll():
            if self._terms.own or event["t"] >= self._begun_t:  # else it was before this command
                self._display.event(event)

    def _after(self, code: int) -> Outcome | None:
        """The campaign has ended; it is started again if a fault has it so."""
        self._poll()
        if code == Exit.OK:
            return self._at_its_end()
        if code == Exit.STOPPED and not self._terms.own:
            return self._over(True, "the campaign was stopped")
        if code == Exit.STOPPED and self._stopping:
            self._campaign.conclude(self._watch.step)
            return None
        causes = [each for each in [*self._past[-20:], *self._active] if each.triggered and is_one_of(code, each.expects.exits)]
        if not causes or not self._terms.own:
            return self._over(False, f"the campaign ended with {by_signal(code)}\n{self._campaign.last_words()}".strip())
        self._display.note(
            f"the campaign ended with {by_signal(code)}, as it may after {causes[-1].strike.id}; it is started again"
        )
        self._start()
        return None

    def _at_its_end(self) -> Outcome:
        """It says that it is done; what it was to do its ledger says."""
        step, target = self._watch.step, self._watch.target_step
        if self._stopping or target is None:
            return self._over(True, "the campaign reached its target", target=step)
        if self._watch.furthest < target:
            return self._over(False, f"it ended by itself at step {step}, and its target was step {target}")
        return self._over(True, "the campaign reached its target")

    def _check_steadiness(self, now: float) -> None:
        self._steady = self._watch.steady(self._terms.steady_steps)
        if self._steady is not None:
            self._steady_t = self._calm_t = now
            step_s, finite = self._steady
            self._display.note(f"steady: {1000 * step_s:.0f} ms a step{'' if finite else ', but losses that are not finite'}")

    def _over(self, finished: bool, why: str, target: int | None = None) -> Outcome:
        for strike in [strike for group in self._groups for strike in group.strikes if not strike.by_chance]:
            self._fail(strike, "its turn did not come before the end")
        step_s, finite = self._steady or (None, False)
        return Outcome(finished, why, self._watch.step, step_s, finite, target)

    # -- one group of faults after the other ---------------------------------------------------------------------------

    def _begin(self, now: float) -> Outcome | None:
        """Send the injectors of the next group, if it is nearly time."""
        if self._stopping or self._watch.generation is None or not self._watch.goes_on_since(self._calm_t, CALM_STEPS):
            return None
        if not self._groups:
            return self._done(now)
        first = self._groups[0].strikes[0]
        if first.by_chance:
            self._chance_t = self._chance_t or now
            if self._terms.minutes is not None and now > self._chance_t + 60 * self._terms.minutes:
                self._groups = []
                return self._done(now)
        assert self._steady is not None
        self._due_t = max(self._calm_t + first.calm_s, self._steady_t + (first.at.s or 0.0))
        steps = (first.at.step or 0) - self._watch.step
        if now > self._due_t - ARM_AHEAD_S and steps * self._steady[0] < ARM_AHEAD_S:
            for strike in self._groups.pop(0).strikes:
                if first is strike or self._active:
                    self._send(strike)
                else:
                    self._leave_out(strike, f"comes with {first.id}, which is left out")
            if not self._active:
                self._calm_t = now
        return None

    def _done(self, now: float) -> Outcome | None:
        """There is nothing more to inject; what the last faults lost is computed again before anything ends, and tiers are well."""
        patient = now < self._calm_t + self._terms.limits.recovery_s
        if self._watch.furthest_t < self._calm_t or (patient and not self._watch.tiers_stay_well(CALM_STEPS)):
            return None
        if not self._terms.own:
            return self._over(True, "all faults were injected")
        if not self._terms.to_target:
            self._display.note("all faults were injected; the campaign is stopped")
            self._stopping = True
            self._campaign.stop()
        return None

    def _follow(self, now: float) -> Outcome | None:
        """Tell the injectors of a group when to strike, until the run goes on after all of them."""
        leader, *others = self._active
        if not leader.triggered:
            if now >= self._due_t and all(each.armed or each.closed for each in self._active):
                self._trigger_together(leader, others)
            return None
        for other in others:
            if not other.triggered and (leader.t is not None or leader.closed):
                other.trigger()
            if other.strike.at.after is not None and not other.t and self._is_over(leader):
                other.sent.let_go()  # its moment is past
        if all(self._is_over(each) for each in self._active):
            self._conclude(now)
        elif all(each.closed for each in self._active):
            last_t = max(*(each.last_t for each in self._active), self._job_t)
            if now > last_t + self._terms.limits.recovery_s:
                if not self._watch.goes_on_since(last_t):
                    return self._over(False, f"the run does not go on {now - last_t:.0f} s after {leader.strike.id}")
                self._display.note(
                    f"{leader.strike.id}: not reported, or not recovered from, within {self._terms.limits.recovery_s:.0f} s"
                )
                self._conclude(now)
        return None

    def _trigger_together(self, leader: ActiveInjection, others: list[ActiveInjection]) -> None:
        for other in others:
            if other.strike.at.phase in PREPARED:
                other.trigger()
        leader.trigger()
        for other in others:
            if other.strike.at.together is not None:
                other.trigger()

    def _conclude(self, now: float) -> None:
        self._past += self._active
        self._active, self._calm_t = [], now

    def _is_over(self, each: ActiveInjection) -> bool:
        """Whether it was undone, what had to be reported was reported, and the run goes on."""
        if not each.closed:
            return False
        if each.t is None:
            return True
        if each.expects.exits and self._job_t < each.t - 1.0:  # the injector may see the end after it was seen here
            return False
        must_be_reported = each.expects.kinds and not each.expects.exits and not each.expects.may_pass and not self._covered(each)
        if must_be_reported and not self._watch.reported_since(each.t, each.expects.kinds):
            return False
        if not each.expects.actions.isdisjoint(DEGRADED) and not self._watch.tiers_are_well:
            return False  # what befalls a tier that is in trouble is not reported again
        return self._watch.goes_on_since(max(each.last_t, self._job_t))

    def _covered(self, each: ActiveInjection) -> bool:
        """Whether it may have hit ranks that were being stopped because of another one of its group: then nobody reports it."""
        others = [other for other in self._active if other is not each and other.t is not None and other.expects.kinds]
        reported = any(self._watch.reported_since(other.t or 0.0, other.expects.kinds) for other in others)
        return reported and LASTING.isdisjoint(each.expects.kinds)

    # -- injectors -----------------------------------------------------------------------------------------------------

    def _send(self, strike: Strike) -> None:
        """Have an injector go to the target and wait for the trigger."""
        kind = faults.kind(strike.fault)
        target = self._target(strike)
        if target is None:
            self._leave_out(strike, f"limits.nodes: {self._terms.limits.nodes}, and no node that was hit before is there")
            return
        if target.node is not None:
            self._hit.add(target.node)
        outside = kind if issubclass(kind, Outside) else None
        within = [] if outside is not None and outside.site == "machine" else self._site.reach(target.host)
        by_step = strike.at.step is not None or strike.at.after is not None
        request = InjectionRequest(
            strike.id,
            strike.fault,
            self._campaign.run_dir,
            target,
            dict(strike.params),
            Moment(strike.at.step, strike.at.phase),
            60 * self._terms.limits.minutes if by_step else PHASE_S,
            self._site.lab,
            on_trigger=True,
        )
        sent = InjectorProcess(request, within, self._injector_environ, self._campaign.directory / "injectors.log")
        self._active.append(ActiveInjection(strike, target, sent))

    def _target(self, strike: Strike) -> Target | None:
        """Whom it hits in the generation that runs now; None where that would be one node too many."""
        generation = self._watch.generation
        assert generation is not None
        aim = faults.kind(strike.fault).aim
        if aim is Aim.RUN:
            return Target(host=self._watch.driver_host)
        wanted = strike.target
        if wanted == "culprit":
            last = self._watch.faults[-1] if self._watch.faults else {"ranks": [], "nodes": []}
            first = self._active[0].target if self._active else None
            wanted = first if first is not None else blamed(aim, last["ranks"], last["nodes"])
        assert not isinstance(wanted, str)
        spread = Spread.of_event(generation)
        return spread.confined(spread.placed(aim, wanted), self._hit, self._terms.limits.nodes)

    def _hear(self) -> None:
        """What the injectors have said."""
        for each in self._active:
            for text in each.listen():
                self._display.note(f"{each.strike.id}: {self._where(each)}: {text}")
        for each in [each for each in self._active if each.closed and not each.recorded]:
            each.recorded = True
            if each.may_be_anew and each.strike.tries < MOST_TRIES:
                self._groups.insert(0, Group((again(each.strike),)))
            else:
                self._record(each.injection())

    def _leave_out(self, strike: Strike, why: str) -> None:
        """It would be too much. Without one of the schedule the experiment is not what it says."""
        self.left_out[strike.id] = why
        self._display.note(f"left out: {strike.id}: {why}")
        if not strike.by_chance:
            self._fail(strike, f"left out: {why}")

    def _fail(self, strike: Strike, why: str) -> None:
        """It is not injected."""
        target = strike.target if isinstance(strike.target, Target) else Target()
        self._record(Injection(strike.id, strike.fault, strike.params, target, time.time(), failed=why))

    def _record(self, injection: Injection) -> None:
        self.injections.append(injection)
        self._unwritten.append(injection)
        self._write_down()

    def _write_down(self) -> None:
        """Tell of them in the run directory. Where that is full or read-only, as some faults make it, they are told later."""
        if self._campaign.run_dir.is_dir():
            with suppress(OSError):
                while self._unwritten:
                    record.append(self._campaign.run_dir, self._unwritten[0])
                    self._unwritten.pop(0)

    def _where(self, each: ActiveInjection) -> str:
        target = each.target
        named = [f"{name} {index}" for name, index in (("rank", target.rank), ("node", target.node)) if index is not None]
        return f"{', '.join(named[:1]) or 'the run'}, step {self._watch.step + 1}"

    def _recall(self) -> None:
        """Have all injectors undo what they did; those that do not are left to the cleanup guard."""
        for each in self._active:
            each.sent.let_go()
        deadline = time.monotonic() + HEED_S
        while any(not each.closed for each in self._active) and time.monotonic() < deadline:
            self._hear()
            time.sleep(POLL_S)
        for each in [each for each in self._active if not each.recorded]:
            each.recorded, each.failed = True, each.failed or "not undone: its injector does not end"
            self._record(each.injection())
        self._write_down()
