"""A worker is killed."""

from chaos.fault import Aim, Evidence, Expectation, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.processes import end


class WorkerKill(Outside):
    """A worker is killed (SIGKILL), as by an operator, or by a kernel that is out of memory."""

    aim = Aim.RANK

    def expects(self) -> Expectation:
        return Expectation(frozenset({"exit"}), frozenset({"restart_workers"}), culprit=True)

    def inject(self, context: InjectionContext) -> Evidence:
        process = context.worker()
        end(process)
        return {"pid": process.pid, "state": "gone"}
