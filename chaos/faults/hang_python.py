"""A worker spins."""

from collections import deque
from itertools import repeat

from pydantic import Field

from chaos.fault import Expectation, Inside
from chaos.injectors.context import RankContext


class HangPython(Inside):
    """A worker goes round for ever in a loop of Python, or in one of an extension that never lets the interpreter go."""

    keep_interpreter: bool = Field(False, description="the loop is in C, and no other thread of the worker runs any more")

    def expects(self) -> Expectation:
        return Expectation(frozenset({"hang"}), frozenset({"restart_workers"}), culprit=True)

    def strike(self, context: RankContext) -> None:
        spin(keep_interpreter=self.keep_interpreter)


def spin(*, keep_interpreter: bool) -> None:
    """Never returns; its name is in the stacks."""
    while keep_interpreter:
        deque(repeat(None), maxlen=0)
    while True:
        pass
