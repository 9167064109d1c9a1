"""A snapshot daemon is killed."""

from chaos.fault import Aim, Evidence, Expectation, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.processes import end


class DaemonKill(Outside):
    """The snapshot daemon of a node is killed (SIGKILL); the next one finds what it held, and training goes on meanwhile."""

    aim = Aim.NODE

    def expects(self) -> Expectation:
        return Expectation(frozenset({"storage"}), frozenset({"degrade_tier"}), may_pass=True)

    def inject(self, context: InjectionContext) -> Evidence:
        process = context.snapshot_daemon()
        end(process)
        return {"pid": process.pid, "state": "gone"}
