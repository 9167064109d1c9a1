"""What a fault is: parameters, what it needs, what it does to its target, how that is undone, and what should come of it.

Each kind of fault is one small file of `chaos.faults`, named as the fault, with one subclass of `Outside` or `Inside`. Fields are
its parameters. Nothing here or in a fault file may import torch at the top: catalogues and injectors must start at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from chaos.injectors.context import InjectionContext, RankContext

Evidence = Mapping[str, object]


class Need(StrEnum):
    """What a fault cannot do without."""

    ROOT = "root"
    LAB = "lab"  # hosts of `resilient lab`: links, name service and clocks of their own
    SLURM = "slurm"
    ONE_MACHINE = "one machine"  # all nodes of the run are on it


class Aim(StrEnum):
    """What a fault is aimed at."""

    RANK = "rank"  # one worker
    NODE = "node"  # an agent with all that runs under it, or a node's link or tier
    RUN = "run"  # the driver, or what all nodes share


@dataclass(frozen=True)
class Expectation:
    """What should come of a fault, as the recovery ladder says.

    Attributes:
        kinds: of `fault` events, any of which reports it; empty: it need not be reported, and may be by any for which an action of
            `actions` was taken.
        actions: the actions of the recovery ladder that may be taken; empty: nothing may be done for it.
        culprit: whether the ledger must name the target (its rank, or its node).
        exits: codes with which the job may end because of it; the campaign is then started again. Beside 0.
        lost_steps: most that may have to be computed again, beyond the newest snapshot it left; None: back to whatever is left.
        rejected: whether a checkpoint may be found damaged because of it, and passed over (`checkpoint_rejected`).
        exact: whether losses and weights stay those of a run without faults, to the last bit.
        may_pass: it need not be reported, although `kinds` says as what.
    """

    kinds: frozenset[str] = frozenset()
    actions: frozenset[str] = frozenset()
    culprit: bool = False
    exits: frozenset[int] = frozenset()
    lost_steps: int | None = 1
    rejected: bool = False
    exact: bool = True
    may_pass: bool = False


class Fault(BaseModel):
    """Base of all faults. The class's docstring is its entry in the catalogue: the first line says what happens."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    aim: ClassVar[Aim]
    needs: ClassVar[frozenset[Need]] = frozenset()
    undone: ClassVar[str] = "nothing is left to undo"  # how it undoes itself, for the catalogue
    not_tiers: ClassVar[frozenset[Literal["memory", "durable"]]] = frozenset()  # kinds that its parameter `tier` must not name

    def expects(self) -> Expectation:
        """What the ladder should do about it, with these parameters."""
        raise NotImplementedError

    def lacks(self) -> str:
        """What it cannot do without beside its `needs`: parameters that were not given, or what is not here; empty: nothing."""
        return ""


class Outside(Fault):
    """Done to processes, links, tiers or files, by an injector: a process beside them (`chaos.injectors.injector`)."""

    # "node": the injector runs on the node that is aimed at; "machine": on the one from which the lab's hosts are made.
    site: ClassVar[Literal["node", "machine"]] = "node"

    def inject(self, context: "InjectionContext") -> Evidence:
        """Do it, and return once it has happened, with what shows that it has: process states, counters, mounts.

        What must be undone is given to `context.guard` *before* it is done. To last for a time, wait in `context.hold(seconds)`.

        Raises:
            CannotInject: there is nothing to do it to, or it did not take.
        """
        raise NotImplementedError


class Inside(Fault):
    """Done by a rank to itself, at a step: the worker finds an order to (`chaos.injectors.inside`)."""

    aim: ClassVar[Aim] = Aim.RANK
    when: ClassVar[str] = "step"  # phase of the training thread at whose begin it strikes

    def strike(self, context: "RankContext") -> None:
        """Do it; called in the training thread, at most once for an order, after the order was marked as taken.

        Raises:
            CannotInject: nothing was done; the rank trains on.
        """
        raise NotImplementedError

    def removal(self, order: str) -> Sequence[str] | None:
        """The command that removes, once the rank is gone, what an order of this name leaves on the rank's machine.

        Of the injector's guard, since all that a rank starts is ended with it. It must do no harm if the order was never taken.
        """
        return None


class CannotInject(Exception):
    """A fault found nothing to be done to, or had no effect. The message says what was expected and what was found."""


def describe(kind: type[Fault]) -> str:
    """Its first line for tables."""
    return (kind.__doc__ or "").strip().partition("\n")[0]


def parameters(kind: type[Fault]) -> list[tuple[str, str, Any, str]]:
    """Name, type, default and description of each parameter."""
    return [
        (name, str(getattr(field.annotation, "__name__", field.annotation)), field.default, field.description or "")
        for name, field in kind.model_fields.items()
    ]
