"""A worker leaves."""

import os

from pydantic import Field

from chaos.fault import Expectation, Inside
from chaos.injectors.context import RankContext


class WorkerExit(Inside):
    """A worker leaves in a step (`_exit`), without an exception and without a word."""

    code: int = Field(3, ge=0, le=255, description="with which it leaves; 0: as if it had finished")

    def expects(self) -> Expectation:
        return Expectation(frozenset({"exit"}), frozenset({"restart_workers"}), culprit=True)

    def strike(self, context: RankContext) -> None:
        os._exit(self.code)
