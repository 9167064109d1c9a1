"""The watchdog: which ranks do not get on. Heartbeats in, a suspicion out.

Agents measure how long each rank has been silent, and report it every `resilient.config.timeouts.SILENCE_REPORT_S`. The driver
compares that with what was learned of the rank's phase. So a rank is judged only when its agent reports on it, and a driver that
was away mistakes nobody's silence for its own. Whose fault a silence is, `resilient.control.judgement` finds out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from resilient.config.timeouts import SILENCE_REPORT_S, STOPPED_S
from resilient.control.learning import COLLECTIVES, EVERY_STEP, NEEDED, SAVES, UNKNOWN, Limits, Patience
from resilient.protocol.messages import Heartbeat

WARM_STEPS = 3
LONGER = 6.0  # times as long may a step take that took too long in the attempt before
LOOK_AGAIN = 1.2  # times as long may a rank be silent that does what takes long, before it is inspected again
REMEMBERED = 32  # such steps, the newest
NO_STEP = -1  # the step of a rank that has not finished one


@dataclass(frozen=True)
class Suspicion:
    """Ranks that may be hung; `silent_s` of the one that is silent for longest."""

    kind: Literal["stopped", "hang"]
    ranks: tuple[int, ...]
    silent_s: float
    step: int


@dataclass
class Rank:
    """What is known of a rank of this generation.

    Attributes:
        active_s: its last activity, in attended seconds, as far as delays of messages allow to tell.
        excused: it does what takes long; until its next activity it may be silent for `excused_s`.
        longest_s: silence by phase, since the last step.
        inferred_s: the longest of those in a phase that was inferred.
        signs: of its collectives, where they are all that is seen.
        stopped_s: since when its process is known to be stopped, in attended seconds.
        waited: when it was last inspected, it waited for others or for a link, and has shown no activity since.
        moved_s: when it was found elsewhere after that, in attended seconds; until its next activity its silence counts from then.
    """

    heartbeat: Heartbeat
    first_step: int
    active_s: float
    excused: bool = False
    excused_s: float = 0.0
    longest_s: dict[str, float] = field(default_factory=dict)
    inferred_s: float = 0.0
    signs: int = 0
    stopped_s: float | None = None
    waited: bool = False
    moved_s: float | None = None

    @property
    def by_collectives(self) -> bool:
        """Whether it has finished no step, and its collectives are seen."""
        return self.heartbeat.observed and self.heartbeat.step == NO_STEP

    @property
    def phase(self) -> str:
        """What its silence is compared with."""
        if self.by_collectives:
            return COLLECTIVES
        phase = self.heartbeat.phase
        if self.heartbeat.phased and phase == UNKNOWN:
            return UNKNOWN
        if self.heartbeat.inferred and phase == "snapshot":
            phase = SAVES
        warm = self.heartbeat.step - self.first_step >= WARM_STEPS and self.heartbeat.phased
        return phase if warm else f"first {phase}"


class Watchdog:
    """One for the whole job: what it has learned outlives generations.

    Invariants: `_silent` has every rank whose last heartbeat told a silence that was too long then, `_stopped` every rank whose
    process is stopped, and `_stopped_long` those of them for `STOPPED_S`; no rank that has ended is in any.
    """

    def __init__(self, limits: Limits) -> None:
        self._patience = Patience(limits)
        self._ranks: dict[int, Rank] = {}
        self._ended: set[int] = set()
        self._silent: set[int] = set()
        self._stopped: set[int] = set()
        self._stopped_long: set[int] = set()
        self._suspended = False
        self._ended_after: dict[int, int] = {}  # steps after which ranks were silent for too long: how often they were ended for it

    @property
    def ceiling_s(self) -> float:
        """Longer than that nothing may take for which others wait."""
        return self._patience.limits.ceiling_s

    @property
    def alive(self) -> dict[int, Rank]:
        """The ranks that were heard of and have not ended."""
        return self._ranks

    @property
    def sees_collectives(self) -> bool:
        """Whether ranks get on without a step: their collectives are seen."""
        return any(known.signs for known in self._ranks.values())

    def begin(self, rate: float = 1.0) -> None:
        """A generation begins: its ranks are other ones. Args: rate: of its training, as a share of the full one."""
        self._patience.begin(rate)
        self._ranks, self._ended, self._suspended = {}, set(), False
        self._silent, self._stopped, self._stopped_long = set(), set(), set()

    def gave_up(self, rank: int) -> None:
        """The workers are ended for the silence of this rank.

        Where its phase was inferred, that may be a mistake, as for a validation by one rank in a step that is long for the first
        time. So the next attempt may be silent there for `LONGER` times as long, the one after it for `LONGER` times that.
        """
        known = self._ranks.get(rank)
        if known is None or not known.heartbeat.inferred or known.heartbeat.step == NO_STEP:
            return
        step = known.heartbeat.step
        self._ended_after[step] = self._ended_after.pop(step, 0) + 1
        if len(self._ended_after) > REMEMBERED:
            del self._ended_after[next(iter(self._ended_after))]

    def ended(self, rank: int) -> None:
        """A rank's process has ended; its silence means nothing."""
        self._ended.add(rank)
        self._ranks.pop(rank, None)
        for others in (self._silent, self._stopped, self._stopped_long):
            others.discard(rank)

    def on_heartbeat(self, rank: int, heartbeat: Heartbeat, now_s: float) -> None:
        """What an agent tells of a rank; now_s: attended seconds."""
        if rank in self._ended:
            return
        known = self._ranks.get(rank)
        stopped = heartbeat.state == "T"
        if stopped and not heartbeat.activity_t:  # it has had no activity yet from which its silence could be counted
            since_s = now_s if known is None or known.stopped_s is None else known.stopped_s
            heartbeat = msgspec.structs.replace(heartbeat, silent_s=now_s - since_s)
        if known is None:
            known = self._ranks[rank] = Rank(heartbeat, NO_STEP, now_s - heartbeat.silent_s)
        else:
            self._learn(known, heartbeat)
            known.heartbeat, known.active_s = heartbeat, now_s - heartbeat.silent_s
        if known.first_step == NO_STEP and heartbeat.step != NO_STEP:
            known.first_step = heartbeat.first_step if heartbeat.first_step != NO_STEP else heartbeat.step
            self._learn_first(known)
        known.stopped_s = (now_s if known.stopped_s is None else known.stopped_s) if stopped else None
        _put(rank, self._stopped, stopped)
        _put(rank, self._stopped_long, stopped and heartbeat.silent_s >= STOPPED_S)
        _put(rank, self._silent, self._too_long(known))

    def _learn(self, known: Rank, heartbeat: Heartbeat) -> None:
        before = known.heartbeat
        if heartbeat.activity_t == before.activity_t:
            return
        if not before.activity_t:
            before = msgspec.structs.replace(before, silent_s=0.0)  # it was stopped, if anything
        if known.by_collectives:
            if not known.excused:
                known.signs += 1
                self._patience.learn(COLLECTIVES, known.signs, before.silent_s + SILENCE_REPORT_S)
        elif not known.excused and before.silent_s > 0:
            self._patience.learn(known.phase, before.step, before.silent_s)
            known.longest_s[before.phase] = max(before.silent_s, known.longest_s.get(before.phase, 0.0))
        if before.inferred:
            known.inferred_s = max(before.silent_s, known.inferred_s)
        if heartbeat.step > before.step:
            self._no_hang(known, heartbeat)
            if known.first_step != NO_STEP and not known.excused:
                self._learn_steps(known, heartbeat)
            known.longest_s, known.inferred_s = {}, 0.0
        known.excused, known.waited, known.moved_s = False, False, None

    def _no_hang(self, known: Rank, heartbeat: Heartbeat) -> None:
        """A rank gets on where one was ended for its silence: that was no hang, and need not be taken for one again.

        An attempt that goes on from that very step has not finished one before. What its first step takes beside is no measure of
        the silence; more than it might have lasted is not borne.
        """
        step = known.heartbeat.step if known.heartbeat.step != NO_STEP else heartbeat.first_step - 1
        times = self._ended_after.get(step, 0)
        if not times or not known.inferred_s:
            return
        del self._ended_after[step]
        self._patience.bear(min(known.inferred_s + SILENCE_REPORT_S, self._patience.timeout_s("step") * LONGER**times))

    def _learn_first(self, known: Rank) -> None:
        """A hundred short steps are over before a first heartbeat tells of them; what they took is their mean."""
        heartbeat = known.heartbeat
        steps = heartbeat.step - known.first_step
        if steps < NEEDED:
            return
        step_s = (heartbeat.beat_t - heartbeat.first_beat_t) / steps
        phases = EVERY_STEP if heartbeat.phased else ("first start",)
        for step in range(heartbeat.step - NEEDED, heartbeat.step):
            for phase in phases:
                self._patience.learn(phase, step, step_s)

    def _learn_steps(self, known: Rank, heartbeat: Heartbeat) -> None:
        """What happens in every step takes no longer than a step, nor much longer than it was seen to."""
        before = known.heartbeat
        steps = heartbeat.step - before.step
        step_s = (heartbeat.beat_t - before.beat_t) / steps
        learned = {"first start": step_s}
        if before.phased:
            warm = before.step - known.first_step >= WARM_STEPS
            learned = {phase: min(step_s, known.longest_s.get(phase, 0.0) + SILENCE_REPORT_S) for phase in EVERY_STEP if warm}
        for step in range(heartbeat.step - min(steps, NEEDED), heartbeat.step):
            for phase, seconds in learned.items():
                self._patience.learn(phase, step, seconds)

    def timeout_s(self, rank: int) -> float:
        """How long a rank may be silent where it is now."""
        return self._timeout_s(self._ranks[rank])

    def _timeout_s(self, known: Rank) -> float:
        return known.excused_s if known.excused else self._usual_s(known)

    def _usual_s(self, known: Rank) -> float:
        timeout_s = self._patience.timeout_s(known.phase)
        times = self._ended_after.get(known.heartbeat.step, 0) if known.heartbeat.inferred else 0
        return min(self._patience.limits.ceiling_s, timeout_s * LONGER**times) if times else timeout_s

    def _too_long(self, known: Rank) -> bool:
        seen = known.heartbeat.step != NO_STEP or known.by_collectives
        return seen and known.heartbeat.silent_s > self._timeout_s(known)

    def suspects(self) -> Suspicion | None:
        """Whoever is silent for too long."""
        suspended = len(self._stopped) == len(self._ranks) > 1  # the whole job is; nobody is to blame
        if suspended and not self._suspended:
            self._excuse(self._ranks)
        self._suspended = suspended
        if suspended:
            return None
        if self._stopped_long:
            return self._suspicion("stopped", self._stopped_long)
        self._silent = {rank for rank in self._silent if self._too_long(self._ranks[rank])}
        return self._suspicion("hang", self._silent) if self._silent else None

    def _suspicion(self, kind: Literal["stopped", "hang"], ranks: set[int]) -> Suspicion:
        heartbeats = [self._ranks[rank].heartbeat for rank in ranks]
        silent_s = max(heartbeat.silent_s for heartbeat in heartbeats)
        return Suspicion(kind, tuple(sorted(ranks)), silent_s, min(heartbeat.step for heartbeat in heartbeats))

    def still(self, suspicion: Suspicion) -> bool:
        """Whether one of the suspected ranks has shown no activity since."""
        return any(self._ranks[rank].heartbeat.silent_s >= suspicion.silent_s for rank in suspicion.ranks if rank in self._ranks)

    def found_waiting(self, ranks: Iterable[int]) -> None:
        """These ranks wait for others, or for a link."""
        for rank in ranks:
            if rank in self._ranks:
                self._ranks[rank].waited, self._ranks[rank].moved_s = True, None

    def found_elsewhere(self, ranks: Iterable[int], now_s: float) -> None:
        """These ranks are seen to do something else: those of them that waited have got on, as no heartbeat has told yet."""
        for rank in ranks:
            if rank in self._ranks and self._ranks[rank].waited:
                self._ranks[rank].waited, self._ranks[rank].moved_s = False, now_s

    def further_s(self, ranks: Iterable[int], now_s: float) -> float:
        """How long ranks that have got on may still be silent; 0 if one of them has been, or has not got on."""
        left_s = [
            known.moved_s + self._usual_s(known) - now_s if known.moved_s is not None else 0.0
            for known in map(self._ranks.get, ranks)
            if known is not None
        ]
        return max(left_s) if left_s and min(left_s) > 0 else 0.0

    def excuse(self, suspicion: Suspicion, further_s: float | None = None) -> None:
        """The suspected ranks do what takes long: they get as long as there is, and beyond that a little more each time.

        Args:
            further_s: they get so much longer, and no more.
        """
        if further_s is None:
            self._excuse(suspicion.ranks)
            return
        for rank in suspicion.ranks:
            if rank in self._ranks:
                known = self._ranks[rank]
                known.excused, known.excused_s = True, known.heartbeat.silent_s + further_s

    def _excuse(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in self._ranks:
                known = self._ranks[rank]
                known.excused, known.excused_s = True, max(self.ceiling_s, known.heartbeat.silent_s * LOOK_AGAIN)


def _put(rank: int, others: set[int], there: bool) -> None:
    (others.add if there else others.discard)(rank)
