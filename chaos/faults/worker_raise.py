"""A worker raises an exception."""

from pydantic import Field

from chaos.fault import Expectation, Inside
from chaos.hands.scene import Place


class InjectedError(Exception):
    """Raised on purpose."""


class WorkerRaise(Inside):
    """A worker raises an exception in a step, once."""

    message: str = Field("a fault was injected here", description="of the exception")

    def expects(self) -> Expectation:
        return Expectation(frozenset({"exception"}), frozenset({"restart_workers"}), culprit=True)

    def strike(self, place: Place) -> None:
        raise InjectedError(f"{self.message} (rank {place.rank}, step {place.step})")
