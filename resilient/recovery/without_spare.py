"""What to do about a node that is gone where no spare stands in for it: go on with fewer, wait for it, or leave it to the next job.

Each choice costs a part of the training that all nodes would do in the rest of this job; the least is taken. What nodes have taken
to come back they are expected to take again, each time as likely as the others; where none has come back yet, none is expected to,
and none is waited for much longer than the slowest of them took. Pure.

Also reads from the ledger what nodes have taken, and jobs have waited.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Literal

Choice = Literal["shrink", "wait", "next_job"]

LEFT_S = 86400.0  # of a job without a limit
RESTART_S = 15.0  # until ranks compute again, where that was not measured yet
PATIENCE = 1.5  # times what the slowest node took
REMEMBERED = 64  # of the times that were measured, the last ones


@dataclass(frozen=True)
class Figures:
    """What is known when a node is lost; seconds.

    Attributes:
        nodes, fewer: that the job wants, and with how many it could go on.
        rate: of training with those, as a share of the full one.
        returns_s: what nodes have taken to come back.
        restart_s: from the loss until ranks compute again.
        left_s: until the job's limit; None: it has none, or it is not known.
        limit_s: of a job, from its start to its end; None likewise.
        queues_s: what jobs of this chain have waited for, from the end of the one before; empty where there is no chain.
    """

    nodes: int
    fewer: int
    rate: float
    returns_s: Sequence[float] = ()
    restart_s: float = RESTART_S
    left_s: float | None = None
    limit_s: float | None = None
    queues_s: Sequence[float] = ()


@dataclass(frozen=True)
class Decision:
    """What is done, and why, with the figures. `patience_s`: a wait is given up after so long."""

    choice: Choice
    reason: str
    patience_s: float = math.inf


def costs_s(figures: Figures) -> dict[Choice, float]:
    """The full training that each choice costs, in seconds; what cannot be weighed is left out."""
    left_s = LEFT_S if figures.left_s is None else max(0.0, figures.left_s)
    pause_s = min(figures.restart_s, left_s)
    shrunken, waited = [], []
    for return_s in figures.returns_s or (left_s,):
        back_s = min(max(return_s, pause_s), left_s)
        again_s = min(figures.restart_s, left_s - back_s)  # all start again to take it in
        shrunken.append(pause_s + (1.0 - figures.rate) * (back_s - pause_s) + again_s)
        waited.append(min(return_s + figures.restart_s, left_s))
    found: dict[Choice, float] = {"shrink": fmean(shrunken), "wait": fmean(waited)}
    if figures.queues_s and figures.left_s is not None and figures.limit_s:
        # Its queue is waited for sooner or later: what counts is by how much more often.
        found["next_job"] = figures.restart_s + median(figures.queues_s) * min(1.0, left_s / figures.limit_s)
    return found


def decide(asked: Choice | Literal["auto"], figures: Figures) -> Decision:
    """What to do: what the config asks for, or what costs least."""
    fewer = f"{figures.fewer} node goes on" if figures.fewer == 1 else f"{figures.fewer} nodes go on"
    words = {"shrink": fewer, "wait": "it is waited for", "next_job": "the next job goes on"}
    if asked != "auto":
        return Decision(asked, f"{words[asked]} (resilience.without_spare: {asked})")
    found = costs_s(figures)
    choice = min(found, key=lambda each: found[each])
    costs = {"shrink": f"with {figures.fewer} of {figures.nodes} nodes", "wait": "by waiting", "next_job": "by the next job"}
    told = ", ".join(f"{cost_s:.0f} s {costs[each]}" for each, cost_s in found.items())
    patience_s = PATIENCE * max(figures.returns_s, default=0.0)
    return Decision(choice, f"{words[choice]}: estimated loss of training {told} ({_known(figures)})", patience_s)


def _known(figures: Figures) -> str:
    back = f"back after {median(figures.returns_s):.0f} s" if figures.returns_s else "never seen to come back"
    parts = [f"{figures.rate:.0%} of the throughput", back, f"{figures.restart_s:.0f} s to start again"]
    parts += [f"{figures.left_s:.0f} s left"] if figures.left_s is not None else []
    parts += [f"{median(figures.queues_s):.0f} s in the queue"] if figures.queues_s else []
    return ", ".join(parts)


@dataclass(frozen=True)
class Measured:
    """What a ledger tells; seconds, oldest first."""

    returns_s: tuple[float, ...] = ()
    restarts_s: tuple[float, ...] = ()
    queues_s: tuple[float, ...] = ()


@dataclass
class Measuring:
    """What nodes have taken to be members again, ranks to start again, and jobs to follow each other: a fold over the ledger.

    Attributes:
        gone: nodes of the present job that were lost, and when; unix seconds, as last_t is, of the newest line.
    """

    returns_s: list[float] = field(default_factory=list)
    restarts_s: list[float] = field(default_factory=list)
    queues_s: list[float] = field(default_factory=list)
    gone: dict[int, float] = field(default_factory=dict)
    last_t: float | None = None

    def take(self, line: Mapping[str, Any]) -> None:
        """The next line of the ledger."""
        t = float(line["t"])
        match line.get("event"):
            case "run_started":
                self.gone.clear()  # nodes are numbered anew
                if self.last_t is not None:
                    _keep(self.queues_s, max(0.0, t - self.last_t))
            case "fault" if line["kind"] == "node_lost":
                for node in line["nodes"]:
                    self.gone.setdefault(node, t)
            case "action" if line.get("name") == "exclude_node":  # of the line before: it is not lost
                for node in [node for node, lost_t in self.gone.items() if lost_t == t]:
                    del self.gone[node]
            case "generation_started":
                members = line.get("members")
                for node in [node for node in self.gone if isinstance(members, list) and node in members]:
                    _keep(self.returns_s, t - self.gone.pop(node))
            case "recovered" if line["downtime_s"] > 0:
                _keep(self.restarts_s, float(line["downtime_s"]))
        self.last_t = t

    @property
    def measured(self) -> Measured:
        """All that was found."""
        return Measured(tuple(self.returns_s), tuple(self.restarts_s), tuple(self.queues_s))


def _keep(found: list[float], seconds: float) -> None:
    found.append(seconds)
    del found[:-REMEMBERED]


def measured(events: Iterable[Mapping[str, Any]]) -> Measured:
    """What a ledger tells of all that."""
    found = Measuring()
    for line in events:
        found.take(line)
    return found.measured
