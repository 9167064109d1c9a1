"""A data loader hangs."""

import time

from chaos.fault import Expectation, Inside
from chaos.injectors.context import RankContext


class HangData(Inside):
    """A worker waits in phase `data` for a sample that never comes."""

    when = "data"

    def expects(self) -> Expectation:
        return Expectation(frozenset({"hang"}), frozenset({"restart_workers"}), culprit=True)

    def strike(self, context: RankContext) -> None:
        wait_for_a_sample()


def wait_for_a_sample() -> None:
    """Never returns; its name is in the stacks."""
    while True:
        time.sleep(600)
