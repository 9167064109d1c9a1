"""The watchdog: who does not get on, and whose fault it is.

How long a phase may take is learned from the run itself: from how long workers stayed in it without a sign before they went on.
A rank that is silent for much longer is suspected; all ranks are then looked at, and the culprit is whoever is not waiting for
others: stopped, stuck in the kernel, spinning, asleep, or a step behind.

Owns the judgement. Pure: pulses and looks go in, a suspicion and a fault come out.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from resilient.config.timeouts import STOPPED_S, TOLD_S
from resilient.faults import Fault, Kind
from resilient.page import NOT_BEATEN
from resilient.standing import Standing, astray

FACTOR = 5.0  # a phase may take so many times as long as nearly all that were seen
EVERY_STEP = ("step", "data")
SELDOM_FACTOR = 15.0  # for phases that come seldom, and the first steps of a generation, where kernels are compiled
SELDOM_FLOOR_S = 60.0
WARM_STEPS = 3
PATIENCE_S = 5.0  # for agents to answer how their workers look
KEPT = 300  # steps back from which is learned
QUANTILE = 0.99  # of them are usual
AGAIN = 2.0  # and what was longer may come again, so many times as long
_NEEDED = 3

Waiting = Literal["collective", "compiling"]

# Files of the innermost Python frames of a thread that waits for other ranks, and of one that compiles.
_COLLECTIVE = ("torch/distributed/", "torch/_C/_distributed")
# (What is compiled, or kept from it as FSDP's hooks are, runs through other files of the same packages.)
_COMPILING = (
    *("torch/_dynamo/convert_frame", "torch/_inductor/compile_fx", "torch/_inductor/codecache", "torch/_inductor/async_compile"),
    "triton/compiler",
)
_DEPTH = 4


@dataclass(frozen=True)
class Limits:
    """Seconds between which what is learned is kept."""

    floor_s: float
    ceiling_s: float


@dataclass(frozen=True)
class Suspicion:
    """Ranks that may be hung; `silent_s` of the one that is silent for longest."""

    kind: Literal["stopped", "hang"]
    ranks: tuple[int, ...]
    silent_s: float
    step: int


@dataclass
class _Rank:
    pulse: Mapping[str, Any]
    first_step: int
    excused: bool = False
    ended: bool = False
    longest: dict[str, float] = field(default_factory=dict)  # silence by phase, since the last step

    @property
    def key(self) -> str:
        """What its silence is compared with."""
        phase: str = self.pulse["phase"]
        warm = self.pulse["step"] - self.first_step >= WARM_STEPS and self.pulse["phased"]
        return phase if warm else f"first {phase}"


@dataclass
class Watchdog:
    """Args: limits. One for the whole job: what it has learned outlives generations."""

    limits: Limits
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _seen: dict[str, dict[int, float]] = field(default_factory=dict)  # by step, the longest of all ranks

    def begin(self) -> None:
        """A generation begins: its ranks are other ones."""
        self._ranks = {}

    def ended(self, rank: int) -> None:
        """A rank's process has ended; its silence means nothing."""
        if rank in self._ranks:
            self._ranks[rank].ended = True

    def heard(self, rank: int, pulse: Mapping[str, Any]) -> None:
        """A rank's pulse: see `resilient.agent.workers.Sign`."""
        known = self._ranks.get(rank)
        if known is None:
            self._ranks[rank] = _Rank(pulse, pulse["step"])
            return
        if pulse["mark"] != known.pulse["mark"]:
            silent_s, phase = known.pulse["silent_s"], known.pulse["phase"]
            if not known.excused and silent_s > 0:
                self._learn(known.key, known.pulse["step"], silent_s)
                known.longest[phase] = max(silent_s, known.longest.get(phase, 0.0))
            if pulse["step"] > known.pulse["step"]:
                if known.first_step != NOT_BEATEN and not known.excused:
                    self._learn_steps(known, pulse)
                known.longest = {}
            known.excused = False
        if known.first_step == NOT_BEATEN:
            known.first_step = pulse["step"]
        known.pulse = pulse

    def _learn_steps(self, known: _Rank, pulse: Mapping[str, Any]) -> None:
        """What happens in every step takes no longer than a step, nor much longer than it was seen to."""
        steps = pulse["step"] - known.pulse["step"]
        step_s = (pulse["beat_t"] - known.pulse["beat_t"]) / steps
        learned = {"first start": step_s}
        if known.pulse["phased"]:
            warm = known.pulse["step"] - known.first_step >= WARM_STEPS
            learned = {phase: min(step_s, known.longest.get(phase, 0.0) + TOLD_S) for phase in EVERY_STEP if warm}
        for step in range(pulse["step"] - min(steps, _NEEDED), pulse["step"]):
            for key, seconds in learned.items():
                self._learn(key, step, seconds)

    def _learn(self, key: str, step: int, seconds: float) -> None:
        """So long was a rank silent after this step. How many ranks there are, and how often they tell, makes no difference."""
        seen = self._seen.setdefault(key, {})
        seen[step] = max(seconds, seen.get(step, 0.0))
        if len(seen) > KEPT:
            del seen[next(iter(seen))]

    def timeout_s(self, rank: int) -> float:
        """How long a rank may be silent where it is now."""
        known = self._ranks[rank]
        return self._timeout_s(known.key) if not known.excused else self.limits.ceiling_s

    def _timeout_s(self, key: str) -> float:
        seen = self._seen.get(key, {})
        often = key in EVERY_STEP
        if key == "start" or len(seen) < (_NEEDED if often else 1):  # nobody says what a worker does outside of all phases
            return self.limits.ceiling_s
        wanted = patience_s(seen.values()) if often else max(SELDOM_FLOOR_S, SELDOM_FACTOR * max(seen.values()))
        return min(self.limits.ceiling_s, max(self.limits.floor_s, wanted))

    def suspects(self) -> Suspicion | None:
        """Whoever is silent for too long."""
        alive = {number: rank for number, rank in self._ranks.items() if not rank.ended}
        stopped = [number for number, rank in alive.items() if rank.pulse["state"] == "T"]
        if stopped and len(stopped) == len(alive) > 1:  # the whole job is suspended; nobody is to blame
            for rank in alive.values():
                rank.excused = True
            return None
        found = [number for number in stopped if alive[number].pulse["silent_s"] >= STOPPED_S]
        if found:
            return self._suspicion("stopped", found)
        found = [
            number
            for number, rank in alive.items()
            if rank.pulse["step"] != NOT_BEATEN and rank.pulse["silent_s"] > self.timeout_s(number)
        ]
        return self._suspicion("hang", found) if found else None

    def _suspicion(self, kind: Literal["stopped", "hang"], ranks: list[int]) -> Suspicion:
        silent_s = max(self._ranks[rank].pulse["silent_s"] for rank in ranks)
        return Suspicion(kind, tuple(sorted(ranks)), silent_s, min(self._ranks[rank].pulse["step"] for rank in ranks))

    def still(self, suspicion: Suspicion) -> bool:
        """Whether one of the suspected ranks has given no sign since."""
        return any(
            not self._ranks[rank].ended and self._ranks[rank].pulse["silent_s"] >= suspicion.silent_s
            for rank in suspicion.ranks
            if rank in self._ranks
        )

    def excuse(self, suspicion: Suspicion) -> None:
        """The suspected ranks do something that takes long; they get as long as there is."""
        for rank in suspicion.ranks:
            self._ranks[rank].excused = True

    def fault(
        self, fault_id: str, suspicion: Suspicion, looks: Mapping[int, Mapping[str, Any]], procs_per_node: int
    ) -> Fault | None:
        """Whose fault it is, from how all ranks look; None if a rank compiles, which may take long, or the job is suspended.

        Args:
            looks: of those ranks whose agents have answered: `state`, `cpu`, `stacks`.
        """
        doings = {rank: doing(each) for rank, each in looks.items()}
        alive = {rank: known.pulse for rank, known in self._ranks.items() if not known.ended}
        if suspicion.kind == "hang" and any(each.waiting == "compiling" for each in doings.values()):
            return None
        culprits = [rank for rank, each in doings.items() if each.what == "stopped" and rank in alive]
        if len(culprits) == len(alive) > 1:
            return None
        if not culprits:
            culprits = [rank for rank in alive if rank not in doings]  # not even its agent answers
        if not culprits:
            culprits = [rank for rank, each in doings.items() if each.waiting is None and rank in alive]
        if not culprits or len(culprits) == len(alive) > 1:
            behind = min(pulse["step"] for pulse in alive.values())
            last = [rank for rank, pulse in alive.items() if pulse["step"] == behind]
            culprits = last if len(last) < len(alive) else culprits or _astray(looks, alive) or list(suspicion.ranks)
        first = min(culprits)
        mine = doings.get(first, _NO_SIGN if not alive[first]["mark"] else _NO_ANSWER)
        others = [rank for rank in alive if rank not in culprits]
        waiting = [rank for rank in others if rank in doings and doings[rank].waiting == "collective"]
        kind: Kind = "stopped" if mine.what == "stopped" else "hang" if mine.waiting is None else "collective_timeout"
        phase, step = alive[first]["phase"], alive[first]["step"] + 1
        wait = f"rank {waiting[0]} waits" if len(waiting) == 1 else f"ranks {_list(waiting)} wait"
        waited = f"; {wait} for others" if waiting else ""
        stands = _standing(looks.get(first))
        where = f": {stands}" if stands is not None and mine.waiting == "collective" else ""
        who = f"rank {first} is" if len(culprits) == 1 else f"ranks {_list(culprits)} are"
        return Fault(
            fault_id=fault_id,
            kind=kind,
            cause=mine.what,
            ranks=tuple(sorted(culprits)),
            nodes=tuple(sorted({rank // procs_per_node for rank in culprits})),
            step=step,
            detail=f"{who} {mine.text} at step {step}, phase {phase}, silent for {suspicion.silent_s:.1f} s{where}{waited}",
            evidence=innermost(str(looks.get(first, {}).get("stacks", ""))) or mine.text,
            detect_s=suspicion.silent_s,
            phase=phase,
        )


def _standing(look: Mapping[str, Any] | None) -> Standing | None:
    told = look.get("standing") if look is not None else None
    return Standing(**told) if told is not None else None


def _astray(looks: Mapping[int, Mapping[str, Any]], alive: Collection[int]) -> list[int]:
    """Of ranks that all wait, those that are in another collective than the others, where all say in which they are."""
    standings = {rank: stands for rank, each in looks.items() if rank in alive and (stands := _standing(each)) is not None}
    return astray(standings) if len(standings) == len(alive) else []


def patience_s(seen: Collection[float]) -> float:
    """How long a step may take that has taken so long before: several times as long as nearly all, and the rare may come again.

    So a single slow step does not make the run wait many times as long for a hang.
    """
    ordered = sorted(seen)
    usual = ordered[math.ceil(QUANTILE * len(ordered)) - 1]
    return max(FACTOR * usual, AGAIN * ordered[-1])


@dataclass(frozen=True)
class Doing:
    """What a rank does: in a word, in a few, and whether it is something that may take long."""

    what: str
    text: str
    waiting: Waiting | None


_NO_SIGN = Doing("silent", "without a sign since its start", None)
_NO_ANSWER = Doing("silent", "silent, and its agent does not answer", None)


def doing(look: Mapping[str, Any]) -> Doing:
    """What a rank does, from its process and its stacks."""
    state, stacks = look["state"], look["stacks"]
    frames = innermost(stacks)
    if state == "T":
        return Doing("stopped", "stopped (state T)", None)
    if not state or state == "Z":
        return Doing("dead", "dead", None)
    if any(name in thread for thread in _threads(stacks) for name in _COMPILING):
        return Doing("compiling", "compiling", "compiling")
    if any(name in frame for thread in _threads(stacks) for frame in thread.splitlines()[:_DEPTH] for name in _COLLECTIVE):
        return Doing("waiting", "waiting in a collective", "collective")
    if state == "D":
        return Doing("io", "stuck in the kernel (state D)", None)
    where = f" in {frames.splitlines()[0].strip()}" if frames else ""
    if look["cpu"] >= 0.5:
        return Doing("spinning", f"spinning{where}", None)
    return Doing("blocked", f"blocked{where}", None)


def _threads(stacks: str) -> list[str]:
    """The frames of each thread, most recent call first."""
    parts = stacks.replace("Current thread ", "Thread ").split("Thread ")
    return [part.partition("\n")[2] for part in parts[1:]]


def innermost(stacks: str) -> str:
    """The most recent calls of the main thread, which faulthandler tells last."""
    threads = _threads(stacks)
    return "\n".join(threads[-1].splitlines()[: 2 * _DEPTH]).strip() if threads else ""


def _list(numbers: list[int]) -> str:
    numbers = sorted(numbers)
    return ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
