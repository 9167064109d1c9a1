"""The driver is killed."""

import signal

from chaos.fault import Aim, Evidence, Expectation, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.processes import end


class DriverKill(Outside):
    """The driver is killed (SIGKILL), and takes agents and workers along; the same command, started again, goes on."""

    aim = Aim.RUN

    def expects(self) -> Expectation:
        # As a child's status, and as a shell or srun hands it on.
        return Expectation(exits=frozenset({-signal.SIGKILL, 128 + signal.SIGKILL}))

    def inject(self, context: InjectionContext) -> Evidence:
        process = context.driver()
        below = process.children(recursive=True)
        end(process)
        return {"pid": process.pid, "state": "gone", "below": len(below)}
