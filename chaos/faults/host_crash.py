"""A host of the lab crashes."""

from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext
from resilient.imports import shadowing


class HostCrash(Outside):
    """A host falls silent at once and is gone, with all that ran on it and all that it held; later it is back, empty."""

    aim = Aim.NODE
    site = "machine"
    needs = frozenset({Need.ROOT, Need.LAB})
    undone = "the host is booted again, empty"

    seconds: float = Field(20.0, gt=0, description="after which it is booted again")

    def expects(self) -> Expectation:
        kinds = frozenset({"node_lost"})
        return Expectation(kinds, frozenset({"replace_node", "restart_agent", "shrink", "grow"}), culprit=True, lost_steps=None)

    def inject(self, context: InjectionContext) -> Evidence:
        from chaos.lab.lab import Lab
        from chaos.lab.shape import LabPaths

        name = context.target.host
        lab = Lab(LabPaths(context.lab))
        host = lab.host(name)
        processes = host.processes()
        context.guard.add([*shadowing.running("resilient"), "lab", "--name", context.lab, "boot", name])
        lab.crash(name)
        if host.exists():
            raise CannotInject(f"host {name} is still there")
        context.hold(self.seconds)
        return {"host": name, "processes": len(processes)}
