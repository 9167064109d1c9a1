"""A worker ends by a segmentation fault."""

import signal

from chaos.fault import Aim, Evidence, Expectation, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.processes import end


class WorkerSegv(Outside):
    """A worker ends by SIGSEGV, as by a bug in a kernel or a driver."""

    aim = Aim.RANK

    def expects(self) -> Expectation:
        return Expectation(frozenset({"exit"}), frozenset({"restart_workers"}), culprit=True)

    def inject(self, context: InjectionContext) -> Evidence:
        process = context.worker()
        end(process, signal.SIGSEGV)
        return {"pid": process.pid, "state": "gone"}
