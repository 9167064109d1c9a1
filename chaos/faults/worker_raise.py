"""A worker raises an exception."""

from pydantic import Field

from chaos.fault import Expectation, Inside
from chaos.injectors.context import RankContext


class InjectedError(Exception):
    """Raised on purpose."""


class WorkerRaise(Inside):
    """A worker raises an exception in a step, once."""

    message: str = Field("a fault was injected here", description="of the exception")

    def expects(self) -> Expectation:
        return Expectation(frozenset({"exception"}), frozenset({"restart_workers"}), culprit=True)

    def strike(self, context: RankContext) -> None:
        raise InjectedError(f"{self.message} (rank {context.rank}, step {context.step})")
