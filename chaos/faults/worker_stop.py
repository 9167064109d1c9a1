"""A worker is stopped."""

import signal

from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.processes import continues, is_gone, until

SEEN_S = 5.0  # who is stopped for as long is found


class WorkerStop(Outside):
    """A worker is stopped (SIGSTOP) for some seconds, as by a debugger; the runtime kills it before they are over."""

    aim = Aim.RANK
    undone = "it is continued (SIGCONT) if it is still there"

    seconds: float = Field(10.0, gt=0, description="for which it is stopped; what is as short as a step is nobody's fault")

    def expects(self) -> Expectation:
        kinds = frozenset({"stopped"}) if self.seconds >= SEEN_S else frozenset[str]()
        return Expectation(kinds, frozenset({"restart_workers"}), culprit=True)

    def inject(self, context: InjectionContext) -> Evidence:
        process = context.worker()
        context.guard.add(continues(process))
        process.send_signal(signal.SIGSTOP)
        until(lambda: is_gone(process) or process.status() == "stopped", f"process {process.pid} does not stop")
        if is_gone(process):
            raise CannotInject(f"process {process.pid} has ended before it was stopped")
        context.hold(self.seconds, unless=lambda: is_gone(process))
        return {"pid": process.pid, "state": "T", "killed": is_gone(process)}
